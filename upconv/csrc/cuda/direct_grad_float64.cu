// The CUDA-core kernels for the gradients of float64 tensors; a file of its own so that the four
// compile side by side.
#include "direct_grad_launch.cuh"

namespace upconv {

cudaError_t direct_grad_float64(const DirectGradParams& p, cudaStream_t stream) {
#define UPCONV_TRY_INPUT(c) \
  if (p.inputs == 0 && p.columns == c) return launch_direct_igrad<double, c>(p, stream);
#define UPCONV_TRY_WEIGHT(a, c) \
  if (p.inputs == a && p.columns == c) return launch_direct_wgrad<double, a, c>(p, stream);
#if UPCONV_WITH_IGRAD
  UPCONV_DIRECT_IGRAD_COLUMNS(UPCONV_TRY_INPUT)
#endif
#if UPCONV_WITH_WGRAD
  UPCONV_DIRECT_WGRAD_DOUBLE_TILES(UPCONV_TRY_WEIGHT)
#endif
#undef UPCONV_TRY_WEIGHT
#undef UPCONV_TRY_INPUT
  return cudaErrorInvalidConfiguration;
}

}  // namespace upconv
