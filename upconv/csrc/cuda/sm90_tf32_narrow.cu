// The Hopper kernel for Tf32 operands: the narrow tiles.
#include "sm90_launch.cuh"

namespace upconv {

using Here = Tf32;
UPCONV_SM90_NARROW_TILES(UPCONV_SM90_HERE)

}  // namespace upconv
