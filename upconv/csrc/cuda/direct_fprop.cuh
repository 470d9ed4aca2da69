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
//   store     the sums lie down in the memory of the tile in the order of the output, and leave as
//             whole sectors
// Tile rows follow each other with their margins, so that points are numbered straight through and
// every tap is one offset; points that fall on margins are computed and not stored. Blocks that
// share a multiprocessor hide each other's fill and stores; nothing is pipelined within one.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "direct_params.h"
#include "ptx.cuh"

namespace upconv {

// --- Numbers ---------------------------------------------------------------------------------

// Sums are kept in float, those of float64 tensors in double.
template <typename T>
using Sum = std::conditional_t<sizeof(T) == 8, double, float>;

template <typename Acc, typename T>
__device__ __forceinline__ Acc widen(T value) {
  if constexpr (sizeof(T) == 2) {
    return static_cast<float>(value);
  } else {
    return value;
  }
}

template <typename T, typename Acc>
__device__ __forceinline__ T narrow(Acc value) {
  return T(value);
}

// n / d with 1 / d at hand: exact for 0 <= n < 2^22, as half a unit outweighs both roundings.
__device__ __forceinline__ int divide(int n, float reciprocal) {
  return static_cast<int>((static_cast<float>(n) + 0.5f) * reciprocal);
}

template <typename T, int kCount>
struct alignas(sizeof(T) * kCount) Vector {
  T at[kCount];
};

// --- Shared memory and work ------------------------------------------------------------------

// Rows are padded so that weights are read as whole vectors.
template <int kRows>
constexpr int kPaddedRows = kRows > 2 ? (kRows + 3) / 4 * 4 : kRows;

// One tile of one image.
struct DirectUnit {
  int image, z, y, x;  // first point

  __device__ DirectUnit(const DirectParams& p, int unit) {
    x = unit % p.tiles_x * p.tile_x;
    unit /= p.tiles_x;
    y = unit % p.tiles_y * p.tile_y;
    unit /= p.tiles_y;
    z = unit % p.tiles_z * p.tile_z;
    image = unit / p.tiles_z;
  }

  // The next tile, without the six divisions of the first.
  __device__ __forceinline__ void advance(const DirectParams& p) {
    x += p.tile_x;
    if (x < p.tiles_x * p.tile_x) return;
    x = 0;
    y += p.tile_y;
    if (y < p.tiles_y * p.tile_y) return;
    y = 0;
    z += p.tile_z;
    if (z < p.tiles_z * p.tile_z) return;
    z = 0;
    ++image;
  }
};

// A position of the tile, from the thread's first one on in steps of the block's threads.
struct DirectPosition {
  int slab, row, column;

  __device__ explicit DirectPosition(const DirectParams& p) {
    column = threadIdx.x % p.pitch;
    row = threadIdx.x / p.pitch % p.tile_rows;
    slab = threadIdx.x / p.pitch / p.tile_rows;
  }

  __device__ __forceinline__ void advance(const DirectParams& p) {
    column += p.step_x;
    row += p.step_y;
    slab += p.step_z;
    if (column >= p.pitch) {
      column -= p.pitch;
      ++row;
    }
    if (row >= p.tile_rows) {
      row -= p.tile_rows;
      ++slab;
    }
  }
};

__device__ __forceinline__ bool below(int value, int limit) {  // and not negative
  return static_cast<unsigned>(value) < static_cast<unsigned>(limit);
}

// What a warp accumulates: a kind for some output channels. Warps past the end have no channels.
struct DirectRows {
  int kind, channel;  // channel: first output channel within the group

