// Host side of the kernel for few output channels, for one type of tensors.
#pragma once

#include <cuda_runtime.h>

#include "overlap_fprop.cuh"
#include "overlap_launch.h"
#include "shared_memory.h"
#include "tensor_map.h"

namespace upconv {

// Boxes of [planes][rows][channels][columns]: what a product's K lies along is the second
// innermost.
template <typename Operand>
cudaError_t describe_boxes(const OverlapParams& p, OverlapBoxes* boxes) {
  const auto encode = tensor_map_encoder();
  if (!encode) return cudaErrorNotSupported;
  constexpr cuuint64_t kBytes = sizeof(typename Operand::Element);
  const auto size = [](int64_t value) { return static_cast<cuuint64_t>(value); };
  const auto part = [](int value) { return static_cast<cuuint32_t>(value); };
  const cuuint64_t row = kBytes * size(p.in_w), plane = row * size(p.in_h);
  const cuuint64_t channel = plane * size(p.in_d);
  const cuuint64_t sizes[] = {size(p.in_w), size(p.in_channels), size(p.in_h), size(p.in_d),
                              size(p.batch) * size(p.groups)};
  const cuuint64_t strides[] = {channel, row, plane, channel * size(p.in_channels)};
  const cuuint32_t box[] = {part(p.pitch), part(p.channels), part(p.box_rows), part(p.planes), 1};
  const cuuint32_t steps[] = {1, 1, 1, 1, 1};
  const auto type = kBytes == 2       ? CU_TENSOR_MAP_DATA_TYPE_UINT16
                    : Operand::kSplit ? CU_TENSOR_MAP_DATA_TYPE_UINT32
                                      : CU_TENSOR_MAP_DATA_TYPE_TFLOAT32;
  const CUresult result =
      encode(reinterpret_cast<CUtensorMap*>(boxes), type, 5, const_cast<void*>(p.x), sizes, strides,
             box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE,
             CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

template <typename Operand>
cudaError_t launch_overlap_pack(const OverlapParams& p, const void* weight, void* packed,
                                cudaStream_t stream) {
  const int words = p.weight_bytes / 4;
  const dim3 blocks((words + kOverlapPackThreads - 1) / kOverlapPackThreads, p.groups);
  overlap::overlap_pack_kernel<Operand>
      <<<blocks, kOverlapPackThreads, 0, stream>>>(p, weight, packed);
  return cudaGetLastError();
}

template <typename Operand, bool kBoxes, int kM, int kN>
cudaError_t launch_overlap(const OverlapParams& p, cudaStream_t stream) {
  const auto kernel = overlap::overlap_fprop_kernel<Operand, kBoxes, kM, kN>;
  OverlapBoxes boxes;
  cudaError_t error = kBoxes ? describe_boxes<Operand>(p, &boxes) : cudaSuccess;
  if (error != cudaSuccess) return error;
  error = allow_shared(kernel, p.shared_bytes);
  if (error != cudaSuccess) return error;
  kernel<<<p.shares * p.groups, 32 * p.warps, p.shared_bytes, stream>>>(p, boxes);
  return cudaGetLastError();
}

// By every tile of a list.
#define UPCONV_OVERLAP_TRY(boxes_, m, n)                          \
  if (p.boxes == boxes_ && p.tiles_m == m && p.tiles_n == n) {    \
    return launch_overlap<Operand, boxes_ != 0, m, n>(p, stream); \
  }
#define UPCONV_OVERLAP_TRY_BOXES(m, n) UPCONV_OVERLAP_TRY(1, m, n)
#define UPCONV_OVERLAP_TRY_COPIES(m, n) UPCONV_OVERLAP_TRY(0, m, n)

}  // namespace upconv
