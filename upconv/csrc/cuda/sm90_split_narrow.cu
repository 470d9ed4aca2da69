// The Hopper kernel for Split operands: the narrow tiles.
#include "sm90_launch.cuh"

namespace upconv {

using Here = Split;
UPCONV_SM90_SPLIT_NARROW_TILES(UPCONV_SM90_HERE)

}  // namespace upconv
