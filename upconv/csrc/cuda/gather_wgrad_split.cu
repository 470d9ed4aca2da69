// The mma.sync kernel for the weight's gradient, float32 tensors that must not be rounded; a file
// of its own so that all compile side by side.
#include "gather_wgrad_launch.cuh"

namespace upconv {

cudaError_t gather_wgrad_split(const GatherParams& p, cudaStream_t stream) {
  return launch_gather_wgrad<gather::Split>(p, stream);
}

}  // namespace upconv
