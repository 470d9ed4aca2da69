// The mma.sync kernel for the input's gradient, float32 tensors; a file of its own so that all
// compile side by side.
#include "gather_igrad_launch.cuh"

namespace upconv {

cudaError_t gather_igrad_tf32(const GatherParams& p, cudaStream_t stream) {
  return launch_gather_igrad<gather::Tf32>(p, stream);
}

}  // namespace upconv
