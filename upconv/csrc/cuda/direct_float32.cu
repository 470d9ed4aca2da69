// The CUDA-core kernel for float32 tensors; a file of its own so that the four compile side by
// side.
#include "direct_launch.cuh"

namespace upconv {

cudaError_t direct_fprop_float32(const DirectParams& p, cudaStream_t stream) {
#define UPCONV_TRY_LONG(r, n) \
  if (p.set_aside >= 0 && p.rows == r) return launch_direct<float, r, n, true>(p, stream);
  UPCONV_DIRECT_LONG_TILES(UPCONV_TRY_LONG)
#undef UPCONV_TRY_LONG
#define UPCONV_TRY(r, n) \
  if (p.rows == r) return launch_direct<float, r, n>(p, stream);
  UPCONV_DIRECT_FLOAT_TILES(UPCONV_TRY)
#undef UPCONV_TRY
  return cudaErrorInvalidConfiguration;
}

}  // namespace upconv
