// The gradient of the weight on the CUDA cores, for what tensor cores do not serve well: depthwise
// layers, few channels on either side, small groups, float64, strict float32.
//
// The idea. gw[ci][co][tap] is a sum over all pixels i of x[ci][i] * gy[co][place of (i, tap)]. The
// lanes of a warp lie along the taps of the kernel's width, and, where these are few, along some
// neighbouring pixels ("slots"): what they read of grad_output is then contiguous for every stride.
// A thread holds kInputs x kColumns sums, a column being one output channel and one row of the
// kernel: kInputs + kColumns loads give kInputs * kColumns products. Both tensors are read straight
// from global memory: the lines that taps share are in the first-level cache, which delivers a word
// to each lane as fast as shared memory does, without a fill and without barriers.
//
// The warps of a block take neighbouring rows of the input at the same time, so that the rows of
// grad_output that they share are read once. Each warp adds its slots up as a tree and leaves its
// sums in the workspace; a second kernel adds those of all warps, as a tree of short sums. Nothing
// depends on the order in which blocks run: the same inputs give the same bits.
#pragma once

#include "direct_wgrad_params.h"
#include "direct_work.cuh"

namespace upconv::direct {

constexpr unsigned kAllLanes = 0xffffffffu;

// --- Work ------------------------------------------------------------------------------------

// The part of the weight that a block adds up.
struct WeightTile {
  int channel, column, kx;  // the first of each

  __device__ WeightTile(const DirectWgradParams& p, int tile) {
    kx = tile % p.x_tiles * p.lanes_x;
    tile /= p.x_tiles;
    column = tile % p.column_tiles * p.columns;
    channel = tile / p.column_tiles * p.inputs;
  }
};

// One column of the weight: where its outputs lie, from those of the weight's first tap on.
struct Column {
  int channel, z, y;

  __device__ Column(const DirectWgradParams& p, int index) {
    y = index % p.kernel_y * p.dilation_y;
    index /= p.kernel_y;
    z = index % p.kernel_z * p.dilation_z;
    channel = index / p.kernel_z;
  }
};

// A row of pixels or a piece of one. Neighbouring units are neighbouring rows.
struct PixelRow {
  int64_t image;
  int z, y, begin, end;

  __device__ PixelRow(const DirectWgradParams& p, int unit) {
    y = unit % p.in_h;
    unit /= p.in_h;
    begin = unit % p.segments * p.segment;
    end = min(begin + p.segment, p.in_w);
    unit /= p.segments;
    z = unit % p.in_d;
    image = unit / p.in_d;
  }
};

// --- Multiply --------------------------------------------------------------------------------

// The compiler takes two instructions for an address, where one multiplies, extends and adds.
template <typename T>
__device__ __forceinline__ Sum<T> element(const T* base, int offset) {
#ifdef __CUDA_ARCH__
  const T* place;
  asm("mad.wide.s32 %0, %1, %2, %3;" : "=l"(place) : "r"(offset), "n"(sizeof(T)), "l"(base));
  return widen(__ldg(place));
#else
  return widen(base[offset]);
#endif
}

// What a lane reads: its pixel, and the output that its tap along the width meets there.
template <typename T>
struct Lane {
  const T* x;   // first channel
  const T* gy;  // first column
  int ix, ox;
};

// A row of pixels. `met` has a bit for each column whose row of outputs is inside the tensor;
// between the pixels `inner` and `stop` all lanes meet outputs. There nothing is asked; elsewhere
// pairs without an output take no part: what x holds there must not matter.
template <int kInputs, int kColumns, typename T, typename Acc>
__device__ __forceinline__ void multiply_row(const DirectWgradParams& p, Lane<T> lane, int first,
                                             int end, int inner, int stop, bool active,
                                             unsigned met, const int (&plane)[kInputs],
                                             const int (&offset)[kColumns],
                                             Acc (&sums)[kInputs][kColumns]) {
  constexpr int kUnroll = kInputs > 1 || sizeof(Acc) == 8 ? 1 : 2;
  if (met != (1u << kColumns) - 1) stop = first;
  const int step = p.slots * p.stride_x;
  while (first < end) {
    if (first >= inner && first + p.slots <= stop) {
      const int pixels = first;
#pragma unroll(kUnroll)
      for (; first + p.slots <= stop; first += p.slots) {
        Acc x[kInputs], gy[kColumns];
#pragma unroll
        for (int i = 0; i < kInputs; ++i) x[i] = element(lane.x, plane[i]);
#pragma unroll
        for (int c = 0; c < kColumns; ++c) gy[c] = element(lane.gy, offset[c]);
#pragma unroll
        for (int i = 0; i < kInputs; ++i) {
#pragma unroll
          for (int c = 0; c < kColumns; ++c) sums[i][c] += x[i] * gy[c];
        }
        lane.x += p.slots;
        lane.gy += step;
      }
      lane.ix += first - pixels;
      lane.ox += (first - pixels) * p.stride_x;
    } else {
      if (active && lane.ix < end && below(lane.ox, p.out_w)) {
        Acc x[kInputs];
#pragma unroll
        for (int i = 0; i < kInputs; ++i) x[i] = element(lane.x, plane[i]);
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
          if (met >> c & 1) {
            const Acc gy = element(lane.gy, offset[c]);
#pragma unroll
            for (int i = 0; i < kInputs; ++i) sums[i][c] += x[i] * gy;
          }
        }
      }
      lane.x += p.slots;
      lane.gy += step;
      lane.ix += p.slots;
      lane.ox += step;
      first += p.slots;
    }
  }
}

