// Host side of the Hopper kernel for the weight's gradient of both phases of a row: plan integers
// in, two launches out.
#include "sm90_wgrad_phases.cuh"

#include <cuda_runtime.h>

#include "sm90_wgrad_boxes.h"
#include "sm90_wgrad_phases_launch.h"

namespace upconv {
namespace wgrad_phases {

// Every form the planner may ask for: TILES in upconv/planner/sm90_phases_wgrad.py is the same
// list.
#define UPCONV_PHASES_WGRAD_TILES(X) \
  X(128, 1) X(128, 2) X(128, 4) X(128, 8) X(64, 1) X(64, 2) X(64, 4) X(64, 8)
#define UPCONV_PHASES_WGRAD_OPERANDS(X) X(0, Tf32) X(1, Bf16) X(2, Fp16)

template <typename Operand, int N, int kRows>
cudaError_t launch_tile(const PhasesWgradParams& p, int multiprocessors, cudaStream_t stream) {
  auto kernel = sm90_wgrad_phases<Operand, N, kRows>;
  const int bytes = shared_bytes(p), units = unit_count(p);
  cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return error;
  CUtensorMap x{};
  // Whole rows of an image follow each other.
  constexpr bool whole = kRows > 1;
  const int size[] = {whole ? p.in_h * p.in_w : p.in_w, whole ? 1 : p.in_h, p.in_d, p.in_channels,
                      p.batch};
  error = describe_rows<Operand>(p.x, size, kInputBytes, N, true, &x);
  if (error != cudaSuccess) return error;
  const int blocks = units < multiprocessors ? units : multiprocessors;
  kernel<<<blocks, kThreads, bytes, stream>>>(p, x);
  error = cudaGetLastError();
  if (error != cudaSuccess) return error;
  const int threads = kTeamThreads * teams_of(p.workers);
  const int shared = threads * static_cast<int>(sizeof(float4));
  const unsigned all = static_cast<unsigned>(add_blocks(p)) + (p.sums ? p.out_channels : 0);
  sm90_wgrad_phases_add<Operand><<<all, threads, shared, stream>>>(p);
  return cudaGetLastError();
}

template <typename Operand>
cudaError_t launch(const PhasesWgradParams& p, int multiprocessors, cudaStream_t stream) {
#define UPCONV_TRY(n, many)            \
  if (p.tile_n == n && p.rows == many) \
    return launch_tile<Operand, n, many>(p, multiprocessors, stream);
  UPCONV_PHASES_WGRAD_TILES(UPCONV_TRY)
#undef UPCONV_TRY
  return cudaErrorInvalidConfiguration;
}

}  // namespace wgrad_phases

bool read_phases_wgrad_plan(const int64_t* record, int64_t length, PhasesWgradParams* plan) {
  int64_t at = 0;
  auto take = [&]() { return at < length ? static_cast<int>(record[at++]) : (++at, 0); };
#define UPCONV_READ(name) plan->name = take();
  UPCONV_PHASES_WGRAD_FIELDS(UPCONV_READ)
#undef UPCONV_READ
  return at == length && plan->tile_n > 0 && plan->workers > 0 && plan->rows > 0 &&
         plan->stages > 1 && plan->stages <= wgrad_phases::kMaxStages;
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
