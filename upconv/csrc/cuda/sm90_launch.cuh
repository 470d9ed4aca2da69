// Host side of the Hopper kernel for one operand type: plan integers in, two launches out.
#pragma once

#include <cuda_runtime.h>

#include "shared_memory.h"
#include "sm90_fill.cuh"
#include "sm90_launch.h"
#include "sm90_wgmma_fprop.cuh"
#include "tensor_map.h"

namespace upconv {

// Every tile the planner may ask for: (N, MB). TILES in upconv/planner/sm90_tiling.py is the same
// list. In three parts: a kernel takes 7 s to compile, and parts compile side by side. (128, 1) and
// (64, 2) were the fastest for 6 % of 3100 drawn layers, by 7 % in the mean.
#define UPCONV_SM90_WIDE_TILES(X) X(256, 1) X(240, 1)
#define UPCONV_SM90_NARROW_TILES(X) X(216, 1) X(184, 1) X(64, 1)
#define UPCONV_SM90_DOUBLE_TILES(X) X(128, 2) X(104, 2)

// The tiles of boxes of every few rows (kCopyRows): ROW_TILES in upconv/planner/sm90_area.py.
// Hardly any other was the fastest, and 15 % are lost at most (kb75 in TF32).
#define UPCONV_SM90_WIDE_ROW_TILES(X) X(256, 1) X(216, 1)
#define UPCONV_SM90_DOUBLE_ROW_TILES(X) X(128, 2) X(104, 2)

// The same for split operands, whose consumers take half of a tile's N each (SPLIT_TILES).
#define UPCONV_SM90_SPLIT_WIDE_TILES(X) X(256, 1) X(224, 1) X(208, 1)
#define UPCONV_SM90_SPLIT_NARROW_TILES(X) X(128, 1) X(128, 2)
#define UPCONV_SM90_SPLIT_ROW_TILES(X) X(256, 1) X(208, 1)

// The input as the TMA sees it: columns, rows, depths, channels of a group, groups of all images;
// some channel blocks of a tile at a time. With the groups apart, channels past the end of one are
// zeros and not the next one's, whose NaN would survive zero weights.
// Where rows do not begin on 16 bytes: a few rows as one, which do together, then how many such lie
// in as many channels as begin on 16 bytes together, and so many channels as one.
template <typename Operand>
cudaError_t describe_boxes(const Sm90Params& p, CUtensorMap* map) {
  const auto encode = tensor_map_encoder();
  if (!encode) return cudaErrorNotSupported;
  constexpr cuuint64_t kBytes = sizeof(typename Operand::Element);
  const auto size = [](int64_t value) { return static_cast<cuuint64_t>(value); };
  const auto part = [](int value) { return static_cast<cuuint32_t>(value); };
  const bool grouped = p.copy == kCopyRows;
  const cuuint64_t rows = size(p.raw_classes) * size(p.in_d) * size(p.in_h);
  const cuuint64_t together = p.flat ? rows : size(1) << p.raw_shift;
  const cuuint64_t sizes[] = {size(p.in_w) * (grouped ? together : 1),
                              grouped ? rows / together : size(p.in_h), size(grouped ? 1 : p.in_d),
                              size(p.in_channels / p.raw_classes),
                              size(p.batch) * size(p.conv_groups)};
  cuuint64_t strides[4];
  cuuint64_t bytes = kBytes;
  for (int i = 0; i < 4; ++i) strides[i] = bytes *= sizes[i];
  // Rows are taken with a step, which the box spans; the step of the columns is the loaders' work.
  const cuuint32_t steps[] = {1, part(p.raw_step), 1, 1, 1};
  const cuuint32_t box[] = {part(p.raw_w), part(p.raw_rows * p.raw_step), 1,
                            part(p.raw_blocks * Operand::kBlockChannels / p.raw_classes),
                            part(p.tile_o)};
  const CUtensorMapDataType type = kBytes == 2       ? CU_TENSOR_MAP_DATA_TYPE_UINT16
                                   : Operand::kSplit ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32
                                                     : CU_TENSOR_MAP_DATA_TYPE_TFLOAT32;
  const CUresult result =
      encode(map, type, 5, const_cast<void*>(p.x), sizes, strides, box, steps,
             CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE,
             CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

template <typename Operand, int N, int MB, bool kRows>
cudaError_t launch_tile(const Sm90Params& p, int blocks, cudaStream_t stream) {
  auto kernel = sm90_wgmma_fprop<Operand, N, MB, kRows>;
  const int bytes = shared_bytes(p);
  cudaError_t error = allow_shared(kernel, bytes);
  if (error != cudaSuccess) return error;
  CUtensorMap map{};
  if (p.copy >= kCopyBoxes && (error = describe_boxes<Operand>(p, &map)) != cudaSuccess)
    return error;
  kernel<<<blocks, kThreads, bytes, stream>>>(p, map);
  return cudaGetLastError();
}

// For files that compile a part of the tiles, or leave it to another file; `Here` is their operand.
#define UPCONV_SM90_TILE(n, mb, rows)                                                         \
  template cudaError_t launch_tile<Here, n / Here::kShares, mb, rows>(const Sm90Params&, int, \
                                                                      cudaStream_t);
#define UPCONV_SM90_HERE(n, mb) UPCONV_SM90_TILE(n, mb, false)
#define UPCONV_SM90_ELSEWHERE(n, mb) extern UPCONV_SM90_TILE(n, mb, false)
#define UPCONV_SM90_ROWS_HERE(n, mb) UPCONV_SM90_TILE(n, mb, true)
#define UPCONV_SM90_ROWS_ELSEWHERE(n, mb) extern UPCONV_SM90_TILE(n, mb, true)

template <typename Operand>
cudaError_t launch_fprop(const Sm90Params& p, int multiprocessors, cudaStream_t stream) {
  if (p.fill_z || p.fill_y) {
    const int warps = kFillThreads / 32;
    const int64_t tasks = fill_planes(p) * fill_pieces<Operand>(p);
    const unsigned wide = static_cast<unsigned>((tasks + warps - 1) / warps);
    sm90_fill<Operand><<<wide, kFillThreads, 0, stream>>>(p);
    const cudaError_t error = cudaGetLastError();
    if (error != cudaSuccess) return error;
  }
  if constexpr (Operand::kSplit) {
    const int64_t area = static_cast<int64_t>(p.in_d) * p.in_h * p.in_w;
    const int64_t count = area * p.batch * p.conv_groups * p.in_channels;
    const auto* x = static_cast<const uint32_t*>(p.x);
    sm90_find_range<Operand><<<kRangeBlocks, kRangeThreads, 0, stream>>>(x, count, p.ranges);
    const cudaError_t error = cudaGetLastError();
    if (error != cudaSuccess) return error;
  }
  const int units = unit_count(p);
  int blocks = units < multiprocessors ? units : multiprocessors;
  // The units of a block are so many apart, and then all of the same jobs, whose weights stay.
  if (p.resident) blocks -= blocks % (p.job_groups * p.conv_groups);
#define UPCONV_TRY_EITHER(n, mb, rows)                                      \
  if (p.tile_n == n && p.job_blocks == mb && (p.copy == kCopyRows) == rows) \
    return launch_tile<Operand, n / Operand::kShares, mb, rows>(p, blocks, stream);
#define UPCONV_TRY(n, mb) UPCONV_TRY_EITHER(n, mb, false)
#define UPCONV_TRY_ROWS(n, mb) UPCONV_TRY_EITHER(n, mb, true)
  if constexpr (Operand::kSplit) {
    UPCONV_SM90_SPLIT_WIDE_TILES(UPCONV_TRY)
    UPCONV_SM90_SPLIT_NARROW_TILES(UPCONV_TRY)
    UPCONV_SM90_SPLIT_ROW_TILES(UPCONV_TRY_ROWS)
  } else {
    UPCONV_SM90_WIDE_TILES(UPCONV_TRY)
    UPCONV_SM90_NARROW_TILES(UPCONV_TRY)
    UPCONV_SM90_DOUBLE_TILES(UPCONV_TRY)
    UPCONV_SM90_WIDE_ROW_TILES(UPCONV_TRY_ROWS)
    UPCONV_SM90_DOUBLE_ROW_TILES(UPCONV_TRY_ROWS)
  }
#undef UPCONV_TRY_ROWS
#undef UPCONV_TRY
#undef UPCONV_TRY_EITHER
  return cudaErrorInvalidConfiguration;
}

template <typename Operand>
cudaError_t launch_pack(const Sm90Params& p, const void* weight, void* packed,
                        cudaStream_t stream) {
  int most = 1;
  for (int i = 0; i < p.jobs; ++i) {
    const int total = p.job[i].steps * (kStageBytes / 16);
    if (total > most) most = total;
  }
  if constexpr (Operand::kSplit) {
    const dim3 channels(p.out_channels, p.conv_groups);
    const auto* numbers = static_cast<const uint32_t*>(weight);
    sm90_scale_channels<Operand><<<channels, 256, 0, stream>>>(p, numbers, packed);
    const cudaError_t error = cudaGetLastError();
    if (error != cudaSuccess) return error;
  }
  const dim3 grid((most + 255) / 256, p.jobs, p.conv_groups);
  sm90_pack_weights<Operand><<<grid, 256, 0, stream>>>(
      p, static_cast<const typename Operand::Element*>(weight), static_cast<uint4*>(packed));
  return cudaGetLastError();
}

}  // namespace upconv
