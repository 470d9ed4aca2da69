// The Hopper kernel for Fp16 operands: the double tiles.
#include "sm90_launch.cuh"

namespace upconv {

using Here = Fp16;
UPCONV_SM90_DOUBLE_TILES(UPCONV_SM90_HERE)

}  // namespace upconv
