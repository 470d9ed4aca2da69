// The weight's gradient for Tf32 operands; a file of its own so that the three compile side by
// side.
#include "sm90_wgrad_launch.cuh"

namespace upconv {

cudaError_t sm90_wgrad_tf32(const WgradParams& p, cudaStream_t stream) {
  return launch_wgrad<Tf32>(p, stream);
}

}  // namespace upconv
