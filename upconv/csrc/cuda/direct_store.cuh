// Stores of the CUDA-core kernel. Where a thread has all 2, 4 or 8 width phases of a point, its
// sums go straight to the output: neighbouring lanes write neighbouring vectors. Others lie down in
// shared memory first.
#pragma once

#include "direct_work.cuh"

namespace upconv::direct {

template <int kVector, typename T, typename Acc>
__device__ __forceinline__ void narrow_vector(const Acc (&wide)[kVector], T* target) {
  Vector<T, kVector> values;
  if constexpr (kVector == 1) {
    values.at[0] = narrow<T>(wide[0]);
  } else {
#pragma unroll
    for (int i = 0; i < kVector; i += 2) narrow<T>(wide[i], wide[i + 1], values.at + i);
  }
  *reinterpret_cast<Vector<T, kVector>*>(target) = values;
}

// --- From registers --------------------------------------------------------------------------

// `first` is the thread's first point, `y` the first output channel of the warp's rows.
template <int kWidth, int kVector, int kRows, int kPoints, typename T, typename Acc>
__device__ __forceinline__ void store_straight(const DirectParams& p, const DirectUnit& unit,
                                               const DirectRows& rows, int first,
                                               const Acc (&sums)[kRows][kPoints],
                                               T* __restrict__ y) {
  const DirectKind& kind = p.kind[rows.kind];
  const int channels = min(p.thread_channels, p.out_channels - rows.channel);
  int oz[kPoints], oy[kPoints], ox[kPoints];
#pragma unroll
  for (int j = 0; j < kPoints; ++j) {
    const int point = first + 32 * j, row = divide(point, p.by_pitch);
    const int slab = divide(row, p.by_tile_rows), tile_y = row - slab * p.tile_rows;
    const int column = point - row * p.pitch;
    const bool real = column < p.tile_x && tile_y < p.tile_y && slab < p.tile_z;
    oz[j] = (unit.z + slab) * p.out_step_z;
    oy[j] = (unit.y + tile_y) * p.out_step_y;
    ox[j] = real ? (unit.x + column) * kWidth + kind.first_x : p.out_w;
  }
  int fold = 0, channel = 0;
#pragma unroll
  for (int r = 0; r < kRows; r += kWidth) {
    if (channel < channels) {
      const int first_z = p.first[kind.firsts + fold].z, first_y = p.first[kind.firsts + fold].y;
#pragma unroll
      for (int j = 0; j < kPoints; ++j) {
        const int z = oz[j] + first_z, row = oy[j] + first_y;
        if (!below(z, p.out_d) || !below(row, p.out_h)) continue;
        T* const target = y + ((z * p.out_h + row) * p.out_w + ox[j]);
#pragma unroll
        for (int v = 0; v < kWidth; v += kVector) {
          Acc values[kVector];
#pragma unroll
          for (int i = 0; i < kVector; ++i) values[i] = sums[r + v + i][j];
          if (below(ox[j] + v, p.out_w)) narrow_vector<kVector>(values, target + v);
        }
      }
    }
    if (++fold == p.folds) {
      fold = 0;
      ++channel;
      y += p.out_plane;
    }
  }
}

// A vector is all phases of a point or, where rows start in the middle of one, half of them.
template <int kWidth, int kRows, int kPoints, typename T, typename Acc>
__device__ __forceinline__ void store_points(const DirectParams& p, const DirectUnit& unit,
                                             const DirectRows& rows, int first,
                                             const Acc (&sums)[kRows][kPoints], T* __restrict__ y) {
  if constexpr (kWidth < kRows) {
    if (p.width > kWidth) return store_points<2 * kWidth>(p, unit, rows, first, sums, y);
  }
  if constexpr (kWidth * sizeof(T) <= 16) {
    if (p.vector == kWidth) return store_straight<kWidth, kWidth>(p, unit, rows, first, sums, y);
  }
  if constexpr (kWidth * sizeof(T) <= 32) {
    store_straight<kWidth, kWidth / 2>(p, unit, rows, first, sums, y);
  }
}

// --- Through shared memory -------------------------------------------------------------------

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

// A row without gaps: elements `begin`, `begin + step`, ... below `end`. Four are read before the
// first is stored, since a warp would wait 30 cycles for each.
template <int kVector, typename T, typename Acc>
__device__ __forceinline__ void store_row(const Acc* sums, int first_element, int skew, int begin,
                                          int end, int step, T* target) {
  constexpr int kBatch = 4;
  using Wide = Vector<Acc, kVector>;
  const auto read = [&](int e) {
    const int element = first_element + e;
    return *reinterpret_cast<const Wide*>(sums + element + (element >> 5) * skew);
  };
  int e = begin;
  for (; e + (kBatch - 1) * step < end; e += kBatch * step) {
    Wide values[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) values[i] = read(e + i * step);
#pragma unroll
    for (int i = 0; i < kBatch; ++i) narrow_vector(values[i].at, target + e + i * step);
  }
  for (; e < end; e += step) narrow_vector(read(e).at, target + e);
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
          store_row<kVector>(sums, first_element, p.skew, begin, end, p.row_lanes * kVector,
                             target);
        } else {
          for (int e = begin; e < end; e += p.row_lanes * kVector) {
            const int point = divide(e, p.by_width), phase = e - point * p.width;
            const int column = point * p.out_step_x + phase, element = first_element + e;
            if (phase < kind.columns && below(ox + column, p.out_w))
              narrow_vector(reinterpret_cast<const Vector<Acc, kVector>*>(sums + element +
                                                                          (element >> 5) * p.skew)
                                ->at,
                            target + column);
          }
        }
      }
    }
  }
}

}  // namespace upconv::direct
