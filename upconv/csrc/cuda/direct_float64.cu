// The CUDA-core kernel for float64 tensors; a file of its own so that the four compile side by
// side.
#include "direct_launch.cuh"

namespace upconv {

cudaError_t direct_fprop_float64(const DirectParams& p, cudaStream_t stream) {
#define UPCONV_TRY(r, n) \
  if (p.rows == r) return launch_direct<double, r, n>(p, stream);
  UPCONV_DIRECT_DOUBLE_TILES(UPCONV_TRY)
#undef UPCONV_TRY
  return cudaErrorInvalidConfiguration;
}

}  // namespace upconv
