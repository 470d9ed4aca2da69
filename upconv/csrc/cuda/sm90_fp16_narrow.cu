// The Hopper kernel for Fp16 operands: the narrow tiles.
#include "sm90_launch.cuh"

namespace upconv {

using Here = Fp16;
UPCONV_SM90_NARROW_TILES(UPCONV_SM90_HERE)

}  // namespace upconv
