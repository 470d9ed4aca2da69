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
  static constexpr bool kWide = sizeof(Element) == 4;
  static constexpr int kChannels = kSteps * 32 / static_cast<int>(sizeof(Element));  // of a stage
  static constexpr int kPart = kRowBytes / static_cast<int>(sizeof(Element));  // pixels of a box
  static constexpr int kParts = kBlock / kPart;

  const PatchParams& p;

  // --- Boxes ---

  __host__ __device__ static int depth(const PatchParams& p) {
    return (p.in_channels + kChannels - 1) / kChannels;
  }

  // Are 16 bytes of a box where TMA's swizzle has put them?
  __device__ __forceinline__ bool swizzled(const Block& block) const {
    return block.whole || p.rest_pixels >= kPart;
  }

  __device__ __forceinline__ void fetch(const Block& block, int stage, int part, uint32_t to,
                                        const CUtensorMap& whole, const CUtensorMap& rest,
                                        uint32_t barrier) const {
    const int first = part * kPart, channel = stage * kChannels;
    if (block.whole) {
      ptx::box_copy(to, whole, block.pixel + first, block.image, channel, 0, 0, barrier);
    } else {
      const int image = block.image + first / p.rest_pixels;
      const int pixel = block.pixel + first % p.rest_pixels;
      ptx::box_copy(to, rest, pixel, image, channel, 0, 0, barrier);
    }
  }

  // --- Operands ---

  // The places in a box of a thread's two pixels: channel 2 t of every 8, and 2 t + 1. Lanes of
  // four channels then read from different banks.
  __device__ __forceinline__ void find_places(int warp, int lane, bool swizzled, uint32_t* even,
                                              uint32_t* odd) const {
    const int pixel = 16 * warp + 2 * (lane / 4), channel = 2 * (lane % 4);
    const int along = pixel % kPart * static_cast<int>(sizeof(Element)), piece = along / 16;
    const int at = pixel / kPart * (kBoxBytes / kParts) + channel * kRowBytes + along % 16;
    *even = at + ((piece ^ (swizzled ? channel : 0)) << 4);
    *odd = at + kRowBytes + ((piece ^ (swizzled ? channel + 1 : 0)) << 4);
  }

  // Channels 2 t and 2 t + 1 are numbers t and t + 4 of K in TF32, 2 t and 2 t + 1 in 16 bits.
  __device__ static __forceinline__ void load(uint32_t (&to)[kSteps][4], uint32_t even,
                                              uint32_t odd) {
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
    const int inside = column % 16;
    const int woven = column - inside + inside % 8 / 2 * 4 + inside / 8 * 2 + inside % 2;
    const int from = p.span == 2 ? column : woven, columns = columns_of(p);
    const int channel =
        stage * kChannels + step * 2 * kEach + (kWide ? 2 * i + half : half * kEach + i);
    if (channel >= p.in_channels || from >= columns) return -1;
    return static_cast<int64_t>(channel) * columns + from;
  }

  // --- Stores ---

  // Outputs of a pixel in one channel, `span` at a time.
  __device__ __forceinline__ int runs() const { return taps_of(p) / p.span; }
  // The channel of a group's first column.
  __device__ __forceinline__ int first_channel(int group) const {
    return group * (N / p.span) / runs();
  }

  // Tells all threads of a warpgroup where the columns of a group go.
  __device__ __forceinline__ void begin_group(uint32_t table, int group) const {
    const int i = threadIdx.x % 128;
    if (i >= N / p.span) return;
    const int number = group * (N / p.span) + i, channel = number / runs();
    const int run = number - channel * runs(), in_row = p.step_x / p.span;
    const int row = run / in_row, z = row / p.step_y, y = row - z * p.step_y;
    const int64_t out_w = static_cast<int64_t>(p.in_w) * p.step_x;
    const int64_t place = (channel - first_channel(group)) * out_area(p) +
                          (static_cast<int64_t>(z) * p.in_h * p.step_y + y) * out_w +
                          (run - row * in_row) * p.span;
    const bool there = channel < p.out_channels, biased = there && p.bias;
    const float bias =
        biased ? Operand::to_float(static_cast<const Element*>(p.bias)[channel]) : 0.f;
    ptx::store_shared(
        table + i * 8,
        uint2{there ? static_cast<uint32_t>(place / p.span) : kNone, __float_as_uint(bias)});
  }

  // The accumulators of a thread: two neighbouring pixels, in all columns.
  __device__ __forceinline__ void store(const float (&d)[N / 2], const Block& block, int group,
                                        int warp, int lane, uint32_t table) const {
    const int row = 16 * warp + 2 * (lane / 4);
    const int image = block.whole ? block.image : block.image + row / p.rest_pixels;
    const int pixel = block.pixel + (block.whole ? row : row % p.rest_pixels);
    const bool there = image < p.batch && pixel < pixels_of(p);
    const Place place(p, pixel);
    const int64_t out_w = static_cast<int64_t>(p.in_w) * p.step_x, out_h = p.in_h * p.step_y;
    const int64_t channel = static_cast<int64_t>(image) * p.out_channels + first_channel(group);
    const int64_t at = channel * out_area(p) +
                       (place.z * p.step_z * out_h + place.y * p.step_y) * out_w +
                       place.x * p.step_x;
    if (p.span == 2) {
      store_runs<2>(d, at, there, lane, table + lane % 4 * 8);
    } else {
      store_runs<4>(d, at, there, lane, table + lane % 4 * 8);
    }
  }

  // Where some runs go is read before any is written, lest each read wait for the write before it.
  template <int kSpan>
  __device__ __forceinline__ void store_runs(const float (&d)[N / 2], int64_t first, bool there,
                                             int lane, uint32_t table) const {
    constexpr int kSums = 2 * kSpan;  // of two pixels
    constexpr int kRuns = N / 2 / kSums, kBatch = kRuns < 8 ? kRuns : 8;
    Element* const y = static_cast<Element*>(p.result);
    Element *const own = y + first, *const other = y + ptx::traded(first);
#pragma unroll
    for (int batch = 0; batch < kRuns; batch += kBatch) {
      uint2 run[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) ptx::load_shared(run[i], table + (batch + i) * 32);
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const bool on = there && run[i].x != kNone;
        const float bias = __uint_as_float(run[i].y);
        const int64_t at = static_cast<int64_t>(run[i].x) * kSpan;
        float v[kSums];
#pragma unroll
        for (int k = 0; k < kSums; ++k) v[k] = d[(batch + i) * kSums + k] + bias;
        if constexpr (kSpan == 2) {
          if (on) put(own + at, v[0], v[1], v[2], v[3]);
        } else if (kWide && p.step_x == kSpan) {
          store_traded(own + at, other + at, v, lane & 4, on);
        } else if (on) {
          put(own + at, v[0], v[1], v[4], v[5]);
          put(own + at + p.step_x, v[2], v[3], v[6], v[7]);
        }
      }
    }
  }

  // Two pixels of 16 bytes each are a sector of memory. The lanes of four neighbouring pixels trade
  // one each, so that they write one sector and then the other, and not half of both, twice.
  __device__ static __forceinline__ void store_traded(Element* own, Element* other,
                                                      const float (&v)[8], bool second, bool on) {
    float got[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const int from = k / 2 * 4 + k % 2;
      got[k] = ptx::traded(second ? v[from] : v[from + 2]);
    }
    if (!on) return;
    if (second) {
      put(other + 4, got[0], got[1], got[2], got[3]);
      put(own + 4, v[2], v[3], v[6], v[7]);
    } else {
      put(own, v[0], v[1], v[4], v[5]);
      put(other, got[0], got[1], got[2], got[3]);
    }
  }

  __device__ static __forceinline__ void put(Element* to, float v0, float v1, float v2, float v3) {
    alignas(16) const Element four[] = {Operand::from_float(v0), Operand::from_float(v1),
                                        Operand::from_float(v2), Operand::from_float(v3)};
    using Vector = VectorOf<4 * sizeof(Element)>;
    __stcs(reinterpret_cast<Vector*>(to), *reinterpret_cast<const Vector*>(four));
  }
};

}  // namespace upconv::patch
