// Host side of the CUDA-core kernel for the weight's gradient, for one type of tensors: two
// launches.
#pragma once

#include <cuda_runtime.h>

#include "direct_wgrad.cuh"
#include "direct_wgrad_launch.h"

namespace upconv {

// Every tile of a thread that the planner may ask for: (input channels, columns). FLOAT_TILES and
// DOUBLE_TILES in upconv/planner/direct_wgrad.py are the same lists.
#define UPCONV_DIRECT_WGRAD_FLOAT_TILES(X) X(1, 4) X(1, 8) X(1, 16) X(2, 8) X(4, 8) X(8, 4) X(8, 9)
#define UPCONV_DIRECT_WGRAD_DOUBLE_TILES(X) X(1, 8) X(4, 4)

template <typename T, int kInputs, int kColumns>
cudaError_t launch_direct_wgrad(const DirectWgradParams& p, cudaStream_t stream) {
  const unsigned tiles = static_cast<unsigned>(p.groups) * p.tiles;
  direct::direct_wgrad_kernel<T, kInputs, kColumns>
      <<<tiles * p.shares, 32 * p.warps, 0, stream>>>(p);
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) return error;
  constexpr int kThreads = 32 * direct::kWgradAddRows;
  direct::direct_wgrad_add<T><<<tiles * ((p.sums + 31) / 32), kThreads,
                                kThreads * sizeof(direct::Sum<T>), stream>>>(p);
  return cudaGetLastError();
}

}  // namespace upconv
