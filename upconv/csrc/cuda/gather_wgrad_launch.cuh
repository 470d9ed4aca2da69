// Host side of the mma.sync kernel for the weight's gradient, for one type of tensors.
#pragma once

#include "gather_launch.cuh"
#include "gather_wgrad.cuh"

namespace upconv {

// Two launches.
template <typename Operand, int kM, int kN>
cudaError_t launch_gather_tile(const GatherParams& p, cudaStream_t stream) {
  const cudaError_t error = launch_gather(gather::gather_wgrad_kernel<Operand, kM, kN>, p, stream);
  if (error != cudaSuccess) return error;
  constexpr int kThreads = gather::kGatherAddThreads;
  const gather::AddShape shape(p);
  gather::gather_wgrad_add<Operand>
      <<<shape.blocks(p), kThreads, kThreads * sizeof(float), stream>>>(p, shape);
  return cudaGetLastError();
}

template <typename Operand>
cudaError_t launch_gather_wgrad(const GatherParams& p, cudaStream_t stream) {
#define UPCONV_TRY(m, n) \
  if (p.tiles_m == m && p.tiles_n == n) return launch_gather_tile<Operand, m, n>(p, stream);
  UPCONV_GATHER_WGRAD_TILES(UPCONV_TRY)
#undef UPCONV_TRY
  return cudaErrorInvalidConfiguration;
}

}  // namespace upconv
