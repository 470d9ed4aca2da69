// The Hopper kernel for Bf16 operands: the double tiles that come in
// boxes of every few rows.
#include "sm90_launch.cuh"

namespace upconv {

using Here = Bf16;
UPCONV_SM90_DOUBLE_ROW_TILES(UPCONV_SM90_ROWS_HERE)

}  // namespace upconv
