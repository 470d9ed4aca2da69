// Hopper kernel for patches: what the forward pass reads, multiplies and writes.
//
// K is the input's channels. Columns are (channel, taps) as they lie in the weight, so that the
// packed weight differs from it by the order of 16-byte pieces alone; where a thread has 4 outputs
// of a pixel, every two times 8 columns are woven.
#pragma once

#include "sm90_patch_layout.cuh"

namespace upconv::patch {

template <typename Type, int N>
struct Forward {
  using Operand = Type;
  using Element = typename Operand::Element;
  static constexpr bool kFromMemory = false, kWide = sizeof(Element) == 4;
  static constexpr int kChannels = kSteps * 32 / static_cast<int>(sizeof(Element));  // of a stage
  static constexpr int kPart = kRowBytes / static_cast<int>(sizeof(Element));  // pixels of a box
  static constexpr int kParts = kBlock / kPart;
  static constexpr int kBytes = kBoxBytes;

  const PatchParams& p;

  // --- Boxes ---

  // A block of pixels: of one image, or what is left over of several.
  struct Block {
    int image, pixel;
    bool whole;
  };
  __host__ __device__ static int whole_blocks(const PatchParams& p) {
    return p.batch * (pixels_of(p) / kBlock);
  }
  __host__ __device__ static int block_count(const PatchParams& p) {
    const int together = kBlock / p.rest_pixels;  // images
    const int rest = pixels_of(p) % kBlock ? (p.batch + together - 1) / together : 0;
    return whole_blocks(p) + rest;
  }
  __device__ __forceinline__ Block block(int number) const {
    const int each = p.shape.each, rest = number - p.batch * each;
    const int image = p.shape.by_each(number);
    if (rest < 0) return {image, (number - image * each) * kBlock, true};
    return {rest * (kBlock >> p.shape.rest_shift), each * kBlock, false};
  }

  __host__ __device__ static int depth(const PatchParams& p) {
    return (p.in_channels + kChannels - 1) / kChannels;
  }

  __device__ __forceinline__ void fetch(const Block& block, int stage, int part, uint32_t to,
                                        const CUtensorMap& whole, const CUtensorMap& rest,
                                        uint32_t barrier) const {
    const int first = part * kPart, channel = stage * kChannels;
    if (block.whole) {
      ptx::box_copy(to, whole, block.pixel + first, block.image, channel, 0, 0, barrier);
    } else {
      const int image = block.image + (first >> p.shape.rest_shift);
      const int pixel = block.pixel + (first & (p.rest_pixels - 1));
      ptx::box_copy(to, rest, pixel, image, channel, 0, 0, barrier);
    }
  }

  // --- Operands ---

  // Rows r and r + 8 of a product are neighbouring pixels: one load brings both, and a thread has
  // two times two outputs side by side. Where it has 4 of each pixel and these are 16 bytes, they
  // are pixels r and r + 8, so that 8 lanes write 128 bytes in a row.
  __device__ __forceinline__ bool side_by_side() const { return !kWide || p.span == 2; }
  // Of a thread, which of the block's pixels; the other one is so many further on.
  __device__ __forceinline__ int own_pixel(int warp, int lane) const {
    return 16 * warp + (lane / 4 << (side_by_side() ? 1 : 0));
  }
  __device__ __forceinline__ int other_pixel() const { return side_by_side() ? 1 : 8; }

  // The places in a box of a thread's pixel: channel 2 t of every 8, and 2 t + 1. Lanes of four
  // channels then read from different banks.
  struct Places {
    uint32_t even, odd, far_even, far_odd;  // far: of the other pixel, if that is not beside it
  };
  __device__ __forceinline__ uint32_t place(int pixel, int channel, bool swizzled) const {
    const int along = pixel % kPart * static_cast<int>(sizeof(Element)), piece = along / 16;
    return pixel / kPart * (kBoxBytes / kParts) + channel * kRowBytes + along % 16 +
           ((piece ^ (swizzled ? channel : 0)) << 4);
  }
  __device__ __forceinline__ Places places(const Block& block, int warp, int lane) const {
    // What is left over of several images TMA does not swizzle.
    const bool swizzled = block.whole || p.rest_pixels >= kPart;
    const int own = own_pixel(warp, lane), far = own + 8, channel = 2 * (lane % 4);
    return {place(own, channel, swizzled), place(own, channel + 1, swizzled),
            place(far, channel, swizzled), place(far, channel + 1, swizzled)};
  }

