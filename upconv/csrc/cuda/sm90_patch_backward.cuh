// Hopper kernel for patches: what the input's gradient reads, multiplies and writes.
//
// gx[ci, i] = sum over co and k of gy[co, i * stride + k] * w[ci, co, k]: the same product with K
// and columns changed. K is (channels, taps of a row) of one row of the patch after the other, and
// two neighbouring taps of two neighbouring pixels lie side by side in memory: one load brings all
// four. Patches are 2 wide.
#pragma once

#include "sm90_patch_layout.cuh"

namespace upconv::patch {

template <typename Type, int N>
struct Backward {
  using Operand = Type;
  using Element = typename Operand::Element;
  static constexpr bool kFromMemory = false, kWide = sizeof(Element) == 4;
  static constexpr int kTaps = 2;  // of a row
  static constexpr int kChannels = kSteps * 32 / static_cast<int>(sizeof(Element)) / kTaps;
  static constexpr int kPart = kRowBytes / static_cast<int>(sizeof(Element)) / kTaps;  // pixels
  static constexpr int kParts = kBlock / kPart;
  static constexpr int kBytes = kBoxBytes;

  const PatchParams& p;

  // --- Boxes ---

  // Rows of a patch.
  __host__ __device__ static int rows(const PatchParams& p) { return p.step_z * p.step_y; }
  __host__ __device__ static int depth(const PatchParams& p) {
    return (p.out_channels + kChannels - 1) / kChannels * rows(p);
  }

  // A part of a block is of one row of an image, and of any image. What is beyond the row, or the
  // last image, TMA makes zero.
  struct Block {
    int first;  // of all parts
  };
  struct Part {
    int image, z, y, x;
  };
  __host__ __device__ static int block_count(const PatchParams& p) {
    return (p.batch * p.in_d * p.in_h * p.shape.row_parts + kParts - 1) / kParts;
  }
  __device__ __forceinline__ Block block(int number) const { return {number * kParts}; }
  __device__ __forceinline__ Part part(const Block& block, int number) const {
    const int at = block.first + number, row = p.shape.by_row_parts(at);
    const int slice = p.shape.by_in_h(row), image = p.shape.by_in_d(slice);
    return {image, slice - image * p.in_d, row - slice * p.in_h,
            (at - row * p.shape.row_parts) * kPart};
  }

  __device__ __forceinline__ void fetch(const Block& block, int stage, int number, uint32_t to,
                                        const CUtensorMap& whole, const CUtensorMap&,
                                        uint32_t barrier) const {
    const Part from = part(block, number);
    const int channels = p.shape.by_rows(stage), row = stage - channels * rows(p);
    const int z = p.shape.by_step_y(row), y = row - z * p.step_y;
    ptx::box_copy(to, whole, from.x * kTaps, from.y * p.step_y + y, from.z * p.step_z + z,
                  channels * kChannels, from.image, barrier);
  }

  // --- Operands ---

  // The places in a box of two pixels' taps: channel 2 t of every 8, and 2 t + 1.
  struct Places {
    uint32_t even, odd;
  };
  __device__ __forceinline__ Places places(const Block&, int warp, int lane) const {
    const int pixel = own_pixel(warp, lane), channel = 2 * (lane % 4);
    const int along = pixel % kPart * kTaps * static_cast<int>(sizeof(Element)), piece = along / 16;
    const uint32_t at = pixel / kPart * (kBoxBytes / kParts) + channel * kRowBytes + along % 16;
    return {at + ((piece ^ channel) << 4), at + kRowBytes + ((piece ^ (channel + 1)) << 4)};
  }
  // Of a thread's two neighbouring pixels, the first.
  __device__ static __forceinline__ int own_pixel(int warp, int lane) {
    return 16 * warp + 2 * (lane / 4);
  }

