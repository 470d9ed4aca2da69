// The gradient of the input of depthwise layers with a stride, at the memory's rate.
//
// grad_output is cut into blocks of stride elements in each dimension: o + padding = b * stride +
// r. Its tap r + h * stride leads from element r of block b to pixel b - h, h below 1 or 2
// ("reach"), so that every element has `reach` products in each dimension:
//
//     gx[i] = sum over h, r of w[r + h * stride] * gy[block i + h, element r]
//
// A thread has 4 columns of grad_output, walks down the rows and keeps the sums of its columns in
// registers: of each row of the input that the blocks at hand lead to, for each h of the width.
// Where a row of the input is complete, the columns' sums go to shared memory, and other threads
// add those of each pixel. So an element is read once; only the last block of a strip and of a tile
// is read again by the next one. (Planes of a volume are read once for each tap that meets them:
// the sums of several planes would take too many registers.)
#pragma once

#include "depthwise_ring.cuh"

namespace upconv::direct {

// --- Work ------------------------------------------------------------------------------------

// The part of one plane of the input that a team of threads computes.
struct DepthwiseUnit {
  int image, channel, z, y, rows, x, width;

  __device__ DepthwiseUnit(const DepthwiseParams& p, int unit) {
    const int strip_of = p.by_tiles_x(unit), plane = p.by_strips(strip_of);
    x = (unit - strip_of * p.tiles_x) * p.tile;
    y = (strip_of - plane * p.strips) * p.strip;
    const int channel_of = p.by_depth(plane);
    z = plane - channel_of * p.in_d;
    image = p.by_channels(channel_of);
    channel = channel_of - image * p.channels;
    width = min(p.tile, p.in_w - x);
    rows = min(p.strip, p.in_h - y);
  }
};

// Which rows come next: element `r` of blocks b to b + kDepthwiseRows - 1, for the tap kz.
struct DepthwiseStep {
  int b, kz = 0, r = 0;

