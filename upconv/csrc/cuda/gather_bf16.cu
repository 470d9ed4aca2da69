// The mma.sync kernels for the gradients of bfloat16 tensors; a file of its own so that the three
// compile side by side.
#include "gather_launch.cuh"

namespace upconv {

cudaError_t gather_bf16(const GatherParams& p, cudaStream_t stream) {
  return launch_gather_grad<gather::Bf16>(p, stream);
}

}  // namespace upconv
