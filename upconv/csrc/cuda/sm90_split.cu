// The Hopper kernel for float32 that must not be rounded: entry, and the wide tiles.
#include "sm90_launch.cuh"

namespace upconv {

using Here = Split;
UPCONV_SM90_SPLIT_NARROW_TILES(UPCONV_SM90_ELSEWHERE)
UPCONV_SM90_SPLIT_ROW_TILES(UPCONV_SM90_ROWS_ELSEWHERE)

cudaError_t sm90_fprop_split(const Sm90Params& p, int multiprocessors, cudaStream_t stream) {
  return launch_fprop<Here>(p, multiprocessors, stream);
}

cudaError_t sm90_pack_split(const Sm90Params& p, const void* weight, void* packed,
                            cudaStream_t stream) {
  return launch_pack<Here>(p, weight, packed, stream);
}

}  // namespace upconv
