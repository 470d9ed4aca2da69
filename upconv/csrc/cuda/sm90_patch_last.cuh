// Hopper kernel for patches: what the forward pass on channels_last reads, multiplies and writes.
//
// The channels of a pixel lie side by side: operand A goes from the box to the product as it is,
// and pixels of all images are one row. Columns are (tap, channel), woven so that a thread has 16
// bytes of a pixel's channels.
#pragma once

#include "sm90_patch_layout.cuh"

namespace upconv::patch {

template <typename Type, int N>
struct ForwardLast {
  using Operand = Type;
  using Element = typename Operand::Element;
  static constexpr bool kFromMemory = true;
  static constexpr int kEach = 16 / static_cast<int>(sizeof(Element));  // numbers of 16 bytes
  static constexpr int kChannels = kSteps * 2 * kEach;                  // of a stage
  static constexpr int kParts = 1;
  static constexpr int kBytes = kBoxBytes;

  const PatchParams& p;

  // --- Boxes ---

  struct Block {
    int first;  // of the pixels of all images
  };
  __host__ __device__ static int depth(const PatchParams& p) {
    return (p.in_channels + kChannels - 1) / kChannels;
  }
  __host__ __device__ static int block_count(const PatchParams& p) {
    return (p.batch * pixels_of(p) + kBlock - 1) / kBlock;
  }
  __device__ __forceinline__ Block block(int number) const { return {number * kBlock}; }

  __device__ __forceinline__ void fetch(const Block& block, int stage, int, uint32_t to,
                                        const CUtensorMap& whole, const CUtensorMap&,
                                        uint32_t barrier) const {
    ptx::box_copy(to, whole, stage * kChannels, block.first, 0, 0, 0, barrier);
  }

  // --- Operands ---

  struct Places {};
  __device__ __forceinline__ Places places(const Block&, int, int) const { return {}; }

  // Of 4 x kEach columns, thread t has numbers t * kEach and following.
  __host__ __device__ static int unwoven(int column) {
    constexpr int kWoven = 4 * kEach;
    const int inside = column % kWoven;
    return column - inside + inside % 8 / 2 * kEach + inside / 8 * 2 + inside % 2;
  }

  // The number of the weight that is number `i` of 16 bytes of a column; negative for none.
  __device__ static __forceinline__ int64_t weight_at(const PatchParams& p, int stage, int step,
                                                      int half, int column, int i) {
    const int channel = stage * kChannels + (step * 2 + half) * kEach + i;
    const int from = unwoven(column), tap = from / p.out_channels;
    if (channel >= p.in_channels || from >= columns_of(p)) return -1;
    const int out = from - tap * p.out_channels;
    return (static_cast<int64_t>(channel) * p.out_channels + out) * taps_of(p) + tap;
  }

  // --- Stores ---

  // The bias of each column of a group, in order.
  __device__ __forceinline__ void begin_group(uint32_t table, int group) const {
    for (int i = threadIdx.x % 128; i < N; i += 128) {
      const int column = group * N + i;
      const int channel = column - p.shape.by_out_channels(column) * p.out_channels;
      const float bias =
          p.bias ? Operand::to_float(static_cast<const Element*>(p.bias)[channel]) : 0.f;
      ptx::store_shared(table + i * 4, __float_as_uint(bias));
    }
  }

  // The first output of a pixel of all images; null for none.
  __device__ __forceinline__ Element* output(int number) const {
    const int image = p.shape.by_pixels(number), pixel = number - image * pixels_of(p);
    if (image >= p.batch) return nullptr;
    const uint32_t place = first_output(p, pixel);
    return static_cast<Element*>(p.result) + (image * p.shape.area + place) * p.out_channels;
  }

  // Where the outputs of a thread's pixels go: r and r + 8.
  struct Target {
    Element *first, *second;
  };
  __device__ __forceinline__ Target target(const Block& block, int, int warp, int lane) const {
    const int own = block.first + 16 * warp + lane / 4;
    return {output(own), output(own + 8)};
  }

  // The accumulators of a thread: two pixels, in all columns.
  __device__ __forceinline__ void store(const float (&d)[N / 2], const Target& to, int group,
                                        int lane, uint32_t table) const {
    constexpr int kSums = 2 * kEach;  // of two pixels
    const int t = lane % 4;
    const int64_t out_w = static_cast<int64_t>(p.in_w) * p.step_x, out_h = p.in_h * p.step_y;
#pragma unroll
    for (int run = 0; run < N / (4 * kEach); ++run) {
      const int inside = (run * 4 + t) * kEach, column = group * N + inside;
      const int tap = p.shape.by_out_channels(column), row = p.shape.by_step_x(tap);
      const int z = p.shape.by_step_y(row);
      const int64_t place = (z * out_h + (row - z * p.step_y)) * out_w + (tap - row * p.step_x);
      const int64_t at = place * p.out_channels + (column - tap * p.out_channels);
      uint4 bias[kEach / 4];
#pragma unroll
      for (int k = 0; k < kEach / 4; ++k) ptx::load_shared(bias[k], table + (inside + 4 * k) * 4);
      if (column >= columns_of(p)) continue;
      const float* sums = d + run * kSums;
      if (to.first) put(to.first + at, sums, bias);
      if (to.second) put(to.second + at, sums + 2, bias);
    }
  }

  __device__ static __forceinline__ void put(Element* to, const float* sums,
                                             const uint4 (&bias)[kEach / 4]) {
    alignas(16) Element piece[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const uint4& four = bias[i / 4];
      const uint32_t bits = i % 4 == 0   ? four.x
                            : i % 4 == 1 ? four.y
                            : i % 4 == 2 ? four.z
                                         : four.w;
      piece[i] = Operand::from_float(sums[i / 2 * 4 + i % 2] + __uint_as_float(bits));
    }
    __stcs(reinterpret_cast<uint4*>(to), *reinterpret_cast<const uint4*>(piece));
  }
};

}  // namespace upconv::patch
