// The mma.sync kernel for Bf16 operands; a file of its own so that the four compile side by side.
#include "mma_launch.cuh"

namespace upconv {

cudaError_t mma_fprop_bf16(const MmaParams& p, cudaStream_t stream) {
  return launch_mma<MmaBf16>(p, stream);
}

cudaError_t mma_pack_bf16(const MmaPlan& plan, const void* weight, void* packed,
                          cudaStream_t stream) {
  return launch_mma_pack<MmaBf16>(plan, weight, packed, stream);
}

}  // namespace upconv
