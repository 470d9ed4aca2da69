// Host side of the mma.sync kernel for the input's gradient, for one type of tensors.
#pragma once

#include "gather_igrad.cuh"
#include "gather_launch.cuh"

namespace upconv {

template <typename Operand>
cudaError_t launch_gather_igrad(const GatherParams& p, cudaStream_t stream) {
#define UPCONV_TRY(n) \
  if (p.tiles_n == n) return launch_gather(gather::gather_igrad_kernel<Operand, n>, p, stream);
  UPCONV_GATHER_IGRAD_TILES(UPCONV_TRY)
#undef UPCONV_TRY
  return cudaErrorInvalidConfiguration;
}

}  // namespace upconv
