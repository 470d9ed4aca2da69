// The gradient of the weight on the CUDA cores, for what tensor cores do not serve well: depthwise
// layers, few channels on either side, small groups, float64, strict float32.
//
// gw[ci][co][tap] is a sum over all pixels i of x[ci][i] * gy[co][place of (i, tap)]. A thread
// holds kInputs x kColumns sums, a column being one output channel and one row of the kernel:
// kInputs + kColumns loads give kInputs * kColumns products. Each warp adds its slots up as a tree
// and leaves its sums in the workspace; a second kernel adds those of all warps, as a tree of short
// sums. Nothing depends on the order in which blocks run: the same inputs give the same bits.
#pragma once

#include "direct_grad_work.cuh"

namespace upconv::direct {

// The part of the weight that a block adds up.
struct WeightTile {
  int channel, column, kx;  // the first of each

  __device__ WeightTile(const DirectGradParams& p, int tile) {
    kx = tile % p.x_tiles * p.lanes_x;
    tile /= p.x_tiles;
    column = tile % p.column_tiles * p.columns;
    channel = tile / p.column_tiles * p.inputs;
  }
};

// --- Multiply --------------------------------------------------------------------------------

// The pixels `first` to `end` - 1, which are staged. `met` has a bit for each column whose row of
// outputs is inside the tensor. Where all are and every lane meets an output nothing is asked;
// elsewhere pairs without an output take no part: what x holds there must not matter.
template <int kInputs, int kColumns, typename Acc>
__device__ __forceinline__ void multiply_chunk(const DirectGradParams& p, const Place& place,
                                               int first, int end, unsigned met, const Acc* stage,
                                               Acc (&sums)[kInputs][kColumns]) {
  const int step = p.slots * p.stride_x;
  const int stop = met == (1u << kColumns) - 1 ? min(end, place.stop) : 0;
  const Acc* x = stage + place.pixel;
  const Acc* gy =
      stage + kInputs * kGradPixels + place.pixel * p.stride_x + place.tap * p.dilation_x;
  while (first < end) {
    if (first >= place.inner && first + p.slots <= stop) {
#pragma unroll(kInputs* kColumns > 32 ? 1 : 2)
      for (; first + p.slots <= stop; first += p.slots, x += p.slots, gy += step) {
#pragma unroll
        for (int i = 0; i < kInputs; ++i) {
#pragma unroll
          for (int c = 0; c < kColumns; ++c) {
            sums[i][c] += x[i * kGradPixels] * gy[c * kGradOutputs];
          }
        }
      }
    } else {
      const int ix = first + place.pixel;
      const int ox = ix * p.stride_x - p.padding_x + (place.first_x + place.tap) * p.dilation_x;
      if (place.active(p) && ix < end && below(ox, p.out_w)) {
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
          if (met >> c & 1) {
#pragma unroll
            for (int i = 0; i < kInputs; ++i) {
              sums[i][c] += x[i * kGradPixels] * gy[c * kGradOutputs];
            }
          }
        }
      }
      first += p.slots;
      x += p.slots;
      gy += step;
    }
  }
}

// base[offset]. Left to itself, the compiler keeps some of the 64-bit addresses and moves others
// about: 175 instructions for 72 products instead of 150.
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

// The same for a row that is not staged: `x` and `gy` are the row's first pixel in the first
// channel, and what the lane's tap would meet at pixel 0 in the first column.
template <int kInputs, int kColumns, typename T, typename Acc>
__device__ __forceinline__ void multiply_row(const DirectGradParams& p, const Place& place,
                                             int first, int end, unsigned met, const T* x,
                                             const T* gy, const int (&plane)[kInputs],
                                             const int (&offset)[kColumns],
                                             Acc (&sums)[kInputs][kColumns]) {
  const int step = p.slots * p.stride_x;
  const int stop = met == (1u << kColumns) - 1 ? min(end, place.stop) : 0;
  x += first + place.pixel;
  gy += (first + place.pixel) * p.stride_x;
  while (first < end) {
    if (first >= place.inner && first + p.slots <= stop) {
#pragma unroll(kInputs == 1 ? 2 : 1)
      for (; first + p.slots <= stop; first += p.slots, x += p.slots, gy += step) {
        Acc inputs[kInputs], outputs[kColumns];
#pragma unroll
        for (int i = 0; i < kInputs; ++i) inputs[i] = element(x, plane[i]);
#pragma unroll
        for (int c = 0; c < kColumns; ++c) outputs[c] = element(gy, offset[c]);
#pragma unroll
        for (int i = 0; i < kInputs; ++i) {
#pragma unroll
          for (int c = 0; c < kColumns; ++c) sums[i][c] += inputs[i] * outputs[c];
        }
      }
    } else {
      const int ix = first + place.pixel;
      const int ox = ix * p.stride_x - p.padding_x + (place.first_x + place.tap) * p.dilation_x;
      if (place.active(p) && ix < end && below(ox, p.out_w)) {
        Acc inputs[kInputs];
#pragma unroll
        for (int i = 0; i < kInputs; ++i) inputs[i] = element(x, plane[i]);
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
          if (met >> c & 1) {
            const Acc output = element(gy, offset[c]);
#pragma unroll
            for (int i = 0; i < kInputs; ++i) sums[i][c] += inputs[i] * output;
          }
        }
      }
      first += p.slots;
      x += p.slots;
      gy += step;
    }
  }
}

