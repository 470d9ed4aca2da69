// Transposed convolution on the CUDA cores, for what tensor cores do not serve well: depthwise
// layers, few channels, one output channel, float64, strict float32 of small layers.
//
// The idea. Read by points instead of by outputs, a transposed convolution is a small matrix
// product: at every point q, all phases of all output channels ("rows") are sums over the same few
// inputs around q. A thread holds kRows x kPoints sums: rows that share their inputs, and points
// that share their weights. Width phases are neighbouring rows, so that the outputs of neighbouring
// points follow each other in memory.
//
// A block of up to 4 warps takes a tile of points and up to 4 sets of rows:
//   fill      inputs of a few channels, converted to the type of the sums, zero outside the image;
//             weights of the same channels as [set of rows][channel][offset][row]
//   multiply  for each channel and offset: kPoints inputs (neighbouring lanes read neighbouring
//             words) and kRows weights (all lanes read the same) give kRows x kPoints products
//   store     sums of 2, 4 or 8 neighbouring phases leave straight from the registers; others lie
//             down in the memory of the tile in the order of the output first, and leave as whole
//             sectors
// Tile rows follow each other with their margins, so that points are numbered straight through and
// every tap is one offset; points that fall on margins are computed and not stored. Blocks that
// share a multiprocessor hide each other's fill and stores; nothing is pipelined within one.
#pragma once

#include "direct_fill.cuh"
#include "direct_store.cuh"

namespace upconv::direct {

// --- Multiply --------------------------------------------------------------------------------

template <int kRows, int kPoints, typename Acc>
__device__ __forceinline__ void move_to(Acc (&to)[kRows][kPoints], Acc (&sums)[kRows][kPoints]) {
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
#pragma unroll
    for (int j = 0; j < kPoints; ++j) {
      to[r][j] += sums[r][j];
      sums[r][j] = Acc(0);
    }
  }
}

template <int kRows, typename Acc>
__device__ __forceinline__ void load_weights(const Acc* source, Acc (&w)[kPaddedRows<kRows>]) {
  constexpr int kVector = kRows == 1 ? 1 : sizeof(Acc) == 8 || kRows == 2 ? 2 : 4;
  constexpr int kWhole = kRows / kVector * kVector;
#pragma unroll
  for (int r = 0; r < kWhole; r += kVector) {
    const auto part = *reinterpret_cast<const Vector<Acc, kVector>*>(source + r);
#pragma unroll
    for (int i = 0; i < kVector; ++i) w[r + i] = part.at[i];
  }
#pragma unroll
  for (int r = kWhole; r < kRows; ++r) w[r] = source[r];
}

// kTwoSteps: after some channels a thread adds what it has to its older sums and starts afresh.
// Float32 that must be exact is added up so: 504 products in one sum had 6 times the error of
// PyTorch's kernel. (Older sums in shared memory, with twice the points: twice the time.)
template <bool kTwoSteps, int kRows, int kPoints, typename Acc>
__device__ __forceinline__ void multiply(const DirectParams& p, const DirectKind& kind,
                                         int channels, const Acc* inputs, const Acc* weights,
                                         Acc (&sums)[kRows][kPoints],
                                         [[maybe_unused]] Acc (&older)[kRows][kPoints]) {
  for (int c = 0; c < channels; ++c) {
#pragma unroll(sizeof(Acc) == 8 ? 1 : 2)
    for (int i = kind.begin; i < kind.end; ++i) {
      Acc w[kPaddedRows<kRows>], x[kPoints];
      load_weights<kRows>(weights, w);
      const Acc* const source = inputs + p.offset[i];
#pragma unroll
      for (int j = 0; j < kPoints; ++j) x[j] = source[j * 32];
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
#pragma unroll
        for (int j = 0; j < kPoints; ++j) sums[r][j] += w[r] * x[j];
      }
      weights += kPaddedRows<kRows>;
    }
    inputs += p.channel;
    if constexpr (kTwoSteps) {
      if ((c & p.set_aside) == p.set_aside) move_to(older, sums);
    }
  }
}

// --- The kernel ------------------------------------------------------------------------------

