// The mma.sync kernel for Split operands; a file of its own so that the four compile side by side.
#include "mma_launch.cuh"

namespace upconv {

cudaError_t mma_fprop_split(const MmaParams& p, cudaStream_t stream) {
  return launch_mma<MmaSplit>(p, stream);
}

cudaError_t mma_pack_split(const MmaPlan& plan, const void* weight, void* packed,
                           cudaStream_t stream) {
  return launch_mma_pack<MmaSplit>(plan, weight, packed, stream);
}

}  // namespace upconv
