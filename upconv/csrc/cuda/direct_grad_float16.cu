// The CUDA-core kernel for the weight's gradient of float16 tensors; a file of its own so that the
// four compile side by side.
#include "direct_grad_launch.cuh"

namespace upconv {

cudaError_t direct_grad_float16(const DirectGradParams& p, cudaStream_t stream) {
#define UPCONV_TRY(a, c) \
  if (p.inputs == a && p.columns == c) return launch_direct_wgrad<__half, a, c>(p, stream);
  UPCONV_DIRECT_WGRAD_NARROW_TILES(UPCONV_TRY)
#undef UPCONV_TRY
  return cudaErrorInvalidConfiguration;
}

}  // namespace upconv