// Four blocks a multiprocessor leave 128 registers a thread: enough for 72 sums and what they need.
// Fewer sums mean more stores to hide, by more blocks.
template <typename T, int kRows, int kPoints, bool kTwoSteps>
__global__ void __launch_bounds__(kDirectMaxThreads, kTwoSteps    ? 4
                                                     : kRows <= 2 ? 6
                                                     : kRows == 4 ? 5
                                                                  : 4)
    direct_fprop_kernel(const __grid_constant__ DirectParams p) {
  using Acc = Sum<T>;
  static_assert((kTwoSteps ? 2 : 1) * kRows * kPoints * sizeof(Acc) <= 288,
                "more sums than registers");
  extern __shared__ __align__(16) unsigned char raw_memory[];
  const int warp = threadIdx.x / 32, row_warp = warp % p.row_warps;
  const int point_warps = p.warps / p.row_warps;
  const int row_block = blockIdx.x / p.blocks % p.row_blocks;
  const int group = blockIdx.x / p.blocks / p.row_blocks;
  const DirectRows rows(p, row_block * p.row_warps + row_warp);
  const DirectKind& kind = p.kind[rows.kind];
  // Kinds are sorted by their number of offsets: the first set of rows of a block has most.
  const DirectKind& longest = p.kind[DirectRows(p, row_block * p.row_warps).kind];
  const bool idle = longest.begin == longest.end;

  // [set of rows] taps, [set of rows][bias, then weights][row], then the tile, which the sums
  // overwrite
  int16_t* const all_taps = reinterpret_cast<int16_t*>(raw_memory);
  int16_t* const taps = all_taps + row_warp * p.most_taps * p.phases;
  Acc* const memory = reinterpret_cast<Acc*>(raw_memory + p.tap_bytes);
  const int weight_words = (1 + p.chunk * p.most_taps) * kPaddedRows<kRows>;
  Acc* const bias = memory + row_warp * weight_words;
  Acc* const weights = bias + kPaddedRows<kRows>;
  Acc* const tile = memory + (p.row_warps * weight_words + 3) / 4 * 4;  // stores are vectors
  const int point_warp = warp / p.row_warps;
  const int lane = threadIdx.x % 32 + 32 * point_warp;
  const int begin = point_warp * kPoints * 32, points = point_warps * kPoints * 32;
  const int line = points * p.width + (points * p.width >> 5) * p.skew;
  Acc* const stage = tile + row_warp * (kRows / p.width) * line;
  const int row_group = (threadIdx.x % 32 >> p.row_shift) + (point_warp * 32 >> p.row_shift);
  const int row_groups = point_warps * 32 >> p.row_shift;

  const T* const w = static_cast<const T*>(p.w) + static_cast<int64_t>(group) * p.weight_group +
                     static_cast<int64_t>(rows.channel) * p.weight_out;
  const int64_t first_channel = static_cast<int64_t>(group) * p.out_channels + rows.channel;
  if (point_warp == 0 && threadIdx.x % 32 < kRows) {
    const int channel = threadIdx.x % 32 / p.phases;
    const bool biased = p.bias != nullptr && rows.channel + channel < p.out_channels;
    bias[threadIdx.x % 32] =
        biased ? widen(static_cast<const T*>(p.bias)[first_channel + channel]) : Acc(0);
  }
  for (int i = lane; i < (kind.end - kind.begin) * p.phases; i += 32 * point_warps) {
    taps[i] = p.tap[kind.taps + i];
  }
  __syncthreads();

  const int units = p.batch * p.tiles_z * p.tiles_y * p.tiles_x;
  const int unit_begin = blockIdx.x % p.blocks * p.repeats;
  const int unit_end = min(unit_begin + p.repeats, units);
  const DirectPosition position(p);
  DirectUnit unit(p, unit_begin);
  for (int index = unit_begin; index < unit_end; ++index, unit.advance(p)) {
    const int64_t image_group = static_cast<int64_t>(unit.image) * p.groups + group;
    Acc sums[kRows][kPoints], older[kRows][kPoints], start[kPaddedRows<kRows>];
    load_weights<kRows>(bias, start);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int j = 0; j < kPoints; ++j) {
        sums[r][j] = kTwoSteps ? Acc(0) : start[r];
        older[r][j] = start[r];
      }
    }
    for (int c = 0; c < p.in_channels && !idle; c += p.chunk) {
      const int channels = min(p.chunk, p.in_channels - c);
      const T* const x =
          static_cast<const T*>(p.x) + (image_group * p.in_channels + c) * p.in_plane;
      __syncthreads();
      if (index == unit_begin || p.chunk < p.in_channels) {
        fill_weights<kRows>(p, rows, w + static_cast<int64_t>(c) * p.weight_in, taps, channels,
                            lane, 32 * point_warps, weights);
      }
      fill_tile(p, unit, position, x, channels, tile);
      __syncthreads();
      multiply<kTwoSteps>(p, kind, channels, tile + begin + threadIdx.x % 32, weights, sums, older);
    }
    if constexpr (kTwoSteps) move_to(sums, older);
    T* const y = static_cast<T*>(p.y) + (image_group * p.out_channels + rows.channel) * p.out_plane;
    if constexpr (kRows == 2 || kRows == 4 || kRows == 8) {
      if (p.straight) {
        store_points<2>(p, unit, rows, begin + threadIdx.x % 32, sums, y);
        continue;
      }
    }
    __syncthreads();
    const int first = (begin + threadIdx.x % 32) * p.width;
    if (p.width % 4 == 0 && kRows % 4 == 0 && sizeof(Acc) == 4) {
      lay_down<4>(p, sums, first, line, stage);
    } else if (p.width % 2 == 0 && kRows % 2 == 0) {
      lay_down<2>(p, sums, first, line, stage);
    } else {
      lay_down<1>(p, sums, first, line, stage);
    }
    __syncthreads();
    if (p.vector == 4) {
      store_rows<4>(p, unit, rows, row_group, row_groups, line, stage, y);
    } else if (p.vector == 2) {
      store_rows<2>(p, unit, rows, row_group, row_groups, line, stage, y);
    } else {
      store_rows<1>(p, unit, rows, row_group, row_groups, line, stage, y);
    }
  }
}

}  // namespace upconv::direct
