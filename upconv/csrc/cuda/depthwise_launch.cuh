// Launches the kernels for the gradients of depthwise layers; each type's are compiled in a file of
// their own.
#pragma once

#include "depthwise_igrad.cuh"
#include "depthwise_launch.h"
#include "depthwise_wgrad.cuh"
#include "shared_memory.h"

namespace upconv {

// What the kernels are compiled for: reach_y and reach_x, and by weight the rows of a thread before
// them. The same lists are in upconv/planner/depthwise_igrad.py and depthwise_wgrad.py.
#define UPCONV_DEPTHWISE_IGRAD_FORMS(X) X(1, 1) X(1, 2) X(2, 1) X(2, 2)
#define UPCONV_DEPTHWISE_WGRAD_FORMS(X) \
  X(1, 1, 1) X(1, 1, 2) X(2, 1, 1) X(2, 1, 2) X(2, 2, 1) X(2, 2, 2)

template <typename Kernel>
cudaError_t launch_depthwise(Kernel kernel, const DepthwiseParams& p, cudaStream_t stream) {
  const cudaError_t error = allow_shared(kernel, p.shared_bytes);
  if (error != cudaSuccess) return error;
  kernel<<<p.blocks, p.threads, p.shared_bytes, stream>>>(p);
  return cudaGetLastError();
}

template <typename T, int kReachY, int kReachX>
cudaError_t launch_depthwise_igrad(const DepthwiseParams& p, cudaStream_t stream) {
  return launch_depthwise(direct::depthwise_igrad_kernel<T, kReachY, kReachX>, p, stream);
}

// One launch, or two.
template <typename T, int kRows, int kReachY, int kReachX>
cudaError_t launch_depthwise_wgrad(const DepthwiseParams& p, cudaStream_t stream) {
  const cudaError_t error =
      launch_depthwise(direct::depthwise_wgrad_kernel<T, kRows, kReachY, kReachX>, p, stream);
  if (error != cudaSuccess || depthwise_workspace_bytes(p) == 0) return error;
  constexpr int kThreads = direct::kDepthwiseAddThreads;
  const int sums = p.channels * (p.kernel_z * p.taps + p.sums);
  direct::depthwise_wgrad_add<T><<<(sums + kThreads - 1) / kThreads, kThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

// Every kernel of a type, as far as the library has them.
template <typename T>
cudaError_t launch_depthwise_grad(const DepthwiseParams& p, cudaStream_t stream) {
#define UPCONV_TRY_INPUT(y, x)                          \
  if (!p.by_weight && p.reach_y == y && p.reach_x == x) \
    return launch_depthwise_igrad<T, y, x>(p, stream);
#define UPCONV_TRY_WEIGHT(r, y, x)                                    \
  if (p.by_weight && p.rows == r && p.reach_y == y && p.reach_x == x) \
    return launch_depthwise_wgrad<T, r, y, x>(p, stream);
#if UPCONV_WITH_IGRAD
  UPCONV_DEPTHWISE_IGRAD_FORMS(UPCONV_TRY_INPUT)
#endif
#if UPCONV_WITH_WGRAD
  UPCONV_DEPTHWISE_WGRAD_FORMS(UPCONV_TRY_WEIGHT)
#endif
#undef UPCONV_TRY_WEIGHT
#undef UPCONV_TRY_INPUT
  return cudaErrorInvalidConfiguration;
}

}  // namespace upconv
