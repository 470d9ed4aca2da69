// The Hopper kernel for float32 that must not be rounded; a file of its own so that the four
// compile side by side.
#include "sm90_launch.cuh"

namespace upconv {

cudaError_t sm90_fprop_split(const Sm90Params& p, int multiprocessors, cudaStream_t stream) {
  return launch_fprop<Split>(p, multiprocessors, stream);
}

cudaError_t sm90_pack_split(const Sm90Params& p, const void* weight, void* packed,
                            cudaStream_t stream) {
  return launch_pack<Split>(p, weight, packed, stream);
}

}  // namespace upconv
