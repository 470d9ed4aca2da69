// Hopper kernel for patches: what the input's gradient reads in 16 bits where rows are short, and
// where it goes. The rest is as in sm90_patch_backward.cuh.
//
// Of 32 pixels of a row, a part there, rows of 14 fill less than half, and their 56 bytes of
// grad_output are no stride of TMA's. But all outputs below whole rows of x follow each other: 4 w
// numbers for each row of w pixels, with patches of 2 x 2. So a slice of grad_output is one row of
// the tensor map, and a part is as many rows of x as fit into 16 pixels, 128 bytes of a channel. K
// is (channels, all taps of a slice of the patch).
#pragma once

#include "sm90_patch_backward.cuh"

namespace upconv::patch {

template <typename Type, int N>
struct BackwardShort : Backward<Type, N> {
  using Base = Backward<Type, N>;
  using Base::p;
  using typename Base::Block, typename Base::Element;
  static_assert(sizeof(Element) == 2, "pixels of 16 bits");
  static constexpr int kTaps = 4;  // of a slice
  static constexpr int kChannels = kSteps * 32 / 2 / kTaps;
  static constexpr int kPart = kRowBytes / 2 / kTaps;  // pixels
  static constexpr int kParts = kBlock / kPart;

  // --- Boxes ---

  __host__ __device__ static int depth(const PatchParams& p) {
    return (p.out_channels + kChannels - 1) / kChannels * p.step_z;
  }

  // A part of a block is some rows of any image. What is beyond a slice, or the last image, TMA
  // makes zero. What a box has of further rows no pixel reads.
  struct Part {
    int image, z, y;
  };
  __host__ __device__ static int block_count(const PatchParams& p) {
    return (p.batch * p.in_d * p.shape.row_parts + kParts - 1) / kParts;
  }
  __device__ __forceinline__ Block block(int number) const { return {number * kParts}; }
  __device__ __forceinline__ Part part(const Block& block, int number) const {
    const int at = block.first + number, slice = p.shape.by_row_parts(at);
    const int image = p.shape.by_in_d(slice);
    return {image, slice - image * p.in_d, (at - slice * p.shape.row_parts) * p.short_rows};
  }

  __device__ __forceinline__ void fetch(const Block& block, int stage, int number, uint32_t to,
                                        const CUtensorMap& whole, const CUtensorMap&,
                                        uint32_t barrier) const {
    const Part from = part(block, number);
    const int channels = p.shape.by_rows(stage), z = stage - channels * p.step_z;
    ptx::box_copy(to, whole, from.y * p.in_w * kTaps, from.z * p.step_z + z, channels * kChannels,
                  from.image, 0, barrier);
  }

  // --- Operands ---

  // The places in a box of two pixels' taps, of both rows of the patch: channel 2 t of every 8, and
  // 2 t + 1.
  struct Places {
    uint32_t upper_even, upper_odd, lower_even, lower_odd;
  };
  __device__ __forceinline__ Places places(const Block&, int warp, int lane) const {
    // What is not a part's pixel reads the first one, whose taps are in the box.
    const int own = 2 * (lane / 4), pixel = own < p.short_rows * p.in_w ? own : 0;
    const int row = p.shape.by_in_w(pixel), x = pixel - row * p.in_w, channel = 2 * (lane % 4);
    const int upper = (row * 2 * p.in_w + x) * 4, lower = upper + p.in_w * 4;  // bytes
    const uint32_t box = warp * (kBoxBytes / kParts);
    return {box + place(upper, channel), box + place(upper, channel + 1),
            box + place(lower, channel), box + place(lower, channel + 1)};
  }
  __device__ static __forceinline__ uint32_t place(int along, int channel) {
    return channel * kRowBytes + along % 16 + ((along / 16 ^ channel) << 4);
  }

  // A step has four channels, every second one of 8. The upper taps are numbers 2 t and 2 t + 1 of
  // K, the lower ones 2 t + 8 and 2 t + 9.
  __device__ __forceinline__ void load(uint32_t (&to)[kSteps][4], uint32_t box,
                                       const Places& at) const {
    const uint32_t upper_even = box + at.upper_even, upper_odd = box + at.upper_odd;
    const uint32_t lower_even = box + at.lower_even, lower_odd = box + at.lower_odd;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const int rows = step / 2 * 8 * kRowBytes;
      uint2 upper, lower;
      ptx::load_shared(upper, (step % 2 ? upper_odd : upper_even) + rows);
      ptx::load_shared(lower, (step % 2 ? lower_odd : lower_even) + rows);
      to[step][0] = upper.x, to[step][1] = upper.y;
      to[step][2] = lower.x, to[step][3] = lower.y;
    }
  }

  // The number of the weight that is number `i` of 16 bytes of a column; negative for none.
  __device__ static __forceinline__ int64_t weight_at(const PatchParams& p, int stage, int step,
                                                      int half, int column, int i) {
    const int z = stage % p.step_z, first = stage / p.step_z * kChannels;
    const int channel = first + step / 2 * 8 + i / 2 * 2 + step % 2;
    if (channel >= p.out_channels || column >= p.in_channels) return -1;
    return (static_cast<int64_t>(column) * p.out_channels + channel) * taps_of(p) + z * kTaps +
           half * 2 + i % 2;
  }

  // --- Stores ---

  // Where a thread's pixels go, in its first channel; null for none.
  using Target = Element*;
  __device__ __forceinline__ Target target(const Block& block, int group, int warp,
                                           int lane) const {
    const Part at = part(block, warp);
    const int own = 2 * (lane / 4), rows = min(p.short_rows, p.in_h - at.y);
    if (own >= rows * p.in_w || at.image >= p.batch) return nullptr;
    const int64_t channel =
        static_cast<int64_t>(at.image) * p.in_channels + this->first_channel(group, lane);
    return static_cast<Element*>(p.result) + channel * pixels_of(p) +
           (at.z * p.in_h + at.y) * p.in_w + own;
  }
};

}  // namespace upconv::patch
