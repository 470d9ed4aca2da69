// Host side of the CUDA-core kernel for one type of tensors.
#pragma once

#include <cuda_runtime.h>

#include "direct_fprop.cuh"
#include "direct_launch.h"
#include "shared_memory.h"

namespace upconv {

// Every tile of a thread that the planner may ask for: (rows, points). The same lists are in
// upconv/planner/direct_tiling.py. 9 is 3 x 3 phases, 12 is 3 phases of 4 channels; long sums of
// float32 are added up in two steps.
#define UPCONV_DIRECT_FLOAT_TILES(X) X(1, 8) X(2, 8) X(4, 8) X(8, 8) X(9, 8) X(12, 6)
#define UPCONV_DIRECT_DOUBLE_TILES(X) X(1, 4) X(4, 4) X(8, 4)
#define UPCONV_DIRECT_LONG_TILES(X) X(1, 8) X(4, 8) X(8, 4) X(9, 4)

template <typename T, int kRows, int kPoints, bool kTwoSteps = false>
cudaError_t launch_direct(const DirectParams& p, cudaStream_t stream) {
  auto kernel = direct::direct_fprop_kernel<T, kRows, kPoints, kTwoSteps>;
  const cudaError_t error = allow_shared(kernel, p.shared_bytes);
  if (error != cudaSuccess) return error;
  const unsigned blocks = static_cast<unsigned>(p.groups) * p.row_blocks * p.blocks;
  kernel<<<blocks, p.threads, p.shared_bytes, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace upconv
