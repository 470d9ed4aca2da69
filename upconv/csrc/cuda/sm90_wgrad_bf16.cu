// The weight's gradient for Bf16 operands; a file of its own so that the three compile side by
// side.
#include "sm90_wgrad_launch.cuh"

namespace upconv {

cudaError_t sm90_wgrad_bf16(const WgradParams& p, cudaStream_t stream) {
  return launch_wgrad<Bf16>(p, stream);
}

}  // namespace upconv
