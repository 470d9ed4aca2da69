// The kernel for few output channels, float32 tensors as such; a file of its own so that all
// compile side by side.
#include "overlap_launch.cuh"

namespace upconv {

cudaError_t overlap_fprop_split(const OverlapParams& p, cudaStream_t stream) {
  using Operand = gather::Split;
  UPCONV_OVERLAP_SPLIT_TILES(UPCONV_OVERLAP_TRY_BOXES)
  return cudaErrorInvalidConfiguration;
}

cudaError_t overlap_pack_split(const OverlapParams& p, const void* weight, void* packed,
                               cudaStream_t stream) {
  return launch_overlap_pack<gather::Split>(p, weight, packed, stream);
}

}  // namespace upconv