  __device__ DirectRows(const DirectParams& p, int index) {
    kind = index / p.channel_blocks;
    channel = index % p.channel_blocks * p.thread_channels;
    if (kind >= p.kinds) {
      kind = 0;
      channel = p.out_channels;
    }
  }
};

// --- Fill ------------------------------------------------------------------------------------

// Channels of one position: asynchronous copies, all of them in flight at once.
template <typename T>
__device__ __forceinline__ void copy_channels(const DirectParams& p, const T* source, bool inside,
                                              int channels, T* tile) {
  constexpr int kBytes = static_cast<int>(sizeof(T));
  const int valid = inside ? kBytes : 0;
  uint32_t target = ptx::shared_address(tile);
  if (channels == 1) return ptx::copy_async<kBytes>(target, source, valid);
#pragma unroll 4
  for (int c = 0; c < channels; ++c, source += p.in_plane, target += p.channel * kBytes) {
    ptx::copy_async<kBytes>(target, source, valid);
  }
}

// The inputs of one residue of the input step; z0, y0, x0 is where position 0 lies. 16-bit types
// have to be converted on the way, four positions of a thread at a time.
template <typename T, typename Acc>
__device__ __forceinline__ void fill_plane(const DirectParams& p, DirectPosition position, int z0,
                                           int y0, int x0, const T* __restrict__ x, int channels,
                                           Acc* tile) {
  constexpr int kBatch = sizeof(T) == sizeof(Acc) ? 1 : 4;
  const int positions = p.slabs * p.tile_rows * p.pitch;
  for (int first = threadIdx.x; first < positions; first += kBatch * p.threads) {
    int offset[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int iz = z0 + position.slab * p.in_step_z, iy = y0 + position.row * p.in_step_y;
      const int ix = x0 + position.column * p.in_step_x;
      const bool inside = below(iz, p.in_d) && below(iy, p.in_h) && below(ix, p.in_w);
      offset[i] = inside ? (iz * p.in_h + iy) * p.in_w + ix : -1;
      position.advance(p);
    }
    if constexpr (sizeof(T) == sizeof(Acc)) {
      copy_channels(p, x + max(offset[0], 0), offset[0] >= 0, channels, tile + first);
    } else {
      const T* source = x;
      Acc* target = tile + first;
#pragma unroll 2
      for (int c = 0; c < channels; ++c, source += p.in_plane, target += p.channel) {
        Acc value[kBatch];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          value[i] = offset[i] >= 0 ? widen<Acc>(source[offset[i]]) : Acc(0);
        }
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          if (first + i * p.threads < positions) target[i * p.threads] = value[i];
        }
      }
    }
  }
}

// `x` is the first channel of the chunk.
template <typename T, typename Acc>
__device__ __forceinline__ void fill_tile(const DirectParams& p, const DirectUnit& unit,
                                          const DirectPosition& start, const T* __restrict__ x,
                                          int channels, Acc* tile) {
  const int z0 = unit.z * p.in_step_z + p.shift_z, y0 = unit.y * p.in_step_y + p.shift_y;
  const int x0 = unit.x * p.in_step_x + p.shift_x;
  for (int z = 0; z < p.in_step_z; ++z) {
    for (int y = 0; y < p.in_step_y; ++y) {
      for (int column = 0; column < p.in_step_x; ++column, tile += p.plane) {
        fill_plane(p, start, z0 + z, y0 + y, x0 + column, x, channels, tile);
      }
    }
  }
  if constexpr (sizeof(T) == sizeof(Acc)) {
    ptx::copy_async_commit();
    ptx::copy_async_wait<0>();
  }
}

// `w` is the chunk's first channel of the warp's first output channel. The warps that share these
// rows share the work: `lane` counts through all of their lanes.
template <int kRows, typename T, typename Acc>
__device__ __forceinline__ void fill_weights(const DirectParams& p, const DirectRows& rows,
                                             const T* __restrict__ w, int channels, int lane,
                                             int lanes, Acc* weights) {
  const DirectKind& kind = p.kind[rows.kind];
  const int offsets = kind.end - kind.begin, phases = p.folds * p.width;
  const float by_offsets = 1.0f / offsets;
  for (int index = lane; index < channels * offsets; index += lanes) {
    const int c = divide(index, by_offsets);
    const T* const source = w + c * p.weight_in;
    const int16_t* const taps = p.tap + kind.taps + (index - c * offsets) * phases;
    Acc* const target = weights + index * kPaddedRows<kRows>;
    int phase = 0, channel = 0;
#pragma unroll 2
    for (int row = 0; row < kRows; ++row) {
      const int tap = taps[phase];
      const bool real = tap >= 0 && rows.channel + channel < p.out_channels;
      target[row] = real ? widen<Acc>(source[channel * p.weight_out + tap]) : Acc(0);
      if (++phase == phases) {
        phase = 0;
        ++channel;
      }
    }
  }
}

// --- Multiply --------------------------------------------------------------------------------

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

template <int kRows, int kPoints, typename Acc>
__device__ __forceinline__ void multiply(const DirectParams& p, const DirectKind& kind,
                                         int channels, const Acc* inputs, const Acc* weights,
                                         Acc (&sums)[kRows][kPoints]) {
  for (int c = 0; c < channels; ++c) {
#pragma unroll 2
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
  }
}

// --- Store -----------------------------------------------------------------------------------

