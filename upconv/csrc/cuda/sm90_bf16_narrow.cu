// The Hopper kernel for Bf16 operands: the narrow tiles.
#include "sm90_launch.cuh"

namespace upconv {

using Here = Bf16;
UPCONV_SM90_NARROW_TILES(UPCONV_SM90_HERE)

}  // namespace upconv
