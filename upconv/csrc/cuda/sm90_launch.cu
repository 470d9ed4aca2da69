// Plan integers -> Sm90Params, and the choice of the operand type.
#include "sm90_launch.h"

#include "operands.h"

namespace upconv {

#define UPCONV_OPERANDS(X) X(0, tf32) X(1, bf16) X(2, fp16) X(3, split)
#define UPCONV_DECLARE(index, name)                                    \
  cudaError_t sm90_fprop_##name(const Sm90Params&, int, cudaStream_t); \
  cudaError_t sm90_pack_##name(const Sm90Params&, const void*, void*, cudaStream_t);
UPCONV_OPERANDS(UPCONV_DECLARE)
#undef UPCONV_DECLARE

static bool is_split(const Sm90Params& plan) { return plan.parts > 1; }

bool read_sm90_plan(const int64_t* record, int64_t length, Sm90Params* plan) {
  int64_t at = 0;
  auto take = [&]() { return at < length ? static_cast<int>(record[at++]) : (++at, 0); };
#define UPCONV_READ(name) plan->name = take();
  UPCONV_SM90_FIELDS(UPCONV_READ)
#undef UPCONV_READ
  if (plan->kinds > kMaxKinds || plan->pairs > kMaxPairs || plan->visits > kMaxVisits ||
      plan->jobs > kMaxJobs || plan->row_phases > kMaxRowPhases ||
      plan->width_phases > kMaxWidthPhases)
    return false;
  for (Sm90Axis& axis : plan->axis) {
    axis.kernel = take();
    axis.of_first = take();
    axis.base = take();
    axis.of_shift = take();
    axis.step = take();
  }
  for (int i = 0; i < plan->row_phases; ++i) plan->row_first[i] = static_cast<int16_t>(take());
  for (int i = 0; i < plan->width_phases; ++i) {
    plan->column_first[i] = static_cast<int16_t>(take());
  }
  for (int i = 0; i < plan->kinds; ++i) {
    Sm90Kind& kind = plan->kind[i];
    kind.first_z = take();
    kind.row = take();
    kind.first_x = take();
  }
  for (int i = 0; i < plan->pairs; ++i) {
    Sm90Pair& pair = plan->pair[i];
    pair.offset = take();
    pair.block = static_cast<int16_t>(take());
    pair.z = static_cast<int16_t>(take());
    pair.y = static_cast<int16_t>(take());
    pair.x = static_cast<int16_t>(take());
  }
  for (int i = 0; i < plan->visits; ++i) {
    Sm90Visit& visit = plan->visit[i];
    for (auto& lists : visit.list) {
      for (Sm90List& list : lists) {
        list.begin = static_cast<uint16_t>(take());
        list.count = static_cast<uint16_t>(take());
      }
    }
    for (uint16_t& steps : visit.steps) steps = static_cast<uint16_t>(take());
    visit.z = take();
    visit.y = take();
    visit.x = take();
  }
  for (int i = 0; i < plan->jobs; ++i) {
    Sm90Job& job = plan->job[i];
    for (int& kind : job.kind) kind = take();
    for (int& channel : job.channel) channel = take();
    job.weights = take();
    job.steps = take();
    job.visit = take();
    job.visits = take();
  }
  if (at != length) return false;
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
