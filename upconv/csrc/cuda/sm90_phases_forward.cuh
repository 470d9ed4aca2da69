// Hopper kernel for both phases of a row: what the forward pass reads, multiplies and writes.
//
// Outputs 2 m and 2 m + 1 of a row come from inputs m - 1, m and m + 1 (4 taps, padding 1): the
// even one from m - 1 and m, the odd one from m and m + 1. Three operands serve four products.
#pragma once

#include "sm90_phases_layout.cuh"

namespace upconv::phases {

template <typename Type, int N, int kMany, int kWidth>
struct Forward {
  using Operand = Type;
  using Element = typename Operand::Element;
  static constexpr int kColumns = N, kBlocks = kMany, kTaps = kWidth;
  static constexpr bool kWide = sizeof(Element) == 4;
  static constexpr int kSteps = kForwardSteps;
  static constexpr int kStepChannels = kStepBytes / static_cast<int>(sizeof(Element));
  static constexpr int kChannels = kSteps * kStepChannels;  // of a box

  const PhasesParams& p;

  // --- The taps of a row ---

  // Accumulators: even and odd outputs.
  static constexpr int kSums = 2;
  // By products: which of the outputs, and from which input after its own.
  __host__ __device__ static constexpr int sum_of(int product) { return (product + 4 - kTaps) / 2; }
  __host__ __device__ static constexpr int shift_of(int product) {
    return (product + 5 - kTaps) / 2 - 1;
  }
  __host__ __device__ static constexpr int tap_of(int product) {
    return sum_of(product) + 1 - 2 * shift_of(product);
  }
  // Operands: one for each shift.
  static constexpr int kOperands = kTaps - 1, kFirstShift = 3 - kTaps;
  __host__ __device__ static constexpr int operand_of(int product) {
    return shift_of(product) - kFirstShift;
  }

  // --- Boxes ---

  // The box begins with the first row that a tap wants, and 16 bytes before the block's first
  // pixel. Where the rows of an image follow each other, one row of the box has them all: TMA takes
  // some 4 cycles for a row, however short.
  __device__ __forceinline__ void fetch(const Block& block, int phase, int stage, uint32_t to,
                                        const CUtensorMap& map, uint32_t barrier) const {
    const Rows shift = row_shift(p, phase);
    const int y = shift.y - (p.shape.most_y - 1);
    const int z = block.z + shift.z - (p.shape.most_z - 1);
    const int x = block.x - kPieceBytes / static_cast<int>(sizeof(Element));
    ptx::box_copy(to, map, p.flat ? x + y * p.in_w : x, p.flat ? 0 : block.y + y, z,
                  stage * kChannels, block.image, barrier);
  }

  // --- Operands ---

  // Of what a thread reads in a channel, for the tap with the first row and slice of the box.
  __device__ __forceinline__ uint32_t place(int b, int warp, int lane) const {
    const Own own = own_pixel(p, b, warp, lane);
    return kPieceBytes + own.y * row_bytes(p) + (own.x - 2) * static_cast<int>(sizeof(Element));
  }
  // Taps of the rows go backwards in the box.
  static constexpr int kRowStep = -1;
  __device__ __forceinline__ int first_tap() const {
    return (p.shape.most_z - 1) * slice_bytes(p) + (p.shape.most_y - 1) * row_bytes(p);
  }
  // What lies beside a row among others is another one.
  struct Edges {
    uint32_t left[kBlocks], right[kBlocks];  // masks
  };
  __device__ __forceinline__ Edges edges(const Block& block, int warp, int lane) const {
    Edges all;
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      const int x = pixel_at(p, block, own_pixel(p, b, warp, lane)).x;
      all.left[b] = p.flat && x == 0 ? 0u : ~0u;
      all.right[b] = p.flat && x + 2 == p.in_w ? 0u : ~0u;
    }
    return all;
  }

