// The Hopper kernel for Bf16 operands; a file of its own so that the four compile side by side.
#include "sm90_launch.cuh"

namespace upconv {

cudaError_t sm90_fprop_bf16(const Sm90Params& p, int multiprocessors, cudaStream_t stream) {
  return launch_fprop<Bf16>(p, multiprocessors, stream);
}

cudaError_t sm90_pack_bf16(const Sm90Params& p, const void* weight, void* packed,
                           cudaStream_t stream) {
  return launch_pack<Bf16>(p, weight, packed, stream);
}

}  // namespace upconv
