// The kernels for the gradients of depthwise layers in float32; a file of its own so that the three
// compile side by side.
#include "depthwise_launch.cuh"

namespace upconv {

cudaError_t depthwise_grad_float32(const DepthwiseParams& p, cudaStream_t stream) {
  return launch_depthwise_grad<float>(p, stream);
}

}  // namespace upconv