  // Loads pixels two before a thread's own to three after it, of each of its channels. Rows r and
  // r + 8 of an operand are neighbouring pixels.
  __device__ __forceinline__ void load(uint32_t (&to)[kOperands][4], uint32_t from,
                                       const Channels& channels, const Edges& edges, int b) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t pixels[4];  // from the one before a thread's own
      if constexpr (kWide) {
        // Of words that are two apart, lanes of neighbouring channels read the one before and the
        // one after: 32 banks instead of 16.
        const uint32_t at = from + half * channels.other;
        const bool odd = threadIdx.x % 2;
        uint2 two;
        uint32_t first, second;
        ptx::load_shared(two, at + 8);
        ptx::load_shared(first, at + (odd ? 16 : 4));
        ptx::load_shared(second, at + (odd ? 4 : 16));
        pixels[0] = odd ? second : first, pixels[3] = odd ? first : second;
        pixels[1] = two.x, pixels[2] = two.y;
      } else {
        const uint32_t at = from + half * channels.eight;
        uint32_t first[3], other[3];
#pragma unroll
        for (int i = 0; i < 3; ++i) {
          ptx::load_shared(first[i], at + 4 * i);
          ptx::load_shared(other[i], at + channels.other + 4 * i);
        }
        pixels[0] = high_halves(first[0], other[0]), pixels[1] = low_halves(first[1], other[1]);
        pixels[2] = high_halves(first[1], other[1]), pixels[3] = low_halves(first[2], other[2]);
      }
      pixels[0] &= edges.left[b], pixels[3] &= edges.right[b];
#pragma unroll
      for (int i = 0; i < kOperands; ++i) {
        to[i][2 * half] = pixels[1 + kFirstShift + i];
        to[i][2 * half + 1] = pixels[2 + kFirstShift + i];
      }
    }
  }

  // --- Packing ---

  static constexpr bool kInColumns = false;  // columns are channels of the layer's output
  __device__ static __forceinline__ PackedRow packed_row(const PhasesParams& p, int row) {
    const PhasesShape& s = p.shape;
    const int z = s.by_kernel_y(row), y = row - z * p.kernel_y;
    const int phase = phase_of(z, p.pad_z, p.stride_z, s.by_stride_z) * p.stride_y +
                      phase_of(y, p.pad_y, p.stride_y, s.by_stride_y);
    return {phase, s.by_stride_z(z) * taps_of(p, phase).y + s.by_stride_y(y)};
  }

  // --- Stores ---

  // Tells all threads of a warpgroup the bias of a group's channels.
  __device__ __forceinline__ void begin_group(uint32_t table, int group) const {
    const int i = threadIdx.x % 128, channel = group * N + i;
    if (i >= N) return;
    const bool biased = p.bias && channel < p.out_channels;
    const float bias =
        biased ? Operand::to_float(static_cast<const Element*>(p.bias)[channel]) : 0.f;
    ptx::store_shared(table + i * 4, __float_as_uint(bias));
  }

  // The accumulators of a thread: four outputs side by side, in two of every 8 channels.
  __device__ __forceinline__ void store(const float (&d)[kSums * kBlocks][N / 2],
                                        const Block& block, const Unit& unit, int warp, int lane,
                                        uint32_t table) const {
    const int channel = unit.group * N + lane % 4 * 2;
    const Rows phase = phase_at(p, unit.phase);
    const int z = block.z * p.stride_z + phase.z;
    const int64_t area = static_cast<int64_t>(p.out_d) * p.out_h * p.out_w;
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      const Own at = pixel_at(p, block, own_pixel(p, b, warp, lane));
      const int y = at.y * p.stride_y + phase.y, x = at.x * 2;
      if (z >= p.out_d || y >= p.out_h || x >= p.out_w) continue;
      Element* const to = static_cast<Element*>(p.result) +
                          (static_cast<int64_t>(block.image) * p.out_channels + channel) * area +
                          (static_cast<int64_t>(z) * p.out_h + y) * p.out_w + x;
      const Outputs outputs{to, area, p.out_channels - channel, table + lane % 4 * 8};
      // Apart, lest instructions that few layers need lie between the others.
      if (p.out_w % 4 == 0) {
        store_vectors(d[b], d[kBlocks + b], outputs);
      } else {
        store_single(d[b], d[kBlocks + b], outputs, p.out_w - x);
      }
    }
  }

  struct Outputs {
    Element* to;
    int64_t area;    // from one channel to the next
    int channels;    // that there are
    uint32_t table;  // of the biases
  };

  // The biases of some channels are read before any output is written, lest each wait for the write
  // before it.
  __device__ __forceinline__ void store_vectors(const float (&even)[N / 2],
                                                const float (&odd)[N / 2],
                                                const Outputs& outputs) const {
    constexpr int kBatch = 4;
    Element* to = outputs.to;
#pragma unroll
    for (int batch = 0; batch < N / 8; batch += kBatch) {
      uint2 bias[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        ptx::load_shared(bias[i], outputs.table + (batch + i) * 32);
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int at = 4 * (batch + i), left = outputs.channels - 8 * (batch + i);
        if (left > 0) put(to, bias[i].x, even[at], odd[at], even[at + 2], odd[at + 2]);
        if (left > 1) {
          put(to + outputs.area, bias[i].y, even[at + 1], odd[at + 1], even[at + 3], odd[at + 3]);
        }
        to += 8 * outputs.area;
      }
    }
  }

  __device__ __forceinline__ void put(Element* to, uint32_t bias_bits, float v0, float v1, float v2,
                                      float v3) const {
    const float bias = __uint_as_float(bias_bits);
    using Vector = VectorOf<4 * sizeof(Element)>;
    Vector four;
    if constexpr (kWide) {
      four = {__float_as_uint(v0 + bias), __float_as_uint(v1 + bias), __float_as_uint(v2 + bias),
              __float_as_uint(v3 + bias)};
    } else {
      four = {two_halves<Operand>(v0 + bias, v1 + bias), two_halves<Operand>(v2 + bias, v3 + bias)};
    }
    __stcs(reinterpret_cast<Vector*>(to), four);
  }

  // Of a thread's four outputs `count`, or all.
  __device__ __forceinline__ void store_single(const float (&even)[N / 2],
                                               const float (&odd)[N / 2], const Outputs& outputs,
                                               int count) const {
#pragma unroll
    for (int i = 0; i < N / 4; ++i) {
      const int number = i / 2 * 8 + i % 2, at = i / 2 * 4 + i % 2;
      if (number >= outputs.channels) continue;
      uint32_t bias_bits;
      ptx::load_shared(bias_bits, outputs.table + number * 4);
      const float bias = __uint_as_float(bias_bits);
      const float four[] = {even[at], odd[at], even[at + 2], odd[at + 2]};
      Element* const to = outputs.to + number * outputs.area;
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        if (k < count) __stcs(to + k, Operand::from_float(four[k] + bias));
      }
    }
  }
};

}  // namespace upconv::phases