// The sum over the slots of a warp, in lanes 0 to lanes_x - 1: always the same tree.
template <typename Acc>
__device__ __forceinline__ Acc add_slots(const DirectGradParams& p, int slot, Acc sum) {
  for (int count = p.slots; count > 1;) {
    const int half = (count + 1) / 2;
    const Acc other = __shfl_down_sync(kAllLanes, sum, half * p.lanes_x);
    if (slot + half < count) sum += other;
    count = half;
  }
  return sum;
}

// --- The kernel ------------------------------------------------------------------------------

template <int kInputs, int kColumns>
constexpr int kWgradStage = kInputs * kGradPixels + kColumns * kGradOutputs;  // words of a warp

template <typename T, int kInputs, int kColumns>
constexpr int kWgradThreads = !kStaged<T> && kInputs == 1 ? 256 : 128;

template <typename T, int kInputs, int kColumns>
__global__ void __launch_bounds__((kWgradThreads<T, kInputs, kColumns>), kInputs > 1   ? 4
                                                                         : !kStaged<T> ? 3
                                                                         : kInputs * kColumns <= 8
                                                                             ? 6
                                                                             : 5)
    direct_wgrad_kernel(const __grid_constant__ DirectGradParams p) {
  using Acc = Sum<T>;
  static_assert(kInputs * kColumns * sizeof(Acc) <= 288, "more sums than registers");
  extern __shared__ __align__(16) unsigned char raw_memory[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  [[maybe_unused]] Acc* const stage =
      reinterpret_cast<Acc*>(raw_memory) + warp * kWgradStage<kInputs, kColumns>;
  const int tile = blockIdx.x % p.tiles, block = blockIdx.x / p.tiles;
  const int share = block % p.shares, group = block / p.shares;
  const WeightTile part(p, tile);
  const Place place(p, part.kx);

  // Each lane keeps one column and one channel. Those past the last are the last once more; their
  // sums are not stored.
  const Column first_column(p, part.column);
  const Column mine(p, min(part.column + min(lane, kColumns - 1), p.all_columns - 1));
  const int64_t row_offset = static_cast<int64_t>(mine.z) * p.out_h + mine.y;
  const int my_offset =
      static_cast<int>((mine.channel - first_column.channel) * p.out_plane + row_offset * p.out_w);
  const int my_plane = static_cast<int>(min(lane, p.in_channels - 1 - part.channel) * p.in_plane);

  [[maybe_unused]] int offsets[kColumns], planes[kInputs];
  if constexpr (!kStaged<T>) {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) offsets[c] = __shfl_sync(kAllLanes, my_offset, c);
#pragma unroll
    for (int i = 0; i < kInputs; ++i) planes[i] = __shfl_sync(kAllLanes, my_plane, i);
  }

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
    const int64_t image_group = row.image * p.groups + group;
    const T* const x = static_cast<const T*>(p.x) +
                       (image_group * p.in_channels + part.channel) * p.in_plane +
                       (row.z * p.in_h + row.y) * p.in_w;
    const T* const gy = static_cast<const T*>(p.gy) +
                        (image_group * p.out_channels + first_column.channel) * p.out_plane +
                        (static_cast<int64_t>(oz) * p.out_h + oy) * p.out_w;
    if constexpr (kStaged<T>) {
      for (int first = row.begin; first < row.end; first += p.chunk) {
        const int end = min(first + p.chunk, row.end);
        const int low = first * p.stride_x - p.padding_x + place.first_x * p.dilation_x;
        const int outputs =
            (end - first - 1) * p.stride_x + (place.last_x - place.first_x) * p.dilation_x + 1;
        stage_outputs<kColumns>(p, gy, my_offset, low, outputs, met, stage + kInputs * kGradPixels);
#pragma unroll
        for (int i = 0; i < kInputs; ++i) {
          const int plane = __shfl_sync(kAllLanes, my_plane, i);
          if (first + lane < end) {
            stage_one(x + plane + first + lane, stage + i * kGradPixels + lane);
          }
        }
        wait_until_staged();
        multiply_chunk(p, place, first, end, met, stage, sums);
        __syncwarp();
      }
    } else {
      const int tap = (place.first_x + place.tap) * p.dilation_x - p.padding_x;
      multiply_row(p, place, row.begin, row.end, met, x, gy + tap, planes, offsets, sums);
    }
  }

  const int64_t worker =
      static_cast<int64_t>(group * p.tiles + tile) * p.workers + share * p.warps + warp;
  Acc* const target = static_cast<Acc*>(p.workspace) + worker * p.sums + lane;
#pragma unroll
  for (int i = 0; i < kInputs; ++i) {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const Acc sum = add_slots(p, place.slot, sums[i][c]);
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
    direct_wgrad_add(const __grid_constant__ DirectGradParams p) {
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
  static_cast<T*>(p.result)[(in_channel * p.all_columns + column) * p.kernel_x + kx] =
      narrow<T>(rows[0]);
}

}  // namespace upconv::direct