  // Channels 2 t and 2 t + 1 are numbers t and t + 4 of K in TF32, 2 t and 2 t + 1 in 16 bits.
  __device__ __forceinline__ void load(uint32_t (&to)[kSteps][4], uint32_t box,
                                       const Places& at) const {
    const uint32_t even = box + at.even, odd = box + at.odd;
    if (kWide && !side_by_side()) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const uint32_t from = box + step * 8 * kRowBytes;
        ptx::load_shared(to[step][0], from + at.even);
        ptx::load_shared(to[step][1], from + at.far_even);
        ptx::load_shared(to[step][2], from + at.odd);
        ptx::load_shared(to[step][3], from + at.far_odd);
      }
      return;
    }
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      if constexpr (kWide) {
        const int at = step * 8 * kRowBytes;
        uint2 first, second;
        ptx::load_shared(first, even + at);
        ptx::load_shared(second, odd + at);
        to[step][0] = first.x, to[step][1] = first.y;
        to[step][2] = second.x, to[step][3] = second.y;
      } else {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int at = (step * 16 + half * 8) * kRowBytes;
          uint32_t first, second;
          ptx::load_shared(first, even + at);
          ptx::load_shared(second, odd + at);
          to[step][2 * half] = __byte_perm(first, second, 0x5410);
          to[step][2 * half + 1] = __byte_perm(first, second, 0x7632);
        }
      }
    }
  }

  // The number of the weight that is number `i` of 16 bytes of a column; negative for none.
  __device__ static __forceinline__ int64_t weight_at(const PatchParams& p, int stage, int step,
                                                      int half, int column, int i) {
    constexpr int kEach = 16 / static_cast<int>(sizeof(Element));
    return weight_of(
        p, stage * kChannels + step * 2 * kEach + (kWide ? 2 * i + half : half * kEach + i),
        column);
  }
  __device__ static __forceinline__ int64_t weight_of(const PatchParams& p, int channel,
                                                      int column) {
    const int inside = column % 16;
    const int woven = column - inside + inside % 8 / 2 * 4 + inside / 8 * 2 + inside % 2;
    const int from = p.span == 2 ? column : woven, columns = columns_of(p);
    if (channel >= p.in_channels || from >= columns) return -1;
    return static_cast<int64_t>(channel) * columns + from;
  }

  // --- Stores ---

  // Outputs of a pixel in one channel come `span` at a time: so many runs in all columns.
  __device__ __forceinline__ int span_shift() const { return p.span == 2 ? 1 : 2; }
  __device__ __forceinline__ int group_runs() const { return N >> span_shift(); }
  // The channel of a group's first column.
  __device__ __forceinline__ int first_channel(int group) const {
    return p.shape.by_runs(group * group_runs());
  }

  // Tells all threads of a warpgroup where the columns of a group go.
  __device__ __forceinline__ void begin_group(uint32_t table, int group) const {
    const int i = threadIdx.x % 128;
    if (i >= group_runs()) return;
    ptx::store_shared(table + i * 8, run_at(group, i));
  }
  // Of a group's runs: how far the outputs of one are from a pixel's first, and their bias.
  __device__ __forceinline__ uint2 run_at(int group, int i) const {
    const int number = group * group_runs() + i, channel = p.shape.by_runs(number);
    const int run = number - channel * p.shape.runs, in_row = p.step_x >> span_shift();
    const int row = p.shape.by_row_runs(run), z = p.shape.by_step_y(row), y = row - z * p.step_y;
    const int64_t out_w = static_cast<int64_t>(p.in_w) * p.step_x;
    const int64_t place = (channel - first_channel(group)) * out_area(p) +
                          (static_cast<int64_t>(z) * p.in_h * p.step_y + y) * out_w +
                          (run - row * in_row) * p.span;
    const bool there = channel < p.out_channels, biased = there && p.bias;
    const float bias =
        biased ? Operand::to_float(static_cast<const Element*>(p.bias)[channel]) : 0.f;
    return {there ? static_cast<uint32_t>(place >> span_shift()) : kNone, __float_as_uint(bias)};
  }

  // The first output of one of the block's pixels, in the first channel of a group; null for none.
  __device__ __forceinline__ Element* output(const Block& block, int group, int number) const {
    const int image = block.whole ? block.image : block.image + (number >> p.shape.rest_shift);
    const int pixel = block.pixel + (block.whole ? number : number & (p.rest_pixels - 1));
    if (image >= p.batch || pixel >= pixels_of(p)) return nullptr;
    const uint32_t place = first_output(p, pixel);
    const int64_t channel = static_cast<int64_t>(image) * p.out_channels + first_channel(group);
    return static_cast<Element*>(p.result) + channel * p.shape.area + place;
  }

  // Where the outputs of a thread's pixels go.
  struct Target {
    Element *first, *second;  // the second: where a thread has 4 outputs of each
  };
  __device__ __forceinline__ Target target(const Block& block, int group, int warp,
                                           int lane) const {
    const int own = own_pixel(warp, lane);
    return {output(block, group, own),
            p.span == 2 ? nullptr : output(block, group, own + other_pixel())};
  }

  // The accumulators of a thread: two pixels, in all columns. Scaled: as those of split float32
  // are, by column.
  template <bool kScaled = false>
  __device__ __forceinline__ void store(const float (&d)[N / 2], const Target& to, int group,
                                        int lane, uint32_t table) const {
    if (p.span == 2) {
      store_runs<2, kScaled>(d, to.first, nullptr, table + lane % 4 * 8);
    } else {
      store_runs<4, kScaled>(d, to.first, to.second, table + lane % 4 * 8);
    }
  }

  // Where some runs go is read before any is written, lest each read wait for the write before it.
  template <int kSpan, bool kScaled>
  __device__ __forceinline__ void store_runs(const float (&d)[N / 2], Element* first,
                                             Element* second, uint32_t table) const {
    constexpr int kSums = 2 * kSpan;  // of two pixels
    const bool has_first = first, has_second = second;
    if (!has_first && !has_second) return;
    constexpr int kRuns = N / 2 / kSums, kBatch = kRuns < 8 ? kRuns : 8;
#pragma unroll
    for (int batch = 0; batch < kRuns; batch += kBatch) {
      uint2 run[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) ptx::load_shared(run[i], table + (batch + i) * 32);
      float factor[kBatch][kSpan / 2][2];  // of columns that are multiplied side by side
      if constexpr (kScaled) load_factors(factor, table, batch);
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const float bias = __uint_as_float(run[i].y);
        const int64_t at = static_cast<int64_t>(run[i].x) * kSpan;
        const bool there = run[i].x != kNone;
        float v[kSums];
#pragma unroll
        for (int k = 0; k < kSums; ++k) {
          const float sum = d[(batch + i) * kSums + k];
          v[k] = kScaled ? fmaf(sum, factor[i][k / 4][k % 2], bias) : sum + bias;
        }
        if constexpr (kSpan == 2) {
          put(first + at, v[0], v[1], v[2], v[3], there);
        } else {
          put(first + at, v[0], v[1], v[4], v[5], there && has_first);
          put(second + at, v[2], v[3], v[6], v[7], there && has_second);
        }
      }
    }
  }

  template <int kBatch, int kHalves>
  __device__ static __forceinline__ void load_factors(float (&to)[kBatch][kHalves][2],
                                                      uint32_t table, int first) {
#pragma unroll
    for (int i = 0; i < kBatch * kHalves; ++i) {
      uint2 two;
      ptx::load_shared(two, table + kFactorsAt + (first * kHalves + i) * 32);
      to[i / kHalves][i % kHalves][0] = __uint_as_float(two.x);
      to[i / kHalves][i % kHalves][1] = __uint_as_float(two.y);
    }
  }

  // Only the store depends on whether there is such an output: branches round everything took
  // nearly as many instructions again.
  __device__ static __forceinline__ void put(Element* to, float v0, float v1, float v2, float v3,
                                             bool there) {
    alignas(16) const Element four[] = {Operand::from_float(v0), Operand::from_float(v1),
                                        Operand::from_float(v2), Operand::from_float(v3)};
    using Vector = VectorOf<4 * sizeof(Element)>;
    if (there) __stcs(reinterpret_cast<Vector*>(to), *reinterpret_cast<const Vector*>(four));
  }
};

}  // namespace upconv::patch
