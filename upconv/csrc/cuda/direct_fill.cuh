// Fill of the CUDA-core kernel: inputs and weights from global into shared memory.
#pragma once

#include "direct_work.cuh"
#include "ptx.cuh"

namespace upconv::direct {

// Channels of one position: asynchronous copies, all of them in flight at once.
template <typename T>
__device__ __forceinline__ void copy_channels(const DirectParams& p, const T* source, bool inside,
                                              int channels, T* tile) {
  constexpr int kBytes = static_cast<int>(sizeof(T));
  const int valid = inside ? kBytes : 0;
  uint32_t target = ptx::shared_address(tile);
  if (channels == 1) return ptx::copy_async<kBytes>(target, source, valid);
#pragma unroll 2
  for (int c = 0; c < channels; ++c, source += p.in_plane, target += p.channel * kBytes) {
    ptx::copy_async<kBytes>(target, source, valid);
  }
}

// The inputs of one residue of the input step; z0, y0, x0 is where position 0 lies. Four positions
// of a thread at a time, so that their arithmetic overlaps; 16-bit types are converted on the way.
template <typename T, typename Acc>
__device__ __forceinline__ void fill_plane(const DirectParams& p, DirectPosition position, int z0,
                                           int y0, int x0, const T* __restrict__ x, int channels,
                                           Acc* tile) {
  constexpr int kBatch = 4;
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
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (first + i * p.threads < positions) {
          copy_channels(p, x + max(offset[i], 0), offset[i] >= 0, channels,
                        tile + first + i * p.threads);
        }
      }
    } else {
      const T* source = x;
      Acc* target = tile + first;
#pragma unroll 2
      for (int c = 0; c < channels; ++c, source += p.in_plane, target += p.channel) {
        Acc value[kBatch];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          value[i] = offset[i] >= 0 ? widen(source[offset[i]]) : Acc(0);
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

// The weights of one set of rows: [channel][offset][row]. `w` is the chunk's first channel of the
// warp's first output channel; `taps` the kind's table in shared memory (lanes that read different
// parameters would wait for each other). The warps that share these rows share the work: `lane`
// counts through all of their lanes.
template <int kRows, typename T, typename Acc>
__device__ __forceinline__ void fill_weights(const DirectParams& p, const DirectRows& rows,
                                             const T* __restrict__ w, const int16_t* taps,
                                             int channels, int lane, int lanes, Acc* weights) {
  constexpr int kBatch = sizeof(T) == sizeof(Acc) ? 1 : 4;
  const DirectKind& kind = p.kind[rows.kind];
  const int offsets = kind.end - kind.begin, items = channels * offsets * kRows;
  const float by_offsets = 1.0f / offsets;
  for (int first = lane; first < items; first += kBatch * lanes) {
    Acc value[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int item = min(first + i * lanes, items - 1);
      const int index = item / kRows, row = item - index * kRows;
      const int c = divide(index, by_offsets), channel = divide(row, p.by_phases);
      const int tap = taps[(index - c * offsets - channel) * p.phases + row];
      const bool real = tap >= 0 && rows.channel + channel < p.out_channels;
      const int64_t place = static_cast<int64_t>(c) * p.weight_in + channel * p.weight_out + tap;
      const T* const source = real ? w + place : static_cast<const T*>(p.w);
      if constexpr (sizeof(T) == sizeof(Acc)) {
        ptx::copy_async<sizeof(T)>(ptx::shared_address(weights + index * kPaddedRows<kRows> + row),
                                   source, real ? static_cast<int>(sizeof(T)) : 0);
      } else {
        value[i] = real ? widen(*source) : Acc(0);
      }
    }
    if constexpr (sizeof(T) != sizeof(Acc)) {
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int item = first + i * lanes;
        if (item < items) weights[item / kRows * kPaddedRows<kRows> + item % kRows] = value[i];
      }
    }
  }
}

}  // namespace upconv::direct
