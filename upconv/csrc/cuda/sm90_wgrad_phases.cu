// Host side of the Hopper kernel for the weight's gradient of all phases of a row: plan integers
// in, two launches out.
#include "sm90_wgrad_phases.cuh"

#include <cuda_runtime.h>

#include "plan_reader.h"
#include "shared_memory.h"
#include "sm90_wgrad_boxes.h"
#include "sm90_wgrad_phases_launch.h"

namespace upconv {
namespace wgrad_phases {

// Every form the planner may ask for: FORMS in upconv/planner/sm90_phases_wgrad.py is the same
// list. Stride 2: channels of x in a tile, rows in a part; others: channels, stride, quads of a
// job; 2 x 2: channels, for 16-bit types with x brought by TMA and with x copied.
#define UPCONV_PHASES_WGRAD_TWO(X) \
  X(128, 1) X(128, 2) X(128, 4) X(128, 8) X(64, 1) X(64, 2) X(64, 4) X(64, 8)
#define UPCONV_PHASES_WGRAD_WIDE(X) X(128, 4, 1) X(128, 4, 2) X(128, 8, 2)
#define UPCONV_PHASES_WGRAD_SQUARE(X) X(128) X(64)
#define UPCONV_PHASES_WGRAD_OPERANDS(X) X(0, Tf32) X(1, Bf16) X(2, Fp16)

// Runs of grad_output's rows: boxes of `bytes` of some channels, in words.
template <typename Operand>
cudaError_t describe_runs(const PhasesWgradParams& p, int bytes, int channels, bool round,
                          CUtensorMap* map) {
  const auto encode = tensor_map_encoder();
  if (!encode) return cudaErrorNotSupported;
  constexpr int kNumber = sizeof(typename Operand::Element);
  const int size[] = {p.out_w * kNumber / 4, p.out_h, p.out_d, p.out_channels, p.batch};
  cuuint64_t sizes[5], strides[4], whole = 4;
  for (int i = 0; i < 5; ++i) sizes[i] = static_cast<cuuint64_t>(size[i]);
  for (int i = 0; i < 4; ++i) strides[i] = whole *= sizes[i];
  const cuuint32_t box[] = {static_cast<cuuint32_t>(bytes / 4), 1, 1,
                            static_cast<cuuint32_t>(channels), 1};
  const cuuint32_t steps[] = {1, 1, 1, 1, 1};
  const auto type = round ? CU_TENSOR_MAP_DATA_TYPE_TFLOAT32 : CU_TENSOR_MAP_DATA_TYPE_UINT32;
  const CUresult result =
      encode(map, type, 5, const_cast<void*>(p.gy), sizes, strides, box, steps,
             CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE,
             CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

template <typename Way, int N>
cudaError_t launch_way(const PhasesWgradParams& p, const CUtensorMap& gy, int multiprocessors,
                       cudaStream_t stream) {
  using Operand = typename Way::Operand;
  auto kernel = sm90_wgrad_phases<Way, N>;
  const int bytes = kHeader + p.stages * (input_bytes(p) + Way::kBytes), units = unit_count(p);
  cudaError_t error = allow_shared(kernel, bytes);
  if (error != cudaSuccess) return error;
  CUtensorMap x{};
  if (p.runs == 0) {
    const bool whole = p.rows > 1;  // rows of an image follow each other
    const int size[] = {whole ? p.in_h * p.in_w : p.in_w, whole ? 1 : p.in_h, p.in_d, p.in_channels,
                        p.batch};
    error = describe_rows<Operand>(p.x, size, kInputBytes, N, true, &x);
    if (error != cudaSuccess) return error;
  }
  const int blocks = units < multiprocessors ? units : multiprocessors;
  kernel<<<blocks, kThreads, bytes, stream>>>(p, x, gy);
  error = cudaGetLastError();
  if (error != cudaSuccess) return error;
  const int teams = teams_of(p.workers);
  const int quads = p.in_channels * p.out_channels * p.shape.rows * p.shape.quads;
  const int all = add_blocks(quads, teams) + (p.sums ? p.out_channels : 0);
  constexpr int kShared = kAddThreads * sizeof(float4);
  auto add =
      teams > 1 ? sm90_wgrad_phases_add<Operand, kMostTeams> : sm90_wgrad_phases_add<Operand, 1>;
  add<<<all, kAddThreads, kShared, stream>>>(p);
  return cudaGetLastError();
}

template <typename Operand, int kRows, int N>
cudaError_t launch_two(const PhasesWgradParams& p, int multiprocessors, cudaStream_t stream) {
  using Way = Two<Operand, kRows>;
  CUtensorMap gy{};
  if constexpr (Way::kBoxed) {
    const cudaError_t error = describe_runs<Operand>(p, Way::kChannelBytes, kGradRows, false, &gy);
    if (error != cudaSuccess) return error;
  }
  return launch_way<Way, N>(p, gy, multiprocessors, stream);
}

template <typename Operand, int kStride, int kQuads, int N>
cudaError_t launch_wide(const PhasesWgradParams& p, int multiprocessors, cudaStream_t stream) {
  using Way = Wide<Operand, kStride, kQuads>;
  CUtensorMap gy{};
  const cudaError_t error =
      describe_runs<Operand>(p, Way::kRunBytes, Way::kChannels, Way::kWide, &gy);
  if (error != cudaSuccess) return error;
  return launch_way<Way, N>(p, gy, multiprocessors, stream);
}

template <typename Operand, int N>
cudaError_t launch_square(const PhasesWgradParams& p, int multiprocessors, cudaStream_t stream) {
  CUtensorMap gy{};
  const cudaError_t error = describe_runs<Operand>(p, square_bytes(p), kGradRows, false, &gy);
  if (error != cudaSuccess) return error;
  if constexpr (sizeof(typename Operand::Element) == 2) {
    if (p.runs) return launch_way<Square<Operand, true>, N>(p, gy, multiprocessors, stream);
  }
  return launch_way<Square<Operand, false>, N>(p, gy, multiprocessors, stream);
}

template <typename Operand>
cudaError_t launch(const PhasesWgradParams& p, int multiprocessors, cudaStream_t stream) {
#define UPCONV_TRY(n) \
  if (p.square && p.tile_n == n) return launch_square<Operand, n>(p, multiprocessors, stream);
  UPCONV_PHASES_WGRAD_SQUARE(UPCONV_TRY)
#undef UPCONV_TRY
#define UPCONV_TRY(n, many)                               \
  if (p.tile_n == n && p.stride_x == 2 && p.rows == many) \
    return launch_two<Operand, many, n>(p, multiprocessors, stream);
  UPCONV_PHASES_WGRAD_TWO(UPCONV_TRY)
#undef UPCONV_TRY
#define UPCONV_TRY(n, stride, quads)                                 \
  if (p.tile_n == n && p.stride_x == stride && p.job_quads == quads) \
    return launch_wide<Operand, stride, quads, n>(p, multiprocessors, stream);
  UPCONV_PHASES_WGRAD_WIDE(UPCONV_TRY)
#undef UPCONV_TRY
  return cudaErrorInvalidConfiguration;
}

}  // namespace wgrad_phases

namespace {

// Does what a part has of x and of gy fit, where a quad is 2 x 2?
bool square_fits(const PhasesWgradParams& p) {
  using namespace wgrad_phases;
  if (p.square == 0) return p.runs == 0;
  const int runs = p.runs ? p.runs : 1;
  const bool sized = p.square > 0 && p.square % 2 == 0 && p.in_w > 0 && p.in_w % p.square == 0 &&
                     p.out_w == kTaps * p.in_w && p.rows == 1;
  if (!sized || p.runs < 0 || runs * square_bytes(p) > kMostSquareBytes) return false;
  // Loaders copy 16-bit numbers, and hand a stage over when they have the next.
  return p.runs == 0 || (p.operand > 0 && p.stages > 2 && p.in_h > 0 && p.in_d > 0 &&
                         p.runs * p.in_w <= kPartPixels<Bf16>);
}

}  // namespace

bool read_phases_wgrad_plan(const int64_t* record, int64_t length, PhasesWgradParams* plan) {
  PlanReader reader(record, length);
#define UPCONV_READ(name) reader.read(&plan->name);
  UPCONV_PHASES_WGRAD_FIELDS(UPCONV_READ)
#undef UPCONV_READ
  const bool fits = reader.whole() && plan->tile_n > 0 && plan->workers > 0 && plan->rows > 0 &&
                    plan->job_quads > 0 && plan->stages > 1 &&
                    plan->stages <= wgrad_phases::kMaxStages && plan->stride_z > 0 &&
                    plan->stride_y > 0 && plan->in_d > 0 && plan->in_h > 0 && plan->in_w > 0 &&
                    wgrad_phases::job_count(*plan) > 0 && square_fits(*plan);
  if (fits) plan->shape = wgrad_phases::shape_of(*plan);
  return fits;
}

int64_t phases_wgrad_workspace_bytes(const PhasesWgradParams& plan) {
  return wgrad_phases::workspace_bytes(plan);
}

cudaError_t phases_wgrad(const PhasesWgradParams& plan, int multiprocessors, cudaStream_t stream) {
#define UPCONV_TRY(index, name) \
  if (plan.operand == index) return wgrad_phases::launch<name>(plan, multiprocessors, stream);
  UPCONV_PHASES_WGRAD_OPERANDS(UPCONV_TRY)
#undef UPCONV_TRY
  return cudaErrorInvalidConfiguration;
}

}  // namespace upconv
