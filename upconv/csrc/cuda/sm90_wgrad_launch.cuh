// Host side of the Hopper kernel for the weight's gradient, for one operand type: two launches.
#pragma once

#include <cuda_runtime.h>

#include "sm90_wgmma_wgrad.cuh"
#include "sm90_wgrad_launch.h"

namespace upconv {

// Every form the planner may ask for: (C, N, G, T, pairs). FORMS in upconv/planner/sm90_wgrad.py
// is the same list.
// clang-format off
#define UPCONV_WGRAD_FORMS(X)                                                                  \
  X(2, 64, 1, 4, 0) X(3, 64, 1, 3, 0) X(2, 64, 2, 2, 0) X(2, 128, 2, 1, 0) X(2, 64, 4, 1, 0)   \
  X(3, 32, 1, 4, 0) X(2, 32, 2, 3, 0) X(3, 32, 3, 1, 0) X(3, 48, 1, 3, 0)                      \
  X(2, 64, 1, 4, 1) X(2, 64, 2, 2, 1) X(2, 128, 1, 2, 1) X(2, 128, 2, 1, 1)
// clang-format on

template <typename Operand, int C, int N, int G, int T, bool kPairs>
cudaError_t launch_wgrad_form(const WgradParams& p, cudaStream_t stream) {
  auto kernel = wgrad::sm90_wgmma_wgrad<Operand, C, N, G, T, kPairs>;
  const int bytes = wgrad::shared_bytes(p);
  const int kinds = p.jobs * p.channel_blocks;
  cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return error;
  kernel<<<kinds * p.workers, 128 * (C + 1), bytes, stream>>>(p);
  error = cudaGetLastError();
  if (error != cudaSuccess) return error;
  wgrad::sm90_wgrad_add<Operand><<<kinds * C * G * T*(N / 2), 128, 0, stream>>>(p);
  return cudaGetLastError();
}

template <typename Operand>
cudaError_t launch_wgrad(const WgradParams& p, cudaStream_t stream) {
#define UPCONV_TRY(c, n, g, t, pair)                                                       \
  if (p.consumers == c && p.tile_n == n && p.groups == g && p.run == t && p.pairs == pair) \
    return launch_wgrad_form<Operand, c, n, g, t, pair>(p, stream);
  UPCONV_WGRAD_FORMS(UPCONV_TRY)
#undef UPCONV_TRY
  return cudaErrorInvalidConfiguration;
}

}  // namespace upconv