// The sum over the slots of a warp, in lanes 0 to lanes_x - 1: always the same tree.
template <typename Acc>
__device__ __forceinline__ Acc add_slots(const DirectWgradParams& p, int slot, Acc sum) {
  for (int count = p.slots; count > 1;) {
    const int half = (count + 1) / 2;
    const Acc other = __shfl_down_sync(kAllLanes, sum, half * p.lanes_x);
    if (slot + half < count) sum += other;
    count = half;
  }
  return sum;
}

// --- The kernel ------------------------------------------------------------------------------

template <typename T, int kInputs, int kColumns>
__global__ void __launch_bounds__(kInputs == 1 ? 256 : 128, kInputs == 1 ? 3 : 4)
    direct_wgrad_kernel(const __grid_constant__ DirectWgradParams p) {
  using Acc = Sum<T>;
  static_assert(kInputs * kColumns * sizeof(Acc) <= 288, "more sums than registers");
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int tile = blockIdx.x % p.tiles, block = blockIdx.x / p.tiles;
  const int share = block % p.shares, group = block / p.shares;
  const WeightTile part(p, tile);
  const int slot = lane / p.lanes_x, last_x = min(part.kx + p.lanes_x, p.kernel_x) - 1;
  // Lanes that are left over do what others do; their sums are not stored.
  const int pixel = slot < p.slots ? slot : 0;
  const int kx = min(part.kx + lane % p.lanes_x, last_x);
  // Pixels of which every lane meets an output.
  const int low = max(p.padding_x - part.kx * p.dilation_x, 0);
  const int high = max(p.out_w - 1 + p.padding_x - last_x * p.dilation_x, -1);
  const int inner = (low + p.stride_x - 1) / p.stride_x, stop = high < 0 ? 0 : high / p.stride_x + 1;

  // Each lane keeps one column, and all of them the offsets of all. Columns and channels past the
  // last are the last once more.
  const Column first(p, part.column);
  const Column mine(p, min(part.column + min(lane, kColumns - 1), p.all_columns - 1));
  const int64_t row_offset = static_cast<int64_t>(mine.z) * p.out_h + mine.y;
  const int my_offset =
      static_cast<int>((mine.channel - first.channel) * p.out_plane + row_offset * p.out_w);
  int offset[kColumns], plane[kInputs];
#pragma unroll
  for (int c = 0; c < kColumns; ++c) offset[c] = __shfl_sync(kAllLanes, my_offset, c);
  const int my_plane = static_cast<int>(min(lane, p.in_channels - 1 - part.channel) * p.in_plane);
#pragma unroll
  for (int i = 0; i < kInputs; ++i) plane[i] = __shfl_sync(kAllLanes, my_plane, i);

  Acc sums[kInputs][kColumns];
#pragma unroll
  for (int i = 0; i < kInputs; ++i) {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) sums[i][c] = Acc(0);
  }
  const int unit_end = min((share + 1) * p.units, p.all_units);
  for (int unit = share * p.units + warp; unit < unit_end; unit += p.warps) {
    const PixelRow row(p, unit);
    const int oz = row.z * p.stride_z - p.padding_z, oy = row.y * p.stride_y - p.padding_y;
    const unsigned met = __ballot_sync(
        kAllLanes, lane < kColumns && below(oz + mine.z, p.out_d) && below(oy + mine.y, p.out_h));
    if (met == 0) continue;
    Lane<T> at;
    at.ix = row.begin + pixel;
    at.ox = at.ix * p.stride_x - p.padding_x + kx * p.dilation_x;
    at.x = static_cast<const T*>(p.x) +
           ((row.image * p.groups + group) * p.in_channels + part.channel) * p.in_plane +
           (row.z * p.in_h + row.y) * p.in_w + at.ix;
    at.gy = static_cast<const T*>(p.gy) +
            ((row.image * p.groups + group) * p.out_channels + first.channel) * p.out_plane +
            (static_cast<int64_t>(oz) * p.out_h + oy) * p.out_w + at.ox;
    multiply_row(p, at, row.begin, row.end, inner, min(row.end, stop), slot < p.slots, met, plane,
                 offset, sums);
  }

  const int64_t worker = static_cast<int64_t>(group * p.tiles + tile) * p.workers +
                         share * p.warps + warp;
  Acc* const target = static_cast<Acc*>(p.workspace) + worker * p.sums + lane;
