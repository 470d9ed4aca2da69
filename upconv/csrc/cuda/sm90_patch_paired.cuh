// Hopper kernel for patches: what the forward pass reads in 16 bits where planes of the input are
// an odd number of 8 bytes, say 14 x 14 pixels. The rest is as in sm90_patch_forward.cuh.
//
// Strides of TMA are multiples of 16 bytes, and a box begins on 16 bytes (otherwise: illegal
// instruction). So two channels are one row of the tensor map, and a stage has one box of even
// channels and one of odd ones, which begins 4 pixels before them. A row of a box has 72 pixels: a
// block, those 4, and 4 more. TMA does not swizzle rows of 144 bytes, and need not: every second
// one begins 8 banks further on, and a thread reads every second one.
// What a box has before or beyond a plane is another channel's. It meets rows of the product that
// are not stored.
#pragma once

#include "sm90_patch_forward.cuh"

namespace upconv::patch {

template <typename Type, int N>
struct ForwardPaired : Forward<Type, N> {
  using Base = Forward<Type, N>;
  using Base::kChannels, Base::p;
  using typename Base::Block, typename Base::Element;
  static_assert(sizeof(Element) == 2, "pixels of 16 bits");
  static constexpr int kPairs = kChannels / 2;  // of a stage
  static constexpr int kEarly = 4;              // pixels of a box before the odd channels'
  static constexpr int kPart = kBlock + 2 * kEarly;
  static constexpr int kPartBytes = kPart * 2;  // of a row of a box
  static constexpr int kParts = 2;              // even channels, odd ones
  static constexpr int kBytes = kParts * kPairs * kPartBytes;
  // A row of what is left over of several images has 64 pixels. More rows than a stage has make
  // the box as large as the others.
  static constexpr int kRestPairs = kBytes / kParts / kRowBytes;

  // --- Boxes ---

  // What is left over of an image is 4 pixels less than a multiple of 8: a box of `rest_pixels` has
  // room for the early ones.
  __device__ __forceinline__ void fetch(const Block& block, int stage, int odd, uint32_t to,
                                        const CUtensorMap& whole, const CUtensorMap& rest,
                                        uint32_t barrier) const {
    const int pixel = block.pixel + (odd ? pixels_of(p) - kEarly : 0), pair = stage * kPairs;
    if (block.whole) {
      ptx::box_copy(to, whole, pixel, block.image, pair, 0, 0, barrier);
    } else {
      ptx::box_copy(to, rest, pixel, block.image, pair, 0, 0, barrier);
    }
  }

  // --- Operands ---

  // The place in a box of a thread's pixel: pair 2 t of every 8.
  struct Places {
    uint32_t first;
    bool several;  // images in a row
  };
  __device__ __forceinline__ Places places(const Block& block, int warp, int lane) const {
    const bool several = !block.whole && p.rest_pixels < kBlock;
    const int pair = 2 * (lane % 4), row = several ? kRowBytes : kPartBytes;
    return {static_cast<uint32_t>(pair * row + this->own_pixel(warp, lane) * 2), several};
  }

  __device__ __forceinline__ void load(uint32_t (&to)[kSteps][4], uint32_t box,
                                       const Places& at) const {
    if (at.several) {
      load_rows<kRowBytes>(to, box + at.first);
    } else {
      load_rows<kPartBytes>(to, box + at.first);
    }
  }

  // The two channels of a pair are numbers 2 t and 2 t + 1 of K; those of the next one 2 t + 8 and
  // 2 t + 9.
  template <int kRow>
  __device__ static __forceinline__ void load_rows(uint32_t (&to)[kSteps][4], uint32_t from) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t at = from + (step * 8 + half) * kRow;
        uint32_t even, odd;
        ptx::load_shared(even, at);
        ptx::load_shared(odd, at + kBytes / kParts + kEarly * 2);
        to[step][2 * half] = __byte_perm(even, odd, 0x5410);
        to[step][2 * half + 1] = __byte_perm(even, odd, 0x7632);
      }
    }
  }

  // The number of the weight that is number `i` of 16 bytes of a column; negative for none.
  __device__ static __forceinline__ int64_t weight_at(const PatchParams& p, int stage, int step,
                                                      int half, int column, int i) {
    const int pair = stage * kPairs + step * 8 + i / 2 * 2 + half;
    return Base::weight_of(p, 2 * pair + i % 2, column);
  }
};

}  // namespace upconv::patch
