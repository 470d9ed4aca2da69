// The Hopper kernel for Tf32 operands; a file of its own so that the four compile side by side.
#include "sm90_launch.cuh"

namespace upconv {

cudaError_t sm90_fprop_tf32(const Sm90Params& p, int multiprocessors, cudaStream_t stream) {
  return launch_fprop<Tf32>(p, multiprocessors, stream);
}

cudaError_t sm90_pack_tf32(const Sm90Params& p, const void* weight, void* packed,
                           cudaStream_t stream) {
  return launch_pack<Tf32>(p, weight, packed, stream);
}

}  // namespace upconv
