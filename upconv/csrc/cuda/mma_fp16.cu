// The mma.sync kernel for Fp16 operands; a file of its own so that the four compile side by side.
#include "mma_launch.cuh"

namespace upconv {

cudaError_t mma_fprop_fp16(const MmaParams& p, cudaStream_t stream) {
  return launch_mma<MmaFp16>(p, stream);
}

cudaError_t mma_pack_fp16(const MmaPlan& plan, const void* weight, void* packed,
                          cudaStream_t stream) {
  return launch_mma_pack<MmaFp16>(plan, weight, packed, stream);
}

}  // namespace upconv
