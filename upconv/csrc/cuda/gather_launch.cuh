// Host side of the mma.sync kernels for the gradients, for one type of tensors.
#pragma once

#include <cuda_runtime.h>

#include "gather_igrad.cuh"
#include "gather_launch.h"
#include "gather_wgrad.cuh"

namespace upconv {

template <typename Kernel>
cudaError_t launch_gather(Kernel kernel, const GatherParams& p, cudaStream_t stream) {
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, p.shared_bytes);
  if (error != cudaSuccess) return error;
  kernel<<<p.blocks, 32 * p.warps_m * p.warps_n * p.warps_k, p.shared_bytes, stream>>>(p);
  return cudaGetLastError();
}

// Two launches.
template <typename Operand, int kM, int kN>
cudaError_t launch_gather_wgrad(const GatherParams& p, cudaStream_t stream) {
  const cudaError_t error = launch_gather(gather::gather_wgrad_kernel<Operand, kM, kN>, p, stream);
  if (error != cudaSuccess) return error;
  const int parts = p.jobs * p.groups * p.out_blocks * p.in_blocks * p.tap_blocks;
  constexpr int kThreads = 32 * gather::kGatherAddRows;
  gather::gather_wgrad_add<Operand>
      <<<parts*((p.sums + 31) / 32), kThreads, kThreads * sizeof(float), stream>>>(p);
  return cudaGetLastError();
}

template <typename Operand>
cudaError_t launch_gather_grad(const GatherParams& p, cudaStream_t stream) {
#define UPCONV_TRY_INPUT(n)           \
  if (!p.by_weight && p.tiles_n == n) \
    return launch_gather(gather::gather_igrad_kernel<Operand, n>, p, stream);
#define UPCONV_TRY_WEIGHT(m, n)                        \
  if (p.by_weight && p.tiles_m == m && p.tiles_n == n) \
    return launch_gather_wgrad<Operand, m, n>(p, stream);
#if UPCONV_WITH_IGRAD
  UPCONV_GATHER_IGRAD_TILES(UPCONV_TRY_INPUT)
#endif
#if UPCONV_WITH_WGRAD
  UPCONV_GATHER_WGRAD_TILES(UPCONV_TRY_WEIGHT)
#endif
#undef UPCONV_TRY_WEIGHT
#undef UPCONV_TRY_INPUT
  return cudaErrorInvalidConfiguration;
}

}  // namespace upconv
