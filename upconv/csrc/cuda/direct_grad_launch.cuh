// Host side of the CUDA-core kernels for the gradients, for one type of tensors.
#pragma once

#include <cuda_runtime.h>

#include "direct_grad_launch.h"
#include "direct_igrad.cuh"
#include "direct_wgrad.cuh"
#include "shared_memory.h"

namespace upconv {

// Every tile of a thread that the planner may ask for: (input channels, columns), those of 16-bit
// types as "narrow", and columns where the input's gradient is computed. The same lists are in
// upconv/planner/direct_wgrad.py and direct_igrad.py.
#define UPCONV_DIRECT_WGRAD_FLOAT_TILES(X) X(1, 4) X(1, 8) X(1, 16) X(2, 8) X(4, 8) X(8, 4) X(8, 9)
#define UPCONV_DIRECT_WGRAD_NARROW_TILES(X) X(1, 4) X(1, 8) X(2, 8) X(4, 8) X(8, 4) X(8, 9)
#define UPCONV_DIRECT_WGRAD_DOUBLE_TILES(X) X(1, 8) X(4, 4)
#define UPCONV_DIRECT_IGRAD_COLUMNS(X) X(4) X(8) X(16)

template <typename Kernel>
cudaError_t launch_direct_grad(Kernel kernel, unsigned blocks, int warp_bytes,
                               const DirectGradParams& p, cudaStream_t stream) {
  const int bytes = p.warps * warp_bytes;
  const cudaError_t error = allow_shared(kernel, bytes);
  if (error != cudaSuccess) return error;
  kernel<<<blocks, 32 * p.warps, bytes, stream>>>(p);
  return cudaGetLastError();
}

// Two launches.
template <typename T, int kInputs, int kColumns>
cudaError_t launch_direct_wgrad(const DirectGradParams& p, cudaStream_t stream) {
  using Acc = direct::Sum<T>;
  const unsigned tiles = static_cast<unsigned>(p.groups) * p.tiles;
  constexpr int kWords = direct::kStaged<T> ? direct::kWgradStage<kInputs, kColumns> : 0;
  const cudaError_t error =
      launch_direct_grad(direct::direct_wgrad_kernel<T, kInputs, kColumns>, tiles * p.shares,
                         kWords * static_cast<int>(sizeof(Acc)), p, stream);
  if (error != cudaSuccess) return error;
  constexpr int kThreads = 32 * direct::kWgradAddRows;
  direct::direct_wgrad_add<T>
      <<<tiles*((p.sums + 31) / 32), kThreads, kThreads * sizeof(Acc), stream>>>(p);
  return cudaGetLastError();
}

template <typename T, int kColumns>
cudaError_t launch_direct_igrad(const DirectGradParams& p, cudaStream_t stream) {
  return launch_direct_grad(
      direct::direct_igrad_kernel<T, kColumns>, static_cast<unsigned>(p.groups) * p.shares,
      kColumns * kGradOutputs * static_cast<int>(sizeof(direct::Sum<T>)), p, stream);
}

}  // namespace upconv
