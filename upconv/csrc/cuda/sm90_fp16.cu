// The Hopper kernel for Fp16 operands: entry, and the wide tiles.
#include "sm90_launch.cuh"

namespace upconv {

using Here = Fp16;
UPCONV_SM90_NARROW_TILES(UPCONV_SM90_ELSEWHERE)
UPCONV_SM90_DOUBLE_TILES(UPCONV_SM90_ELSEWHERE)
UPCONV_SM90_WIDE_ROW_TILES(UPCONV_SM90_ROWS_ELSEWHERE)
UPCONV_SM90_DOUBLE_ROW_TILES(UPCONV_SM90_ROWS_ELSEWHERE)

cudaError_t sm90_fprop_fp16(const Sm90Params& p, int multiprocessors, cudaStream_t stream) {
  return launch_fprop<Here>(p, multiprocessors, stream);
}

cudaError_t sm90_pack_fp16(const Sm90Params& p, const void* weight, void* packed,
                           cudaStream_t stream) {
  return launch_pack<Here>(p, weight, packed, stream);
}

}  // namespace upconv
