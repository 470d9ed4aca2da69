// The kernel for few output channels, float16 tensors; a file of its own so that all compile side
// by side.
#include "overlap_launch.cuh"

namespace upconv {

cudaError_t overlap_fprop_fp16(const OverlapParams& p, cudaStream_t stream) {
  using Operand = gather::Fp16;
  UPCONV_OVERLAP_BOX_TILES(UPCONV_OVERLAP_TRY_BOXES)
  UPCONV_OVERLAP_COPY_TILES(UPCONV_OVERLAP_TRY_COPIES)
  return cudaErrorInvalidConfiguration;
}

cudaError_t overlap_pack_fp16(const OverlapParams& p, const void* weight, void* packed,
                              cudaStream_t stream) {
  return launch_overlap_pack<gather::Fp16>(p, weight, packed, stream);
}

}  // namespace upconv
