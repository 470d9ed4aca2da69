// Hopper kernel that walks: the weight as its feeder copies it, [group of channels][stage][row of
// taps][step][tap of the row][half][column][16 bytes]; columns are [tap of the walk][channel]. A
// thread has 16 bytes of K of a column.
#pragma once

#include "sm90_walk_layout.cuh"

namespace upconv::walk {

constexpr int kPackThreads = 256;

// Pieces of 16 bytes that the packed weights have.
__host__ __device__ inline int64_t piece_count(const WalkParams& p) {
  return static_cast<int64_t>(p.shape.groups) * p.shape.depth * p.kernel_y * weight_bytes(p) / 16;
}

template <typename Operand>
__global__ void __launch_bounds__(kPackThreads)
    sm90_walk_pack(const __grid_constant__ WalkParams p,
                   const typename Operand::Element* __restrict__ weight,
                   uint4* __restrict__ packed) {
  using Element = typename Operand::Element;
  constexpr int kEach = 16 / static_cast<int>(sizeof(Element));
  const int64_t piece = static_cast<int64_t>(blockIdx.x) * kPackThreads + threadIdx.x;
  if (piece >= piece_count(p)) return;
  // From the innermost index out.
  int64_t rest = piece;
  const auto next = [&rest](int size) {
    const int at = static_cast<int>(rest % size);
    rest /= size;
    return at;
  };
  const int steps = steps_of(p.blocks);
  const int channel = next(p.tile_c), z = next(p.kernel_z), half = next(2), x = next(p.kernel_x),
            step = next(steps), y = next(p.kernel_y), stage = next(p.shape.depth);
  const int out = static_cast<int>(rest) * p.tile_c + channel;
  const int first_in = (stage * steps + step) * (kStepBytes / static_cast<int>(sizeof(Element)));
  // The first plane that an output meets is the last one of those whose sums are on their way.
  const int taps[] = {p.flipped ? p.kernel_z - 1 - z : z, p.flipped ? p.kernel_y - 1 - y : y,
                      p.flipped ? p.kernel_x - 1 - x : x};
  const int tap = (taps[0] * p.kernel_y + taps[1]) * p.kernel_x + taps[2];
  alignas(16) Element all[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int in = first_in + pixels::channel_of<Element>(channel_bytes(p), half, i);
    const bool there = in < p.in_channels && out < p.out_channels;
    const int64_t at =
        static_cast<int64_t>(in) * p.weight_in + static_cast<int64_t>(out) * p.weight_out + tap;
    const Element value = there ? weight[at] : Operand::from_float(0.f);
    if constexpr (sizeof(Element) == 4) {
      all[i] = __uint_as_float(Operand::prepare(__float_as_uint(value)));
    } else {
      all[i] = value;
    }
  }
  packed[piece] = *reinterpret_cast<const uint4*>(all);
}

}  // namespace upconv::walk
