// Hopper kernel for both phases of a row: what the input's gradient reads, multiplies and writes.
//
// gx[ci, i] = sum over co and k of gy[co, 2 i - 1 + k] * w[ci, co, k] (padding 1): the same product
// with K and columns changed. The taps of two neighbouring pixels are six places of a row.
#pragma once

#include "sm90_phases_layout.cuh"

namespace upconv::phases {

template <typename Type, int N, int kMany, int kWidth>
struct Backward {
  using Operand = Type;
  using Element = typename Operand::Element;
  static constexpr int kColumns = N, kBlocks = kMany, kTaps = kWidth;
  static constexpr bool kWide = sizeof(Element) == 4;
  static constexpr int kSteps = kBackwardSteps;
  static constexpr int kStepChannels = kStepBytes / static_cast<int>(sizeof(Element));
  static constexpr int kChannels = kSteps * kStepChannels;  // of a box

  const PhasesParams& p;

  // --- The taps of a row ---

  static constexpr int kSums = 1;
  __host__ __device__ static constexpr int sum_of(int) { return 0; }
  __host__ __device__ static constexpr int tap_of(int product) { return product; }
  static constexpr int kOperands = kTaps;
  __host__ __device__ static constexpr int operand_of(int product) { return product; }

  // --- Boxes ---

  // The box begins 16 bytes before the taps of the block's first pixel but one.
  __device__ __forceinline__ void fetch(const Block& block, int, int stage, uint32_t to,
                                        const CUtensorMap& map, uint32_t barrier) const {
    ptx::box_copy(to, map, 2 * block.x - kPieceBytes / static_cast<int>(sizeof(Element)),
                  block.y * p.stride_y - p.pad_y, block.z * p.stride_z - p.pad_z, stage * kChannels,
                  block.image, barrier);
  }

  // --- Operands ---

  // Of the second tap of a thread's pixel in a channel, for the first tap of the rows.
  __device__ __forceinline__ uint32_t place(int b, int warp, int lane) const {
    const Own own = own_pixel(p, b, warp, lane);
    return kPieceBytes +
           (own.y * p.stride_y * p.box_w + own.x * 2) * static_cast<int>(sizeof(Element));
  }
  // Taps of the rows go forwards in the box.
  static constexpr int kRowStep = 1;
  __device__ __forceinline__ int first_tap() const { return 0; }
  struct Edges {};
  __device__ __forceinline__ Edges edges(const Block&, int, int) const { return {}; }

  // Loads two places before `from` to five after it, of each of a thread's channels. Rows r and
  // r + 8 of an operand are neighbouring pixels, whose taps are two places apart.
  __device__ __forceinline__ void load(uint32_t (&to)[kOperands][4], uint32_t from,
                                       const Channels& channels, const Edges&, int) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t places[6];  // from the first tap of a thread's own pixel to the last of the next
      if constexpr (kWide) {
        const uint32_t at = from + half * channels.other;
        uint2 before, after;
        uint4 middle;
        ptx::load_shared(before, at - 8);
        ptx::load_shared(middle, at);
        ptx::load_shared(after, at + 16);
        places[0] = before.y, places[1] = middle.x, places[2] = middle.y;
        places[3] = middle.z, places[4] = middle.w, places[5] = after.x;
      } else {
        uint32_t before[2], after[2];
        uint2 middle[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const uint32_t at = from + half * channels.eight + i * channels.other;
          ptx::load_shared(before[i], at - 4);
          ptx::load_shared(middle[i], at);
          ptx::load_shared(after[i], at + 8);
        }
        places[0] = high_halves(before[0], before[1]);
        places[1] = low_halves(middle[0].x, middle[1].x);
        places[2] = high_halves(middle[0].x, middle[1].x);
        places[3] = low_halves(middle[0].y, middle[1].y);
        places[4] = high_halves(middle[0].y, middle[1].y);
        places[5] = low_halves(after[0], after[1]);
      }
#pragma unroll
      for (int i = 0; i < kOperands; ++i) {
        to[i][2 * half] = places[i], to[i][2 * half + 1] = places[i + 2];
      }
    }
  }

  // --- Packing ---

  static constexpr bool kInColumns = true;  // columns are channels of the layer's input
  __device__ static __forceinline__ PackedRow packed_row(const PhasesParams&, int row) {
    return {0, row};
  }

  // --- Stores ---

  __device__ __forceinline__ void begin_group(uint32_t, int) const {}

  // The accumulators of a thread: two neighbouring pixels, in two of every 8 channels.
  __device__ __forceinline__ void store(const float (&d)[kSums * kBlocks][N / 2],
                                        const Block& block, const Unit& unit, int warp, int lane,
                                        uint32_t) const {
    const int channel = unit.group * N + lane % 4 * 2;
    const int64_t area = static_cast<int64_t>(p.in_d) * p.in_h * p.in_w;
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      const auto [x, y] = pixel_at(p, block, own_pixel(p, b, warp, lane));
      if (y >= p.in_h || x >= p.in_w) continue;
      Element* to = static_cast<Element*>(p.result) +
                    (static_cast<int64_t>(block.image) * p.in_channels + channel) * area +
                    (static_cast<int64_t>(block.z) * p.in_h + y) * p.in_w + x;
      const float (&sums)[N / 2] = d[b];
#pragma unroll
      for (int j = 0; j < N / 8; ++j) {
        const int left = p.in_channels - channel - 8 * j;
        if (left > 0) put(to, sums[4 * j], sums[4 * j + 2]);
        if (left > 1) put(to + area, sums[4 * j + 1], sums[4 * j + 3]);
        to += 8 * area;
      }
    }
  }

  __device__ static __forceinline__ void put(Element* to, float v0, float v1) {
    alignas(8) const Element two[] = {Operand::from_float(v0), Operand::from_float(v1)};
    using Vector = VectorOf<2 * sizeof(Element)>;
    __stcs(reinterpret_cast<Vector*>(to), *reinterpret_cast<const Vector*>(two));
  }
};

}  // namespace upconv::phases
