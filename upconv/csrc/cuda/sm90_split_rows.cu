// The Hopper kernel for Split operands: the tiles that come in boxes of every few rows.
#include "sm90_launch.cuh"

namespace upconv {

using Here = Split;
UPCONV_SM90_SPLIT_ROW_TILES(UPCONV_SM90_ROWS_HERE)

}  // namespace upconv
