// What the launches of the mma.sync kernels for the gradients share.
#pragma once

#include <cuda_runtime.h>

#include "gather_launch.h"
#include "shared_memory.h"

namespace upconv {

template <typename Kernel>
cudaError_t launch_gather(Kernel kernel, const GatherParams& p, cudaStream_t stream) {
  const cudaError_t error = allow_shared(kernel, p.shared_bytes);
  if (error != cudaSuccess) return error;
  kernel<<<p.blocks, 32 * p.warps_m * p.warps_n * p.warps_k, p.shared_bytes, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace upconv
