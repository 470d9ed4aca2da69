// The CUDA-core kernel for the weight's gradient of float64 tensors; a file of its own so that the four
// compile side by side.
#include "direct_wgrad_launch.cuh"

namespace upconv {

cudaError_t direct_wgrad_float64(const DirectWgradParams& p, cudaStream_t stream) {
#define UPCONV_TRY(a, c) \
  if (p.inputs == a && p.columns == c) return launch_direct_wgrad<double, a, c>(p, stream);
  UPCONV_DIRECT_WGRAD_DOUBLE_TILES(UPCONV_TRY)
#undef UPCONV_TRY
  return cudaErrorInvalidConfiguration;
}

}  // namespace upconv
