// Plan integers -> DepthwiseParams, and the choice of the tensors' type.
#include "depthwise_launch.h"

#include <algorithm>
#include <numeric>

#include "plan_reader.h"

namespace upconv {

#define UPCONV_TYPES(X) X(0, float32) X(1, bfloat16) X(2, float16)
#define UPCONV_DECLARE(index, name) \
  cudaError_t depthwise_grad_##name(const DepthwiseParams&, cudaStream_t);
UPCONV_TYPES(UPCONV_DECLARE)
#undef UPCONV_DECLARE

namespace {

constexpr int kMostShared = 227 * 1024;

int divided(int64_t count, int by) { return static_cast<int>((count + by - 1) / by); }

// The ring of grad_output: steps, rows of each and bytes of an element are the kernels'.
int ring_bytes(const DepthwiseParams& p) {
  const int element = p.type == 0 ? 4 : 2;
  const int steps = p.by_weight ? (p.type == 0 ? 4 : 8) : (p.type == 0 ? 3 : 5);
  const int rows = p.by_weight ? p.rows : kDepthwiseRows;
  return steps * rows * p.threads * kDepthwiseColumns * element;
}

// A place is left out after 2^shift of them, which no block straddles; 31: never.
int pad_shift(int stride) {
  int shift = 0, places = kDepthwisePad;
  while (places < stride) places *= 2;
  if (places > kDepthwiseMostPad || places % stride != 0) return 31;
  while (1 << shift < places) ++shift;
  return shift;
}

// What does not depend on the direction.
void derive(DepthwiseParams* plan) {
  DepthwiseParams& p = *plan;
  p.period = std::lcm(p.stride_x, kDepthwiseColumns);
  p.last_y = p.kernel_y - (p.reach_y - 1) * p.stride_y;
  p.last_x = p.kernel_x - (p.reach_x - 1) * p.stride_x;
  p.pad_shift = pad_shift(p.stride_x);
  p.taps = p.kernel_y * p.kernel_x;
  p.in_pitch = static_cast<int64_t>(p.folded ? p.channels : 1) * p.in_w;
  p.out_pitch = static_cast<int64_t>(p.folded ? p.channels : 1) * p.out_w;
  p.in_channel = p.folded ? p.in_w : static_cast<int64_t>(p.in_d) * p.in_h * p.in_w;
  p.out_channel = p.folded ? p.out_w : static_cast<int64_t>(p.out_d) * p.out_h * p.out_w;
  p.by_lanes = Divider(p.lanes);
  p.by_row_groups = Divider(p.row_groups);
  p.by_teams = Divider(p.teams);
  p.by_tiles_x = Divider(p.tiles_x);
  p.by_strips = Divider(p.strips);
  p.by_depth = Divider(p.by_weight ? p.deep : p.in_d);
  p.by_channels = Divider(p.channels);
  p.by_period = Divider(p.period);
  p.by_stride_y = Divider(p.stride_y);
  p.by_stride_x = Divider(p.stride_x);
  p.by_shares = Divider(p.shares);
  p.by_kernel_z = Divider(p.kernel_z);
  p.by_kernel_x = Divider(p.kernel_x);
  p.by_taps = Divider(p.taps);
  p.by_reach_x = Divider(p.reach_x);
  p.by_classes = Divider(p.period / kDepthwiseColumns);
}

void derive_igrad(DepthwiseParams* plan) {
  DepthwiseParams& p = *plan;
  const int columns = (p.tile + p.reach_x - 1) * p.stride_x;
  p.positions = columns + ((columns - 1) >> p.pad_shift);
  p.units = p.images * p.channels * p.in_d * p.strips * p.tiles_x;
  p.groups = divided(p.strip + p.reach_y - 1, kDepthwiseRows);
  p.threads = p.teams * p.lanes;
  p.blocks = divided(p.units, p.teams);
  const int weights = p.kernel_z * p.kernel_y * p.reach_x * p.period;
  const int sums = kDepthwiseRows * p.reach_x * p.positions;
  p.shared_bytes = ring_bytes(p) + p.teams * (weights + sums) * 4;
}

void derive_wgrad(DepthwiseParams* plan) {
  DepthwiseParams& p = *plan;
  p.x_columns = (p.tile + p.stride_x - 2) / p.stride_x + p.reach_x;
  p.first_row = p.padding_y / p.stride_y;
  p.units = p.images * p.deep * p.strips * p.tiles_x;
  p.each = divided(p.units, p.shares * p.teams);
  p.threads = p.block_channels * p.teams * p.row_groups * p.lanes;
  p.blocks = divided(p.channels, p.block_channels) * p.kernel_z * p.shares;
  const int input = (p.strip + p.reach_y - 1) * p.x_columns;
  const int class_lanes = p.period / kDepthwiseColumns;
  const int classes = p.block_channels * p.row_groups * class_lanes;
  const int members = p.teams * (p.lanes / class_lanes);
  const int sums = p.rows * p.reach_y * p.reach_x * kDepthwiseColumns;
  const int bytes = ring_bytes(p) + p.block_channels * p.teams * input * 4;
  p.shared_bytes = std::max({bytes, classes * std::max(members / 2, 1) * sums * 4, p.threads * 8});
}

}  // namespace

bool read_depthwise_plan(const int64_t* record, int64_t length, DepthwiseParams* plan) {
  bool fits = std::all_of(record, record + length, [](int64_t value) { return value >= 0; });
  PlanReader reader(record, length);
#define UPCONV_READ(name) reader.read(&plan->name);
  UPCONV_DEPTHWISE_FIELDS(UPCONV_READ)
#undef UPCONV_READ
  DepthwiseParams& p = *plan;
  for (const int one :
       {p.reach_y,  p.reach_x,  p.lanes,    p.row_groups, p.teams,    p.block_channels, p.tile,
        p.tiles_x,  p.strip,    p.strips,   p.deep,       p.shares,   p.channels,       p.in_d,
        p.kernel_z, p.kernel_y, p.kernel_x, p.stride_z,   p.stride_y, p.stride_x})
    fits = fits && one > 0;
  if (!fits || !reader.whole() || p.type > 2) return false;
  derive(plan);
  if (p.by_weight) {
    const int class_lanes = p.period / kDepthwiseColumns;
    if (p.rows < 1 || p.rows * p.row_groups < p.stride_y || p.lanes % class_lanes != 0 ||
        p.tile != kDepthwiseColumns * p.lanes)
      return false;
    derive_wgrad(plan);
  } else {
    derive_igrad(plan);
  }
  return p.threads <= kDepthwiseThreads && p.shared_bytes <= kMostShared;
}

int64_t depthwise_workspace_bytes(const DepthwiseParams& p) {
  const bool direct = p.shares == 1 && !(p.sums && p.stride_z > 1);
  if (!p.by_weight || direct) return 0;
  const int64_t kernels = static_cast<int64_t>(p.channels) * p.kernel_z;
  const int64_t bias = p.sums ? static_cast<int64_t>(p.channels) * p.shares * p.stride_z : 0;
  return kernels * p.shares * p.taps * 4 + bias * 8;
}

cudaError_t depthwise_grad(const DepthwiseParams& plan, cudaStream_t stream) {
  DepthwiseParams p = plan;
  // A tensor may begin anywhere that its elements may.
  while (reinterpret_cast<uintptr_t>(p.gy) % p.vector != 0) p.vector /= 2;
#define UPCONV_TRY(index, name) \
  if (p.type == index) return depthwise_grad_##name(p, stream);
  UPCONV_TYPES(UPCONV_TRY)
#undef UPCONV_TRY
  return cudaErrorInvalidConfiguration;
}

}  // namespace upconv
