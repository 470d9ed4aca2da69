// Plan integers -> OverlapParams, and the choice of the tensors' type.
#include "operands.h"
#include "overlap_launch.h"
#include "plan_reader.h"

namespace upconv {

namespace {

// What follows from the planner's numbers; false where these make no sense.
bool complete(OverlapParams* plan) {
  OverlapParams& p = *plan;
  const int wide = p.type == 1 || p.type == 2 ? 16 : 8;
  p.in_plane = static_cast<int64_t>(p.in_d) * p.in_h * p.in_w;
  p.out_plane = static_cast<int64_t>(p.out_d) * p.out_h * p.out_w;
  p.channels = wide * p.steps;
  if (p.warps < 1 || 32 * p.warps > kOverlapThreads || p.warps_x < 1 || p.warps % p.warps_x != 0 ||
      p.channels < 1 || (p.channels & (p.channels - 1)) != 0 || p.stages < 2 || p.stages > 3)
    return false;
  p.rows = p.warps / p.warps_x;
  p.chunks = (p.in_channels + p.channels - 1) / p.channels;
  p.units_y = (p.count_y + p.rows - 1) / p.rows;
  p.units = p.batch * p.count_z * p.units_y * p.tiles_x;
  if (p.shares < 1) return false;
  p.each = p.units / p.shares;
  p.more = p.units % p.shares;
  p.even_taps = p.most_taps;
  for (int i = 0; i < p.phases; ++i)
    if (p.phase[i].taps < p.most_taps - 1) p.even_taps = 0;
  const struct {
    int divisor;
    Divider* by;
  } divisors[] = {{p.warps_x, &p.by_warps_x},       {p.shares, &p.by_shares},
                  {p.tiles_x, &p.by_tiles_x},       {p.units_y, &p.by_units_y},
                  {p.count_z, &p.by_count_z},       {p.shifts, &p.by_shifts},
                  {p.tiles_n, &p.by_tiles_n},       {p.box_rows, &p.by_rows},
                  {p.dilation_z, &p.by_dilation_z}, {p.dilation_y, &p.by_dilation_y}};
  for (const auto& each : divisors) {
    if (each.divisor < 1) return false;
    *each.by = Divider(each.divisor);
  }
  return true;
}

}  // namespace

bool read_overlap_plan(const int64_t* record, int64_t length, OverlapParams* plan) {
  PlanReader reader(record, length);
#define UPCONV_READ(name) reader.read(&plan->name);
  UPCONV_OVERLAP_FIELDS(UPCONV_READ)
#undef UPCONV_READ
  if (plan->shifts > kOverlapShifts || plan->sums > kOverlapSums || plan->sums < 1 ||
      plan->phases > kOverlapPhases || plan->phases != plan->stride_x)
    return false;
#define UPCONV_READ(name) reader.read(&each.name);
  for (int i = 0; i < plan->shifts; ++i) {
    OverlapShift& each = plan->shift[i];
    UPCONV_OVERLAP_SHIFT_FIELDS(UPCONV_READ)
  }
  for (int i = 0; i < plan->sums; ++i) {
    OverlapSum& each = plan->sum[i];
    UPCONV_OVERLAP_SUM_FIELDS(UPCONV_READ)
  }
  for (int i = 0; i < plan->phases; ++i) {
    OverlapPhase& each = plan->phase[i];
    UPCONV_OVERLAP_PHASE_FIELDS(UPCONV_READ)
  }
#undef UPCONV_READ
  return reader.whole() && complete(plan);
}

#define UPCONV_TYPES(X) X(0, tf32) X(1, bf16) X(2, fp16) X(3, split)
#define UPCONV_DECLARE(index, name)                                     \
  cudaError_t overlap_fprop_##name(const OverlapParams&, cudaStream_t); \
  cudaError_t overlap_pack_##name(const OverlapParams&, const void*, void*, cudaStream_t);
UPCONV_TYPES(UPCONV_DECLARE)
#undef UPCONV_DECLARE

int64_t overlap_packed_bytes(const OverlapParams& p) {
  return static_cast<int64_t>(p.groups) * p.weight_bytes;
}

cudaError_t overlap_pack(const OverlapParams& p, const void* weight, void* packed,
                         cudaStream_t stream) {
#define UPCONV_TRY(index, name)                                                 \
  if constexpr (is_here(index)) {                                               \
    if (p.type == index) return overlap_pack_##name(p, weight, packed, stream); \
  }
  UPCONV_TYPES(UPCONV_TRY)
#undef UPCONV_TRY
  return cudaErrorInvalidConfiguration;
}

cudaError_t overlap_fprop(const OverlapParams& p, cudaStream_t stream) {
#define UPCONV_TRY(index, name)                                  \
  if constexpr (is_here(index)) {                                \
    if (p.type == index) return overlap_fprop_##name(p, stream); \
  }
  UPCONV_TYPES(UPCONV_TRY)
#undef UPCONV_TRY
  return cudaErrorInvalidConfiguration;
}

}  // namespace upconv