  __device__ __forceinline__ void advance(const DepthwiseParams& p) {
    if (++r < p.stride_y) return;
    r = 0;
    if (++kz < p.kernel_z) return;
    kz = 0;
    b += kDepthwiseRows;
  }
};

// --- Weights ---------------------------------------------------------------------------------

// The weights of a channel in shared memory as [row of the kernel][h][column]: those that a unit's
// columns meet, which are the same ones again after `period` columns. There is no tap beyond the
// kernel; what is multiplied by the zeros there is never added up.
template <typename T>
__device__ __forceinline__ void place_weights(const DepthwiseParams& p, const T* w, int first,
                                              int lane, float* weights) {
  constexpr int kTogether = 4;  // on their way at the same time
  const int all = p.kernel_z * p.kernel_y * p.reach_x * p.period;
  for (int i = lane; i < all; i += kTogether * p.lanes) {
    T found[kTogether];
#pragma unroll
    for (int n = 0; n < kTogether; ++n) {
      const int at = i + n * p.lanes;
      const int line = p.by_period(at), column = first + at - line * p.period;
      const int row = p.by_reach_x(line), h = line - row * p.reach_x;
      const int kx = column - p.by_stride_x(column) * p.stride_x + h * p.stride_x;
      found[n] = narrow<T>(0.f);
      if (at < all && kx < p.kernel_x) found[n] = w[row * p.kernel_x + kx];
    }
#pragma unroll
    for (int n = 0; n < kTogether; ++n)
      if (i + n * p.lanes < all) weights[i + n * p.lanes] = widen(found[n]);
  }
}

// --- Pixels ----------------------------------------------------------------------------------

// Sums of a column, for all rows that a step brings: one access to shared memory.
using DepthwiseSums = Vector<float, kDepthwiseRows>;

// The sums over the columns of a pixel, whose first is at `at` in each plane of shared memory.
// kStride 0: any.
template <int kReachX, int kStride>
__device__ __forceinline__ void add_columns(const DepthwiseParams& p, const DepthwiseSums* sums,
                                            int at, float (&totals)[kDepthwiseRows]) {
#pragma unroll
  for (int h = 0; h < kReachX; ++h) {
    const int place = at + h * p.stride_x;
    const DepthwiseSums* from = sums + h * p.positions + place + (place >> p.pad_shift);
    const int count = h == kReachX - 1 ? p.last_x : p.stride_x;
    float sum[kDepthwiseRows] = {};
    const auto add = [&](int r) {
      const DepthwiseSums found = from[r];
#pragma unroll
      for (int k = 0; k < kDepthwiseRows; ++k) sum[k] += found.at[k];
    };
    if constexpr (kStride == 0) {
#pragma unroll 4
      for (int r = 0; r < count; ++r) add(r);
    } else {
#pragma unroll
      for (int r = 0; r < kStride; ++r)
        if (r < count) add(r);
    }
#pragma unroll
    for (int k = 0; k < kDepthwiseRows; ++k) totals[k] += sum[k];
  }
}

// The rows of the input from `row` on, counted in the unit, that are complete now.
template <int kReachX, int kStride, typename T>
__device__ __forceinline__ void store_rows(const DepthwiseParams& p, const DepthwiseUnit& unit,
                                           int lane, int row, const DepthwiseSums* sums, T* gx) {
  if (unit.rows <= 0) return;
  for (int x = lane; x < unit.width; x += p.lanes) {
    float found[kDepthwiseRows] = {};
    add_columns<kReachX, kStride>(p, sums, x * p.stride_x, found);
    T* to = gx + row * p.in_pitch + x;
#pragma unroll
    for (int k = 0; k < kDepthwiseRows; ++k) {
      if (below(row + k, unit.rows)) *to = narrow<T>(found[k]);
      to += p.in_pitch;
    }
  }
}

// --- The kernel ------------------------------------------------------------------------------

template <typename T, int kReachY, int kReachX>
__global__ void __launch_bounds__(kDepthwiseThreads, 2)
    depthwise_igrad_kernel(const __grid_constant__ DepthwiseParams p) {
  constexpr int kRows = kDepthwiseRows, kHeld = kRows + kReachY - 1, kStages = kIgradStages<T>;
  extern __shared__ __align__(16) unsigned char raw_memory[];
  const int team = p.by_lanes(threadIdx.x), lane = threadIdx.x - team * p.lanes;
  const int number = blockIdx.x * p.teams + team;
  const bool active = number < p.units;
  DepthwiseUnit unit(p, active ? number : 0);
  if (!active) unit.rows = 0;

  // Where columns lie: `first` is where the first column of the team's first thread lies, counted
  // from the first block of the unit.
  const int base = unit.x * p.stride_x - p.padding_x;
  const int start = max(base, 0) & -kOwn, column = start + kOwn * lane;
  const int first = start + p.padding_x;
  const int columns = active ? p.out_w - column : 0;

  T* const ring = reinterpret_cast<T*>(raw_memory);
  const int apart = p.threads * kOwn;
  float* const after = reinterpret_cast<float*>(ring + kStages * kRows * apart);
  const int line = p.reach_x * p.period, lines = p.kernel_z * p.kernel_y;
  float* const weights = after + team * lines * line;
  DepthwiseSums* const sums = reinterpret_cast<DepthwiseSums*>(after + p.teams * lines * line) +
                              team * kReachX * p.positions;

  // --- grad_output: so many steps ahead
  const T* const plane =
      static_cast<const T*>(p.gy) +
      static_cast<int64_t>(unit.image) * p.channels * p.out_d * p.out_h * p.out_w +
      unit.channel * p.out_channel + column;
  // Where the blocks end that lead to the unit's rows; nothing is read for a thread without
  // columns.
  const int end = (unit.y + unit.rows + kReachY - 1) * p.stride_y - p.padding_y;
  const int64_t row_step = p.stride_y * p.out_pitch;
  T* const own_ring = ring + threadIdx.x * kOwn;
  const int step_size = kRows * apart;
  DepthwiseStep next{unit.y};
  int fill = 0;
  const auto issue = [&] {
    const int oz = unit.z * p.stride_z - p.padding_z + next.kz * p.dilation_z;
    const int oy = next.b * p.stride_y + next.r - p.padding_y;
    const bool any = below(oz, p.out_d) && next.r < p.kernel_y && columns > 0;
    const int limit = any ? max(min(p.out_h, end + next.r), 0) : 0;
    bool inside[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) inside[i] = below(oy + i * p.stride_y, limit);
    const int64_t row = static_cast<int64_t>(oz) * p.out_h + oy;
    bring_rows<kRows>(p.vector, plane + row * p.out_pitch, row_step, own_ring + fill, apart, inside,
                      columns);
    ptx::copy_async_commit();
    next.advance(p);
    fill = fill < (kStages - 1) * step_size ? fill + step_size : 0;
  };
#pragma unroll 1
  for (int i = 1; i < kStages; ++i) issue();

  const T* const w =
      static_cast<const T*>(p.other) + static_cast<int64_t>(unit.channel) * lines * p.kernel_x;
  place_weights(p, w, first, lane, weights);
  for (int i = lane; i < kReachX * p.positions; i += p.lanes) sums[i] = {};
  __syncthreads();

  // Places of the thread's columns among the unit's sums; none where no pixel of the unit is met.
  int places[kOwn];
#pragma unroll
  for (int j = 0; j < kOwn; ++j) {
    const int at = column + j - base;
    const bool there = j < columns && below(at, (unit.width + kReachX - 1) * p.stride_x);
    places[j] = there ? at + (at >> p.pad_shift) : -1;
  }
  const int own = kOwn * lane;
  const float* const mine = weights + own - p.by_period(own) * p.period;
  T* const gx = static_cast<T*>(p.result) +
                static_cast<int64_t>(unit.image) * p.channels * p.in_d * p.in_h * p.in_w +
                unit.channel * p.in_channel +
                (static_cast<int64_t>(unit.z) * p.in_h + unit.y) * p.in_pitch + unit.x;

  const int block_weights = p.stride_y * line;
  float held[kHeld][kReachX][kOwn] = {};  // row k is that of block b + k - (kReachY - 1)
  int take = 0;
#pragma unroll 1
  for (int group = 0; group < p.groups; ++group) {
#pragma unroll 1
    for (int kz = 0; kz < p.kernel_z; ++kz) {
      const float* row_weights = mine + kz * p.kernel_y * line;
#pragma unroll 1
      for (int r = 0; r < p.stride_y; ++r, row_weights += line) {
        issue();
        ptx::copy_async_wait<kStages - 1>();
        float gy[kRows][kOwn];
#pragma unroll
        for (int i = 0; i < kRows; ++i) read_own(own_ring + take + i * apart, gy[i]);
        take = take < (kStages - 1) * step_size ? take + step_size : 0;
#pragma unroll
        for (int hy = 0; hy < kReachY; ++hy) {
          if (hy == kReachY - 1 && r >= p.last_y) break;
          const float* from = row_weights + hy * block_weights;
#pragma unroll
          for (int hx = 0; hx < kReachX; ++hx) {
            const auto by = *reinterpret_cast<const Vector<float, kOwn>*>(from + hx * p.period);
#pragma unroll
            for (int i = 0; i < kRows; ++i) {
#pragma unroll
              for (int j = 0; j < kOwn; ++j)
                held[i - hy + kReachY - 1][hx][j] += gy[i][j] * by.at[j];
            }
          }
        }
      }
    }
#pragma unroll
    for (int j = 0; j < kOwn; ++j) {
      if (places[j] < 0) continue;
#pragma unroll
      for (int h = 0; h < kReachX; ++h) {
        DepthwiseSums rows;
#pragma unroll
        for (int k = 0; k < kRows; ++k) rows.at[k] = held[k][h][j];
        sums[h * p.positions + places[j]] = rows;
      }
    }
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
#pragma unroll
      for (int h = 0; h < kReachX; ++h) {
#pragma unroll
        for (int j = 0; j < kOwn; ++j)
          held[k][h][j] = k < kReachY - 1 ? held[k + kRows][h][j] : 0.f;
      }
    }
    __syncthreads();
    const int row = group * kRows - (kReachY - 1);
    if (p.stride_x == 2) {
      store_rows<kReachX, 2>(p, unit, lane, row, sums, gx);
    } else if (p.stride_x == 4) {
      store_rows<kReachX, 4>(p, unit, lane, row, sums, gx);
    } else if (p.stride_x == 8) {
      store_rows<kReachX, 8>(p, unit, lane, row, sums, gx);
    } else {
      store_rows<kReachX, 0>(p, unit, lane, row, sums, gx);
    }
    __syncthreads();
  }
}

}  // namespace upconv::direct