// The sums as [line][point][width phase], a line being one fold of one output channel: along a row
// of points that is the order of the output. `first` is the lane's first element, `line` the words
// of a line.
template <int kVector, int kRows, int kPoints, typename Acc>
__device__ __forceinline__ void lay_down(const DirectParams& p, const Acc (&sums)[kRows][kPoints],
                                         int first, int line, Acc* stage) {
  int column = 0;
  const int step = 32 * p.width + p.width * p.skew;
  Acc* target = stage + first + (first >> 5) * p.skew;
#pragma unroll
  for (int r = 0; r + kVector <= kRows; r += kVector) {
#pragma unroll
    for (int j = 0; j < kPoints; ++j) {
      Vector<Acc, kVector> part;
#pragma unroll
      for (int i = 0; i < kVector; ++i) part.at[i] = sums[r + i][j];
      *reinterpret_cast<Vector<Acc, kVector>*>(target + column + j * step) = part;
    }
    column += kVector;
    if (column == p.width) {
      column = 0;
      target += line;
    }
  }
}

template <int kVector, typename T, typename Acc>
__device__ __forceinline__ void store_vector(const Acc* source, T* target) {
  const auto wide = *reinterpret_cast<const Vector<Acc, kVector>*>(source);
  Vector<T, kVector> values;
#pragma unroll
  for (int i = 0; i < kVector; ++i) values.at[i] = narrow<T>(wide.at[i]);
  *reinterpret_cast<Vector<T, kVector>*>(target) = values;
}

// Rows of the tile go to groups of `row_lanes` lanes: `group` of `groups` is this thread's. `y` is
// the first output channel of the warp's rows in this image; `line` the words of a line.
template <int kVector, typename T, typename Acc>
__device__ __forceinline__ void store_rows(const DirectParams& p, const DirectUnit& unit,
                                           const DirectRows& rows, int group, int groups, int line,
                                           const Acc* stage, T* __restrict__ y) {
  const DirectKind& kind = p.kind[rows.kind];
  const int channels = min(p.thread_channels, p.out_channels - rows.channel);
  const int ox = unit.x * p.out_step_x + kind.first_x;
  const bool gapless = p.width == p.out_step_x;
  // Elements of a row; without gaps those that lie inside the output.
  const int end = gapless ? min(p.tile_x * p.width, p.out_w - ox) : p.tile_x * p.width;
  const int begin = (gapless ? max(0, -ox) : 0) + (threadIdx.x & (p.row_lanes - 1)) * kVector;
  for (int row = group; row < p.tile_z * p.tile_y; row += groups) {
    const int slab = divide(row, p.by_tile_y), tile_y = row - slab * p.tile_y;
    const int first_element = (slab * p.tile_rows + tile_y) * p.pitch * p.width;
    const Acc* source = stage;
    for (int fold = 0; fold < p.folds; ++fold, source += line) {
      const DirectFirst& first = p.first[kind.firsts + fold];
      const int oz = (unit.z + slab) * p.out_step_z + first.z;
      const int oy = (unit.y + tile_y) * p.out_step_y + first.y;
      if (!below(oz, p.out_d) || !below(oy, p.out_h)) continue;
      T* target = y + ((oz * p.out_h + oy) * p.out_w + ox);
      const Acc* sums = source;
      for (int c = 0; c < channels; ++c, target += p.out_plane, sums += p.folds * line) {
        if (gapless) {
#pragma unroll 4
          for (int e = begin; e < end; e += p.row_lanes * kVector) {
            const int element = first_element + e;
            store_vector<kVector>(sums + element + (element >> 5) * p.skew, target + e);
          }
        } else {
          for (int e = begin; e < end; e += p.row_lanes * kVector) {
            const int point = divide(e, p.by_width), phase = e - point * p.width;
            const int column = point * p.out_step_x + phase, element = first_element + e;
            if (phase < kind.columns && below(ox + column, p.out_w))
              store_vector<kVector>(sums + element + (element >> 5) * p.skew, target + column);
          }
        }
      }
    }
  }
}

// --- The kernel ------------------------------------------------------------------------------

