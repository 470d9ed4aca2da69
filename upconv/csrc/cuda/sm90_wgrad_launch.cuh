// Host side of the Hopper kernel for the weight's gradient, for one operand type: two launches.
#pragma once

#include <cuda_runtime.h>

#include "shared_memory.h"
#include "sm90_wgmma_wgrad.cuh"
#include "sm90_wgrad_launch.h"
#include "tensor_map.h"

namespace upconv {

// Every form the planner may ask for: (C, N, G, T, pairs, odd). FORMS in
// upconv/planner/sm90_wgrad_jobs.py is the same list.
// clang-format off
#define UPCONV_WGRAD_FORMS(X)                                                                     \
  X(2, 64, 1, 4, 0, 0) X(3, 64, 1, 3, 0, 0) X(2, 64, 2, 2, 0, 0) X(2, 128, 2, 1, 0, 0)         \
  X(2, 64, 4, 1, 0, 0) X(3, 32, 1, 4, 0, 0) X(2, 32, 2, 3, 0, 0) X(3, 32, 2, 1, 0, 0)          \
  X(3, 32, 3, 1, 0, 0) X(3, 48, 1, 3, 0, 0) X(2, 64, 1, 4, 1, 0) X(2, 64, 2, 2, 1, 0)          \
  X(2, 128, 1, 2, 1, 0) X(2, 128, 2, 1, 1, 0)                                                  \
  X(3, 64, 1, 3, 0, 1) X(2, 64, 1, 4, 0, 1) X(3, 64, 1, 3, 0, 2) X(2, 64, 1, 4, 0, 2)          \
  X(3, 32, 1, 3, 0, 3) X(3, 64, 1, 3, 0, 3)
// clang-format on

// grad_output as the TMA sees it: points, rows, depths, images, channels. A box is one image's part
// of a plane, or that of all images of a chunk: then those of a channel lie side by side.
inline cudaError_t describe_boxes(const WgradParams& p, CUtensorMap* map) {
  const auto encode = tensor_map_encoder();
  if (!encode) return cudaErrorNotSupported;
  const int point = wgrad::point_bytes(p);
  // Odd rows come in words: a box of 256 of them has 512 elements.
  const int unit = p.odd ? 4 : point, in_unit = unit / point;
  const auto size = [](int64_t value) { return static_cast<cuuint64_t>(value); };
  const int64_t row = static_cast<int64_t>(p.out_w) * wgrad::element_bytes(p) / point;
  const int64_t slice = row * p.out_h, volume = slice * p.out_d;
  const int64_t whole[] = {row, slice, volume * p.classes};
  const cuuint64_t sizes[] = {size(whole[p.flat] / in_unit), size(p.flat ? 1 : p.out_h),
                              size(p.flat == 2 ? 1 : p.out_d), size(p.batch),
                              size(p.out_channels / p.classes)};
  const cuuint64_t strides[] = {size(row * point), size(slice * point),
                                size(volume * p.out_channels * point),
                                size(volume * p.classes * point)};
  // A stride of a dimension of one is never taken, but must be a multiple of 16 bytes.
  const cuuint64_t steps_of[] = {p.flat ? strides[2] : strides[0],
                                 p.flat == 2 ? strides[2] : strides[1], strides[2], strides[3]};
  const cuuint32_t steps[] = {1, 1, 1, 1, 1};
  const cuuint32_t box[] = {static_cast<cuuint32_t>(p.filled / in_unit), 1, 1,
                            static_cast<cuuint32_t>(p.together ? p.images : 1),
                            static_cast<cuuint32_t>(wgrad::class_rows(p))};
  // TF32 is rounded to nearest, but for the bias's gradient; all other numbers are bits.
  const auto type = p.operand == 0 && !p.sums ? CU_TENSOR_MAP_DATA_TYPE_TFLOAT32
                    : unit == 4               ? CU_TENSOR_MAP_DATA_TYPE_UINT32
                                              : CU_TENSOR_MAP_DATA_TYPE_UINT16;
  const CUresult result =
      encode(map, type, 5, const_cast<void*>(p.gy), sizes, steps_of, box, steps,
             CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE,
             CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

// The input as the TMA sees it: pixels, rows, depths, channels, images; a box is one slab. TF32 is
// rounded to nearest on the way.
inline cudaError_t describe_slabs(const WgradParams& p, CUtensorMap* map) {
  const auto encode = tensor_map_encoder();
  if (!encode) return cudaErrorNotSupported;
  const int element = wgrad::element_bytes(p);
  const auto size = [](int64_t value) { return static_cast<cuuint64_t>(value); };
  const cuuint64_t sizes[] = {size(p.in_w), size(p.in_h), size(p.in_d), size(p.in_channels),
                              size(p.batch)};
  cuuint64_t strides[4];
  cuuint64_t bytes = element;
  for (int i = 0; i < 4; ++i) strides[i] = bytes *= sizes[i];
  const cuuint32_t steps[] = {1, 1, 1, 1, 1};
  const cuuint32_t box[] = {static_cast<cuuint32_t>(p.slab / element), 1, 1,
                            static_cast<cuuint32_t>(p.tile_n), 1};
  const auto type =
      element == 4 ? CU_TENSOR_MAP_DATA_TYPE_TFLOAT32 : CU_TENSOR_MAP_DATA_TYPE_UINT16;
  const auto swizzle = p.slab == 128  ? CU_TENSOR_MAP_SWIZZLE_128B
                       : p.slab == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
                       : p.slab == 32 ? CU_TENSOR_MAP_SWIZZLE_32B
                                      : CU_TENSOR_MAP_SWIZZLE_NONE;
  const CUresult result =
      encode(map, type, 5, const_cast<void*>(p.x), sizes, strides, box, steps,
             CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
             CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

template <typename Operand, int C, int N, int G, int T, bool kPairs, int kOdd>
cudaError_t launch_wgrad_form(const WgradParams& p, cudaStream_t stream) {
  auto kernel = wgrad::sm90_wgmma_wgrad<Operand, C, N, G, T, kPairs, kOdd>;
  auto add = wgrad::sm90_wgrad_add<Operand>;
  constexpr int kThreads = 128 * (C + 1);
  const int bytes = wgrad::shared_bytes(p), blocks = wgrad_blocks(p);
  const int add_blocks = wgrad::add_blocks(p), add_bytes = wgrad::add_bytes(p);
  const int add_threads = wgrad::add_threads(p);
  cudaError_t error = allow_shared(kernel, bytes);
  if (error != cudaSuccess) return error;
  CUtensorMap gy{}, x{};
  if (wgrad::boxes(p) && (error = describe_boxes(p, &gy)) != cudaSuccess) return error;
  if (wgrad::slabs(p) && (error = describe_slabs(p, &x)) != cudaSuccess) return error;
  kernel<<<blocks, kThreads, bytes, stream>>>(p, gy, x);
  error = cudaGetLastError();
  if (error != cudaSuccess) return error;
  add<<<add_blocks, add_threads, add_bytes, stream>>>(p);
  return cudaGetLastError();
}

template <typename Operand>
cudaError_t launch_wgrad(const WgradParams& p, cudaStream_t stream) {
#define UPCONV_TRY(c, n, g, t, pair, rows)                                                     \
  if constexpr (!rows || sizeof(typename Operand::Element) == 2)                               \
    if (p.consumers == c && p.tile_n == n && p.groups == g && p.run == t && p.pairs == pair && \
        p.odd == rows)                                                                         \
      return launch_wgrad_form<Operand, c, n, g, t, pair, rows>(p, stream);
  UPCONV_WGRAD_FORMS(UPCONV_TRY)
#undef UPCONV_TRY
  return cudaErrorInvalidConfiguration;
}

}  // namespace upconv
