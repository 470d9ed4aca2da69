// float32 that must not be rounded, as sums of two FP16 numbers: a head and a tail, 11 bits each.
// Numbers are scaled by powers of two first, which rounds nothing, so that the largest of those
// that are scaled together comes to 2^14 or more. Heads then have all their bits down to 2^-28 of
// it. Tails of the input are 2^11 times as large as they should be, and so have theirs, too; the
// heads of the weights that they meet are as much smaller.
#pragma once

#include "ptx.cuh"

namespace upconv {

constexpr float kTailScale = 2048;
constexpr uint32_t kMostHalves = 0x7bff7bff, kLeastHalves = 0xfbfffbff;  // 65504 and -65504
constexpr uint32_t kInfinity = 0x7f800000;

// 2^exponent, from 2^-126 to 2^127.
__device__ __forceinline__ float power_of_two(int exponent) {
  return __uint_as_float(static_cast<uint32_t>(exponent + 127) << 23);
}

// The power of two that brings a number of this size to 2^14 or more; what is below 2^-101 stays
// below.
__device__ __forceinline__ int scale_of(uint32_t size) {
  return min(141 - static_cast<int>(size >> 23), 115);
}

// Two numbers as FP16, the first in the lower half. What is not finite becomes a number with its
// sign: a head's products are numbers, and it is the tail's that are what IEEE 754 says.
__device__ __forceinline__ uint32_t finite_halves(float low, float high) {
  return ptx::bounded_halves(ptx::to_halves(low, high), kLeastHalves, kMostHalves);
}
__device__ __forceinline__ float lower_half(uint32_t halves) {
  return ptx::widened(ptx::Float16{static_cast<unsigned short>(halves)});
}
__device__ __forceinline__ float upper_half(uint32_t halves) {
  return ptx::widened(ptx::Float16{static_cast<unsigned short>(halves >> 16)});
}

// How large a number is, as bits; 0 for what is not finite.
__device__ __forceinline__ uint32_t finite_size(uint32_t bits) {
  const uint32_t size = bits & 0x7fffffffu;
  return size < kInfinity ? size : 0;
}

// Heads and tails of two numbers of the input. Where both are known to be finite, a little faster.
template <bool kFinite = false>
__device__ __forceinline__ void cut_inputs(uint32_t low, uint32_t high, float scale, uint32_t& head,
                                           uint32_t& tail) {
  const float a = __uint_as_float(low), b = __uint_as_float(high);
  head = kFinite ? ptx::to_halves(a * scale, b * scale) : finite_halves(a * scale, b * scale);
  const float larger = scale * kTailScale;
  tail = ptx::to_halves(fmaf(lower_half(head), -kTailScale, a * larger),
                        fmaf(upper_half(head), -kTailScale, b * larger));
}

// Two weights, already scaled: in their tails (0), as heads that meet tails (1), or heads (2).
__device__ __forceinline__ uint32_t cut_weights(float low, float high, int part) {
  const uint32_t heads = finite_halves(low, high);
  if (part == 2) return heads;
  const float low_head = lower_half(heads), high_head = upper_half(heads);
  if (part == 0) return ptx::to_halves(low - low_head, high - high_head);
  // What is not zero stays so, for the infinities that it may meet.
  const auto small = [](float v, float head) {
    const float least = 5.9604645e-8f;  // of FP16
    const float size = fmaxf(fabsf(head) / kTailScale, least);
    return v == 0.f ? 0.f : copysignf(size, head == 0.f ? v : head);
  };
  return ptx::to_halves(small(low, low_head), small(high, high_head));
}

}  // namespace upconv
