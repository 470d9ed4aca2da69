// Plan integers -> Sm90Params, and the choice of the operand type.
#include "sm90_launch.h"

#include "operands.h"
#include "plan_reader.h"

namespace upconv {

#define UPCONV_OPERANDS(X) X(0, tf32) X(1, bf16) X(2, fp16) X(3, split)
#define UPCONV_DECLARE(index, name)                                    \
  cudaError_t sm90_fprop_##name(const Sm90Params&, int, cudaStream_t); \
  cudaError_t sm90_pack_##name(const Sm90Params&, const void*, void*, cudaStream_t);
UPCONV_OPERANDS(UPCONV_DECLARE)
#undef UPCONV_DECLARE

static bool is_split(const Sm90Params& plan) { return plan.parts > 1; }

bool read_sm90_plan(const int64_t* record, int64_t length, Sm90Params* plan) {
  PlanReader reader(record, length);
#define UPCONV_READ(name) reader.read(&plan->name);
  UPCONV_SM90_FIELDS(UPCONV_READ)
#undef UPCONV_READ
  if (plan->kinds > kMaxKinds || plan->pairs > kMaxPairs || plan->visits > kMaxVisits ||
      plan->jobs > kMaxJobs || plan->row_phases > kMaxRowPhases ||
      plan->width_phases > kMaxWidthPhases)
    return false;
  for (Sm90Axis& axis : plan->axis) {
    reader.read(&axis.kernel);
    reader.read(&axis.of_first);
    reader.read(&axis.base);
    reader.read(&axis.of_shift);
    reader.read(&axis.step);
  }
  for (int i = 0; i < plan->row_phases; ++i) reader.read(&plan->row_first[i]);
  for (int i = 0; i < plan->width_phases; ++i) {
    reader.read(&plan->column_first[i]);
  }
  for (int i = 0; i < plan->kinds; ++i) {
    Sm90Kind& kind = plan->kind[i];
    reader.read(&kind.first_z);
    reader.read(&kind.row);
    reader.read(&kind.first_x);
  }
  for (int i = 0; i < plan->pairs; ++i) {
    Sm90Pair& pair = plan->pair[i];
    reader.read(&pair.offset);
    reader.read(&pair.block);
    reader.read(&pair.z);
    reader.read(&pair.y);
    reader.read(&pair.x);
  }
  for (int i = 0; i < plan->visits; ++i) {
    Sm90Visit& visit = plan->visit[i];
    for (auto& lists : visit.list) {
      for (Sm90List& list : lists) {
        reader.read(&list.begin);
        reader.read(&list.count);
      }
    }
    for (uint16_t& steps : visit.steps) reader.read(&steps);
    reader.read(&visit.z);
    reader.read(&visit.y);
    reader.read(&visit.x);
  }
  for (int i = 0; i < plan->jobs; ++i) {
    Sm90Job& job = plan->job[i];
    for (int& kind : job.kind) reader.read(&kind);
    for (int& channel : job.channel) reader.read(&channel);
    reader.read(&job.weights);
    reader.read(&job.steps);
    reader.read(&job.visit);
    reader.read(&job.visits);
  }
  if (!reader.whole()) return false;
  const auto by = [](int value) { return Divider(value > 0 ? value : 1); };
  plan->by_job_groups = by(plan->job_groups);
  plan->by_conv_groups = by(plan->conv_groups);
  plan->by_tiles_x = by(plan->tiles_x);
  plan->by_tiles_y = by(plan->tiles_y);
  plan->by_tiles_z = by(plan->tiles_z);
  return true;
}

int64_t sm90_packed_bytes(const Sm90Params& plan) {
  const int64_t scales = static_cast<int64_t>(plan.jobs) * plan.job_blocks * 64 + plan.out_channels;
  const int64_t behind = is_split(plan) ? plan.conv_groups * scales * 4 : 0;
  return packed_blocks(plan) * kStepBytes + (behind + 15) / 16 * 16;
}

int64_t sm90_workspace_bytes(const Sm90Params& plan) {
  return is_split(plan) ? kRangeBlocks * static_cast<int64_t>(sizeof(uint2)) : 0;
}

cudaError_t sm90_pack(const Sm90Params& plan, const void* weight, void* packed,
                      cudaStream_t stream) {
#define UPCONV_TRY(index, name)                                                       \
  if constexpr (is_here(index)) {                                                     \
    if (plan.operand == index) return sm90_pack_##name(plan, weight, packed, stream); \
  }
  UPCONV_OPERANDS(UPCONV_TRY)
#undef UPCONV_TRY
  return cudaErrorInvalidConfiguration;
}

cudaError_t sm90_fprop(const Sm90Params& plan, int multiprocessors, cudaStream_t stream) {
#define UPCONV_TRY(index, name)                                                         \
  if constexpr (is_here(index)) {                                                       \
    if (plan.operand == index) return sm90_fprop_##name(plan, multiprocessors, stream); \
  }
  UPCONV_OPERANDS(UPCONV_TRY)
#undef UPCONV_TRY
  return cudaErrorInvalidConfiguration;
}

}  // namespace upconv