#pragma unroll
  for (int i = 0; i < kInputs; ++i) {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const Acc sum = add_slots(p, slot, sums[i][c]);
      if (lane < p.lanes_x) target[(i * kColumns + c) * p.lanes_x] = sum;
    }
  }
}

// --- The sum of all workers ------------------------------------------------------------------

constexpr int kWgradAddRows = 16;

// A block takes 32 neighbouring sums; thread row r adds up those of workers r, r + 16, ..., then
// the rows are added as a tree.
template <typename T>
__global__ void __launch_bounds__(32 * kWgradAddRows)
    direct_wgrad_add(const __grid_constant__ DirectWgradParams p) {
  using Acc = Sum<T>;
  extern __shared__ __align__(16) unsigned char raw_memory[];
  Acc* const rows = reinterpret_cast<Acc*>(raw_memory) + threadIdx.x % 32;
  const int row = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int parts = (p.sums + 31) / 32;
  const int index = blockIdx.x % parts * 32 + lane, tile = blockIdx.x / parts;
  const Acc* const source = static_cast<const Acc*>(p.workspace) +
                            static_cast<int64_t>(tile) * p.workers * p.sums + index;
  Acc sum = 0;
  if (index < p.sums) {
#pragma unroll 4
    for (int w = row; w < p.workers; w += kWgradAddRows) {
      sum += source[static_cast<int64_t>(w) * p.sums];
    }
  }
  rows[32 * row] = sum;
#pragma unroll
  for (int half = kWgradAddRows / 2; half > 0; half /= 2) {
    __syncthreads();
    if (row < half) rows[32 * row] += rows[32 * (row + half)];
  }
  if (row != 0 || index >= p.sums) return;
  const WeightTile part(p, tile % p.tiles);
  const int lane_x = index % p.lanes_x, pair = index / p.lanes_x;
  const int kx = part.kx + lane_x, column = part.column + pair % p.columns;
  const int channel = part.channel + pair / p.columns;
  if (kx >= p.kernel_x || column >= p.all_columns || channel >= p.in_channels) return;
  const int64_t in_channel = static_cast<int64_t>(tile / p.tiles) * p.in_channels + channel;
  static_cast<T*>(p.gw)[(in_channel * p.all_columns + column) * p.kernel_x + kx] =
      narrow<T>(rows[0]);
}

}  // namespace upconv::direct
