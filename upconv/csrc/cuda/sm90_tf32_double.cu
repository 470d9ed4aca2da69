// The Hopper kernel for Tf32 operands: the double tiles.
#include "sm90_launch.cuh"

namespace upconv {

using Here = Tf32;
UPCONV_SM90_DOUBLE_TILES(UPCONV_SM90_HERE)

}  // namespace upconv
