// The kernel for few output channels: what the taps of the width say to an output, added up behind
// the products.
#pragma once

#include "overlap_stage.cuh"

namespace upconv::overlap {

// Columns of the product from `begin` to `end` as rows of pixels.
template <typename Operand, int kM, int kN>
__device__ __forceinline__ void lay_down(const OverlapParams& p, int begin, int end, float* to,
                                         const float (&sums)[kM][kN][4]) {
  const int lane = threadIdx.x % 32;
  to += lane / 4 * (kBytes<Operand> == 4 ? 2 : 1);
#pragma unroll
  for (int i = 0; i < 2 * kN; ++i) {
    const int n = i / 2, e = i % 2, column = n * 8 + lane % 4 * 2 + e;
    if (column < begin || column >= end) continue;
    float* const at = to + (column - begin) * p.sum_pitch;
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      if constexpr (kBytes<Operand> == 4) {
        *reinterpret_cast<float2*>(at + 16 * m) = make_float2(sums[m][n][e], sums[m][n][e + 2]);
      } else {
        at[16 * m] = sums[m][n][e];
        at[16 * m + 8] = sums[m][n][e + 2];
      }
    }
  }
}

// The output rows of this warp's row of places: one for each sum.
template <typename Operand>
__device__ __forceinline__ void list_outputs(const OverlapParams& p, const Shared& shared,
                                             int group, const Unit& unit, int row) {
  using Element = typename Operand::Element;
  for (int i = threadIdx.x % 32; i < p.sums; i += 32) {
    const OverlapSum& sum = p.sum[i];
    const int z = (unit.z + p.first_z) * p.stride_z + sum.z - p.padding_z;
    const int y = (row + p.first_y) * p.stride_y + sum.y - p.padding_y;
    const bool exists = row < p.count_y && z >= 0 && z < p.out_d && y >= 0 && y < p.out_h;
    OutputRow at{-1, sum.line < 0 ? -1 : sum.line * p.sum_pitch, 0.f, 0};
    if (exists) {
      at.offset = static_cast<int>(sum.channel * p.out_plane + (z * p.out_h + y) * p.out_w);
    }
    if (p.bias != nullptr) {
      at.bias = Operand::to_float(
          static_cast<const Element*>(p.bias)[group * p.out_channels + sum.channel]);
    }
    shared.outputs[i] = at;
  }
}

// What the taps of a phase of the width have for an output, added to `sum`. With kTaps a phase has
// so many or one less, else any number.
template <int kTaps>
__device__ __forceinline__ float added(const float* at, int tap_pitch, int taps, float sum) {
  if constexpr (kTaps > 0) {
#pragma unroll
    for (int tap = 0; tap < kTaps; ++tap) {
      if (tap < kTaps - 1 || taps == kTaps) sum += at[tap * tap_pitch];
    }
  } else {
    for (int tap = 0; tap < taps; ++tap) sum += at[tap * tap_pitch];
  }
  return sum;
}

template <typename Operand, int kCount>
__device__ __forceinline__ void store_outputs(typename Operand::Element* to,
                                              const float (&v)[kCount]) {
  using Element = typename Operand::Element;
  struct alignas(kCount * sizeof(Element)) Outputs {
    Element each[kCount];
  } outputs;
#pragma unroll
  for (int i = 0; i < kCount; ++i) outputs.each[i] = Operand::from_float(v[i]);
  *reinterpret_cast<Outputs*>(to) = outputs;
}

// Outputs of the sums from `begin` to `end`: a lane has all phases of a place, kVector at a time,
// so that which taps there are is the same for all lanes.
template <typename Operand, int kM, int kVector, int kTaps>
__device__ __forceinline__ void add_up(const OverlapParams& p, const Shared& shared, int place,
                                       int begin, int end, typename Operand::Element* image) {
  constexpr int kPlaces = (kM + 1) / 2;  // of a lane, 32 apart
  const int lane = threadIdx.x % 32, tap_pitch = p.tap_pitch;
  const int first = (place + lane) * p.stride_x;
  for (int s = begin; s < end; ++s) {
    const OutputRow row = shared.outputs[s];
    if (row.offset < 0) continue;
    typename Operand::Element* const to = image + row.offset + first;
    const float* const from = shared.sums + row.sums + lane;
    for (int phase = 0; phase < p.stride_x; phase += kVector) {
      float sums[kPlaces][kVector];
#pragma unroll
      for (int e = 0; e < kVector; ++e) {
        const OverlapPhase& taps = p.phase[phase + e];
#pragma unroll
        for (int i = 0; i < kPlaces; ++i) {
          const float* const at = from + taps.place + 32 * i;
          sums[i][e] = row.sums < 0 ? row.bias : added<kTaps>(at, tap_pitch, taps.taps, row.bias);
        }
      }
#pragma unroll
      for (int i = 0; i < kPlaces; ++i) {
        const int column = first + 32 * i * p.stride_x + phase;
        if (place + lane + 32 * i >= 0 && lane + 32 * i < p.valid && column < p.out_w) {
          store_outputs<Operand, kVector>(to + (column - first), sums[i]);
        }
      }
    }
  }
}

template <typename Operand, int kM, int kVector>
__device__ __forceinline__ void add_up_by(const OverlapParams& p, const Shared& shared, int place,
                                          int begin, int end, typename Operand::Element* image) {
  switch (p.even_taps) {
    case 1:
      return add_up<Operand, kM, kVector, 1>(p, shared, place, begin, end, image);
    case 2:
      return add_up<Operand, kM, kVector, 2>(p, shared, place, begin, end, image);
    case 3:
      return add_up<Operand, kM, kVector, 3>(p, shared, place, begin, end, image);
    default:
      return add_up<Operand, kM, kVector, 0>(p, shared, place, begin, end, image);
  }
}

template <typename Operand, int kM, int kN>
__device__ __forceinline__ void store_unit(const OverlapParams& p, const Shared& shared, int group,
                                           const Unit& unit, const Warp& warp,
                                           float (&sums)[kM][kN][4]) {
  using Element = typename Operand::Element;
  const int place = unit.column(p) + warp.x * p.valid - p.low_x;  // the first
  const int64_t before = (static_cast<int64_t>(unit.image) * p.groups + group) * p.out_channels;
  Element* const image = static_cast<Element*>(p.y) + before * p.out_plane;
  list_outputs<Operand>(p, shared, group, unit, unit.y + warp.y);
  for (int begin = 0; begin < p.sums; begin += p.together) {
    const int end = min(begin + p.together, p.sums), column = p.sum[begin].column;
    if (column >= 0) {
      lay_down<Operand, kM, kN>(p, column, column + p.sum_rows, shared.sums, sums);
    }
    __syncwarp();
    switch (p.store) {
      case 4:
        add_up_by<Operand, kM, 4>(p, shared, place, begin, end, image);
        break;
      case 2:
        add_up_by<Operand, kM, 2>(p, shared, place, begin, end, image);
        break;
      default:
        add_up_by<Operand, kM, 1>(p, shared, place, begin, end, image);
    }
    __syncwarp();
  }
#pragma unroll
  for (int i = 0; i < kM * kN * 4; ++i) sums[i / (4 * kN)][i / 4 % kN][i % 4] = 0.f;
}

}  // namespace upconv::overlap
