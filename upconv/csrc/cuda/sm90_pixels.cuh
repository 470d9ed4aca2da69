// Hopper kernels whose rows are pixels: how a thread makes operands of what TMA has brought,
// channel by channel.
#pragma once

#include <type_traits>

#include "sm90_layout.cuh"

namespace upconv::pixels {

constexpr int kStepBytes = 32;   // of K in one product
constexpr int kPieceBytes = 16;  // TMA begins with whole ones

// Packs the same halves of two channels' words.
__device__ __forceinline__ uint32_t low_halves(uint32_t first, uint32_t second) {
  return __byte_perm(first, second, 0x5410);
}
__device__ __forceinline__ uint32_t high_halves(uint32_t first, uint32_t second) {
  return __byte_perm(first, second, 0x7632);
}

// Two outputs of 16 bits, the first in the lower half.
template <typename Operand>
__device__ __forceinline__ uint32_t two_halves(float low, float high) {
  if constexpr (std::is_same_v<Operand, Fp16>) return ptx::to_halves(low, high);
  return ptx::to_bfloat16s(low, high);
}

// Of a box whose channels have an odd number of pieces, or twice an odd number, lanes of four
// channels, two or one apart, read different banks.
__host__ __device__ inline int channel_step(int channel_bytes) {
  return channel_bytes / kPieceBytes % 2 ? 2 : 1;
}

// K may be numbered as one likes. Lane t reads channels t * step and another one of 8, in 16 bits
// of 8 and of the next 8; they are numbers t and t + 4 of K, or pair t and pair t + 4.
struct Channels {
  uint32_t first, other, eight;  // places in a box; `other` and `eight` from the first
  uint32_t step;                 // from the channels of a product to those of the next
};
__device__ __forceinline__ Channels channels_of(int channel_bytes, int element_bytes, int lane) {
  const int step = channel_step(channel_bytes);
  return {static_cast<uint32_t>(lane % 4 * step * channel_bytes),
          static_cast<uint32_t>((step == 2 ? 1 : 4) * channel_bytes),
          static_cast<uint32_t>(8 * channel_bytes),
          static_cast<uint32_t>(kStepBytes / element_bytes * channel_bytes)};
}
// The channel of a box that is number `i` of the first or second 16 bytes of K.
template <typename Element>
__device__ __forceinline__ int channel_of(int channel_bytes, int half, int i) {
  const int step = channel_step(channel_bytes), other = step == 2 ? 1 : 4;
  return sizeof(Element) == 4 ? i * step + half * other : 8 * half + i / 2 * step + i % 2 * other;
}

}  // namespace upconv::pixels