// Four blocks a multiprocessor leave 128 registers a thread: enough for 72 sums and what they need.
// Fewer sums mean more stores to hide, by more blocks.
template <typename T, int kRows, int kPoints>
__global__ void __launch_bounds__(kDirectMaxThreads, kRows <= 2   ? 6
                                                     : kRows == 4 ? 5
                                                                  : 4)
    direct_fprop_kernel(const __grid_constant__ DirectParams p) {
  using Acc = Sum<T>;
  static_assert(kRows * kPoints * sizeof(Acc) <= 288, "more sums than registers");
  extern __shared__ __align__(16) unsigned char raw_memory[];
  Acc* const memory = reinterpret_cast<Acc*>(raw_memory);
  const int warp = threadIdx.x / 32, row_warp = warp % p.row_warps;
  const int point_warps = p.warps / p.row_warps;
  const int row_block = blockIdx.x / p.blocks % p.row_blocks;
  const int group = blockIdx.x / p.blocks / p.row_blocks;
  const DirectRows rows(p, row_block * p.row_warps + row_warp);
  const DirectKind& kind = p.kind[rows.kind];
  // Kinds are sorted by their number of offsets: the first set of rows of a block has most.
  const DirectKind& longest = p.kind[DirectRows(p, row_block * p.row_warps).kind];
  const bool idle = longest.begin == longest.end;

  // [set of rows][bias, then weights][row], then the tile, which the sums overwrite
  const int weight_words = (1 + p.chunk * p.most_taps) * kPaddedRows<kRows>;
  Acc* const bias = memory + row_warp * weight_words;
  Acc* const weights = bias + kPaddedRows<kRows>;
  Acc* const tile = memory + (p.row_warps * weight_words + 3) / 4 * 4;  // stores are vectors
  const int point_warp = warp / p.row_warps;
  const int begin = point_warp * kPoints * 32, points = point_warps * kPoints * 32;
  const int line = points * p.width + (points * p.width >> 5) * p.skew;
  Acc* const stage = tile + row_warp * (kRows / p.width) * line;
  const int row_group = (threadIdx.x % 32 >> p.row_shift) + (point_warp * 32 >> p.row_shift);
  const int row_groups = point_warps * 32 >> p.row_shift;

  const T* const w = static_cast<const T*>(p.w) + static_cast<int64_t>(group) * p.weight_group +
                     static_cast<int64_t>(rows.channel) * p.weight_out;
  const int64_t first_channel = static_cast<int64_t>(group) * p.out_channels + rows.channel;
  if (point_warp == 0 && threadIdx.x % 32 < kRows) {
    const int channel = threadIdx.x % 32 / (p.folds * p.width);
    const bool biased = p.bias != nullptr && rows.channel + channel < p.out_channels;
    bias[threadIdx.x % 32] =
        biased ? widen<Acc>(static_cast<const T*>(p.bias)[first_channel + channel]) : Acc(0);
  }
  __syncthreads();

  const int units = p.batch * p.tiles_z * p.tiles_y * p.tiles_x;
  const int unit_begin = blockIdx.x % p.blocks * p.repeats;
  const int unit_end = min(unit_begin + p.repeats, units);
  const DirectPosition position(p);
  DirectUnit unit(p, unit_begin);
  for (int index = unit_begin; index < unit_end; ++index, unit.advance(p)) {
    const int64_t image_group = static_cast<int64_t>(unit.image) * p.groups + group;
    Acc sums[kRows][kPoints], start[kPaddedRows<kRows>];
    load_weights<kRows>(bias, start);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int j = 0; j < kPoints; ++j) sums[r][j] = start[r];
    }
    for (int c = 0; c < p.in_channels && !idle; c += p.chunk) {
      const int channels = min(p.chunk, p.in_channels - c);
      const T* const x =
          static_cast<const T*>(p.x) + (image_group * p.in_channels + c) * p.in_plane;
      __syncthreads();
      if (index == unit_begin || p.chunk < p.in_channels) {
        fill_weights<kRows>(p, rows, w + static_cast<int64_t>(c) * p.weight_in, channels,
                            threadIdx.x % 32 + 32 * point_warp, 32 * point_warps, weights);
      }
      fill_tile(p, unit, position, x, channels, tile);
      __syncthreads();
      multiply(p, kind, channels, tile + begin + threadIdx.x % 32, weights, sums);
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
    T* const y = static_cast<T*>(p.y) + (image_group * p.out_channels + rows.channel) * p.out_plane;
    if (p.vector == 4) {
      store_rows<4>(p, unit, rows, row_group, row_groups, line, stage, y);
    } else if (p.vector == 2) {
      store_rows<2>(p, unit, rows, row_group, row_groups, line, stage, y);
    } else {
      store_rows<1>(p, unit, rows, row_group, row_groups, line, stage, y);
    }
  }
}

}  // namespace upconv
