// The Hopper kernel for Fp16 operands; a file of its own so that the four compile side by side.
#include "sm90_launch.cuh"

namespace upconv {

cudaError_t sm90_fprop_fp16(const Sm90Params& p, int multiprocessors, cudaStream_t stream) {
  return launch_fprop<Fp16>(p, multiprocessors, stream);
}

cudaError_t sm90_pack_fp16(const Sm90Params& p, const void* weight, void* packed,
                           cudaStream_t stream) {
  return launch_pack<Fp16>(p, weight, packed, stream);
}

}  // namespace upconv
