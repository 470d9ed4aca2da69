// The mma.sync kernels for the gradients of float32 tensors; a file of its own so that the three
// compile side by side.
#include "gather_launch.cuh"

namespace upconv {

cudaError_t gather_tf32(const GatherParams& p, cudaStream_t stream) {
  return launch_gather_grad<gather::Tf32>(p, stream);
}

}  // namespace upconv
