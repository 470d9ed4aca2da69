// Rows of a tensor as the TMA brings them to the Hopper kernels for the weight's gradient.
#pragma once

#include "tensor_map.h"

namespace upconv {

// A tensor as the TMA sees it: columns, rows, depths, channels, images. A box is `bytes` of a row
// of some channels.
template <typename Operand>
inline cudaError_t describe_rows(const void* tensor, const int (&size)[5], int bytes, int channels,
                                 bool round, CUtensorMap* map) {
  const auto encode = tensor_map_encoder();
  if (!encode) return cudaErrorNotSupported;
  constexpr cuuint64_t kBytes = sizeof(typename Operand::Element);
  cuuint64_t sizes[5], strides[4], whole = kBytes;
  for (int i = 0; i < 5; ++i) sizes[i] = static_cast<cuuint64_t>(size[i]);
  for (int i = 0; i < 4; ++i) strides[i] = whole *= sizes[i];
  const cuuint32_t box[] = {static_cast<cuuint32_t>(bytes / kBytes), 1, 1,
                            static_cast<cuuint32_t>(channels), 1};
  const cuuint32_t steps[] = {1, 1, 1, 1, 1};
  const auto type = kBytes == 2 ? CU_TENSOR_MAP_DATA_TYPE_UINT16
                    : round     ? CU_TENSOR_MAP_DATA_TYPE_TFLOAT32
                                : CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
  const auto swizzle = bytes == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B;
  const CUresult result =
      encode(map, type, 5, const_cast<void*>(tensor), sizes, strides, box, steps,
             CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
             CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace upconv
