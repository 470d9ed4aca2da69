// The mma.sync kernel for Tf32 operands; a file of its own so that the four compile side by side.
#include "mma_launch.cuh"

namespace upconv {

cudaError_t mma_fprop_tf32(const MmaParams& p, cudaStream_t stream) {
  return launch_mma<MmaTf32>(p, stream);
}

cudaError_t mma_pack_tf32(const MmaPlan& plan, const void* weight, void* packed,
                          cudaStream_t stream) {
  return launch_mma_pack<MmaTf32>(plan, weight, packed, stream);
}

}  // namespace upconv