  // TF32: a step has four channels, every second one of 8; their first taps are numbers 0 to 3 of
  // K, the second ones 4 to 7. 16 bits: 8 channels, first those with even numbers; taps side by
  // side.
  __device__ __forceinline__ void load(uint32_t (&to)[kSteps][4], uint32_t box,
                                       const Places& at) const {
    const uint32_t even = box + at.even, odd = box + at.odd;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      if constexpr (kWide) {
        uint4 both;
        ptx::load_shared(both, (step % 2 ? odd : even) + step / 2 * 8 * kRowBytes);
        to[step][0] = both.x, to[step][1] = both.z, to[step][2] = both.y, to[step][3] = both.w;
      } else {
        uint2 first, second;
        ptx::load_shared(first, even + step * 8 * kRowBytes);
        ptx::load_shared(second, odd + step * 8 * kRowBytes);
        to[step][0] = first.x, to[step][1] = first.y;
        to[step][2] = second.x, to[step][3] = second.y;
      }
    }
  }

  // The number of the weight that is number `i` of 16 bytes of a column; negative for none.
  __device__ static __forceinline__ int64_t weight_at(const PatchParams& p, int stage, int step,
                                                      int half, int column, int i) {
    const int row = stage % rows(p), first = stage / rows(p) * kChannels;
    const int channel =
        first + (kWide ? step / 2 * 8 + 2 * i + step % 2 : step * 8 + i / 2 * 2 + half);
    const int tap = kWide ? half : i % 2;
    if (channel >= p.out_channels || column >= p.in_channels) return -1;
    return (static_cast<int64_t>(column) * p.out_channels + channel) * taps_of(p) + row * kTaps +
           tap;
  }

  // --- Stores ---

  __device__ __forceinline__ void begin_group(uint32_t, int) const {}

  // Where a thread's pixels go, in its first channel; null for none.
  using Target = Element*;
  __device__ __forceinline__ Target target(const Block& block, int group, int warp,
                                           int lane) const {
    const int own = own_pixel(warp, lane);
    const Part at = part(block, own / kPart);
    const int x = at.x + own % kPart;
    if (x >= p.in_w || at.image >= p.batch) return nullptr;
    const int64_t channel =
        static_cast<int64_t>(at.image) * p.in_channels + first_channel(group, lane);
    return static_cast<Element*>(p.result) + channel * pixels_of(p) +
           (at.z * p.in_h + at.y) * p.in_w + x;
  }
  __device__ static __forceinline__ int first_channel(int group, int lane) {
    return group * N + lane % 4 * 2;
  }

  // The accumulators of a thread: two neighbouring pixels, in all columns. Scaled: as those of
  // split float32 are, by column.
  template <bool kScaled = false>
  __device__ __forceinline__ void store(const float (&d)[N / 2], Target to, int group, int lane,
                                        uint32_t table) const {
    if (!to) return;
    const int64_t area = pixels_of(p);
    const int first = first_channel(group, lane);
#pragma unroll
    for (int j = 0; j < N / 8; ++j) {
      float v[] = {d[4 * j], d[4 * j + 1], d[4 * j + 2], d[4 * j + 3]};
      if constexpr (kScaled) {
        uint2 factor;
        ptx::load_shared(factor, table + lane % 4 * 8 + kFactorsAt + j * 32);
#pragma unroll
        for (int i = 0; i < 4; ++i) v[i] *= __uint_as_float(i % 2 ? factor.y : factor.x);
      }
      if (first + 8 * j < p.in_channels) put(to, v[0], v[2]);
      if (first + 8 * j + 1 < p.in_channels) put(to + area, v[1], v[3]);
      to += 8 * area;
    }
  }

  __device__ static __forceinline__ void put(Element* to, float v0, float v1) {
    alignas(8) const Element two[] = {Operand::from_float(v0), Operand::from_float(v1)};
    using Vector = VectorOf<2 * sizeof(Element)>;
    __stcs(reinterpret_cast<Vector*>(to), *reinterpret_cast<const Vector*>(two));
  }
};

}  // namespace upconv::patch
