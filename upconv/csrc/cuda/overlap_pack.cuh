// The kernel for few output channels: its weights, packed before.
#pragma once

#include "overlap_stage.cuh"

namespace upconv::overlap {

// The tap of a dimension that leads from a phase to a shift; -1: none.
__device__ __forceinline__ int tap_at(int phase, int shift, int stride, int dilation, Divider by,
                                      int kernel) {
  const int reach = phase - shift * stride;
  if (reach < 0) return -1;
  const int tap = by(reach);
  return tap * dilation == reach && tap < kernel ? tap : -1;
}

// Where the weights of a column of the product are for a shift, in those of an input channel; -1:
// nowhere.
__device__ __forceinline__ int place_of(const OverlapParams& p, const OverlapShift& at,
                                        int column) {
  int found = -1;
  for (int i = 0; i < p.sums; ++i) {
    const OverlapSum& sum = p.sum[i];
    const int tap = column - sum.column;
    if (sum.column < 0 || tap < 0 || tap >= p.kernel_x) continue;
    const int z = tap_at(sum.z, at.z, p.stride_z, p.dilation_z, p.by_dilation_z, p.kernel_z);
    const int y = tap_at(sum.y, at.y, p.stride_y, p.dilation_y, p.by_dilation_y, p.kernel_y);
    if (z < 0 || y < 0) continue;
    found = ((sum.channel * p.kernel_z + z) * p.kernel_y + y) * p.kernel_x + tap;
  }
  return found;
}

// The weights of each group as [box][shift][step of K][tile of 8 columns][lane][two registers]: a
// thread has a register, blockIdx.y is the group.
template <typename Operand>
__global__ void __launch_bounds__(kOverlapPackThreads)
    overlap_pack_kernel(const __grid_constant__ OverlapParams p, const void* weight, void* packed) {
  using Element = typename Operand::Element;
  constexpr int kPer = Operand::kPer;
  const int word = blockIdx.x * kOverlapPackThreads + threadIdx.x, lane = word >> 1 & 31;
  if (word * 4 >= p.weight_bytes) return;
  int step = word >> 6;
  const int tile = split_off(step, p.by_tiles_n, p.tiles_n);
  int shift = step >> (31 - __clz(p.steps));
  step &= p.steps - 1;
  int chunk = shift;
  shift = split_off(chunk, p.by_shifts, p.shifts);
  const int channel =
      chunk * p.channels + step * kStep<Operand> + ((word & 1) * 4 + (lane & 3)) * kPer;
  const int place = place_of(p, p.shift[shift], tile * 8 + lane / 4);
  const int each = p.out_channels * p.kernel_z * p.kernel_y * p.kernel_x;
  const Element* const from =
      static_cast<const Element*>(weight) + static_cast<int64_t>(blockIdx.y) * p.in_channels * each;
  Element read[kPer];
#pragma unroll
  for (int e = 0; e < kPer; ++e) {
    const bool exists = place >= 0 && channel + e < p.in_channels;
    read[e] = exists ? from[(channel + e) * each + place] : Operand::from_float(0.f);
  }
  uint32_t bits;
  if constexpr (kPer == 1) {
    bits = Operand::prepare(__float_as_uint(read[0]));
  } else {
    bits = static_cast<uint32_t>(reinterpret_cast<const uint16_t&>(read[1])) << 16 |
           reinterpret_cast<const uint16_t&>(read[0]);
  }
  static_cast<uint32_t*>(packed)[static_cast<int64_t>(blockIdx.y) * (p.weight_bytes / 4) + word] =
      bits;
}

}  // namespace upconv::overlap
