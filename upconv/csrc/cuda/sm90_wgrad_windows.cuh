// Hopper kernel for the weight's gradient: grad_output in a consumer's registers.
#pragma once

#include "sm90_wgrad_layout.cuh"

namespace upconv::wgrad {

// --- Windows --------------------------------------------------------------------------------

// A run's operand in registers, four of them in a row for each instruction, as the tensor core
// takes them: channels g and g + 8, and two places along K. Neighbouring taps share what they can.
//
// `part` counts the batches of `kTogether` instructions in which a unit of pixels is multiplied,
// `piece` says where this thread's pixels lie in a row of the plane.
template <typename Operand, int T, bool kPairs, int kElement>
struct Window;

__device__ __forceinline__ void load_four(uint32_t* words, uint32_t address) {
  uint4 four;
  ptx::load_shared(four, address);
  words[0] = four.x, words[1] = four.y, words[2] = four.z, words[3] = four.w;
}

// TF32: a thread holds 8 neighbouring pixels and those to their right that the other taps meet.
// Instruction m of tap t needs points m + t and m + t + 4: 7 sets serve 4 taps, not 16.
template <typename Operand, int T>
struct Window<Operand, T, false, 4> {
  using Piece = int;
  static constexpr int kSteps = 4, kTogether = 4;  // instructions that cover a unit of pixels
  static constexpr int kSets = 3 + T;
  uint32_t a[kSets][4];

  __device__ static __forceinline__ Piece piece(const int* pieces) {
    return pieces[threadIdx.x % 4] * 4;
  }

  template <int kSkew>
  __device__ __forceinline__ void load_at(uint32_t from, uint32_t eight_channels) {
    constexpr int kPoints = (kSkew + 4 + kSets + 3) / 4 * 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t w[kPoints];
#pragma unroll
      for (int i = 0; i < kPoints; i += 4) load_four(w + i, from + half * eight_channels + 4 * i);
#pragma unroll
      for (int q = 0; q < kSets; ++q) {
        a[q][half] = Operand::prepare(w[kSkew + q]);
        a[q][half + 2] = Operand::prepare(w[kSkew + q + 4]);
      }
    }
  }

  __device__ __forceinline__ void load(uint32_t base, uint32_t eight_channels, Piece piece, int,
                                       int skew, int) {
    // Copies start at multiples of 16 bytes, windows are read in vectors: the rest is done here.
    const uint32_t from = base + piece;
    if (skew == 0) return load_at<0>(from, eight_channels);
    if (skew == 1) return load_at<1>(from, eight_channels);
    if (skew == 2) return load_at<2>(from, eight_channels);
    load_at<3>(from, eight_channels);
  }

  // The set of tap `t` for instruction `m` of a part.
  __device__ __forceinline__ const uint32_t (&set(int m, int t) const)[4] { return a[m + t]; }
};

// TF32 with both width phases in the plane, two points a pixel: a thread holds 4 pixels of either
// half of the unit, so that four threads read 32 words in a row (8 pixels, 16 points, would meet in
// the same banks). Instruction m of tap t needs points 2 m + t of both. All 10 sets of 4 taps leave
// no room beside 128 accumulators, and so the unit goes in two parts.
template <typename Operand, int T>
struct Window<Operand, T, true, 4> {
  using Piece = int2;
  static constexpr int kSteps = 4, kTogether = T > 2 ? 2 : 4;
  static constexpr int kSets = (kTogether - 1) * 2 + T;
  uint32_t a[kSets][4];

  __device__ static __forceinline__ Piece piece(const int* pieces) {
    const int t = threadIdx.x % 4, inside = t % 2 * 8;
    return {(pieces[t / 2] + inside) * 4, (pieces[2 + t / 2] + inside) * 4};
  }

  template <int kSkew>
  __device__ __forceinline__ void load_at(uint32_t base, uint32_t eight_channels, Piece piece) {
    constexpr int kPoints = (kSkew + kSets + 3) / 4 * 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t row = base + half * eight_channels;
      uint32_t low[kPoints], high[kPoints];
#pragma unroll
      for (int i = 0; i < kPoints; i += 4) {
        load_four(low + i, row + piece.x + 4 * i);
        load_four(high + i, row + piece.y + 4 * i);
      }
#pragma unroll
      for (int q = 0; q < kSets; ++q) {
        a[q][half] = Operand::prepare(low[kSkew + q]);
        a[q][half + 2] = Operand::prepare(high[kSkew + q]);
      }
    }
  }

  __device__ __forceinline__ void load(uint32_t base, uint32_t eight_channels, Piece piece,
                                       int part, int skew, int) {
    base += part * kTogether * 2 * 4;
    if (skew == 0) return load_at<0>(base, eight_channels, piece);
    if (skew == 1) return load_at<1>(base, eight_channels, piece);
    if (skew == 2) return load_at<2>(base, eight_channels, piece);
    load_at<3>(base, eight_channels, piece);
  }

  __device__ __forceinline__ const uint32_t (&set(int m, int t) const)[4] { return a[2 * m + t]; }
};

// 16-bit types, a word for each point, of which `high` picks one half: 0 or 1, or by turns (odd
// strides) from the first (2) or second (3) half on. Words of two pixels, m + t / 2 and m + t / 2 +
// 2 for instruction m; an odd tap starts in mid-word.
template <typename Operand, int T>
struct Window<Operand, T, true, 2> {
  using Piece = int;
  static constexpr int kSteps = 2, kTogether = 2;
  static constexpr int kEven = 2 + (T - 1) / 2;
  static constexpr int kOdd = T == 1 ? 0 : 2 + (T - 2) / 2;
  uint32_t a[kEven + kOdd][4];

  __device__ static __forceinline__ Piece piece(const int* pieces) {
    return pieces[threadIdx.x % 4] * 4;
  }

  // From the words `w` of eight channels, of which the run's first is the first.
  __device__ __forceinline__ void take(const uint32_t* w, int half, int high) {
    const uint32_t turn = high == 2 ? 0x7610 : 0x5432, other = high == 2 ? 0x5432 : 0x7610;
    const uint32_t same = high == 1 ? 0x7632 : 0x5410;
    const uint32_t even = high >= 2 ? turn : same, odd = high >= 2 ? other : same;
    const auto two = [&](int i) { return __byte_perm(w[i], w[i + 1], i % 2 == 0 ? even : odd); };
#pragma unroll
    for (int q = 0; q < kEven; ++q) a[q][half] = two(2 * q), a[q][half + 2] = two(2 * q + 4);
#pragma unroll
    for (int q = 0; q < kOdd; ++q)
      a[kEven + q][half] = two(2 * q + 1), a[kEven + q][half + 2] = two(2 * q + 5);
  }

  template <int kSkew>
  __device__ __forceinline__ void load_at(uint32_t from, uint32_t eight_channels, int high) {
    constexpr int kPoints = (kSkew + 8 + T - 1 + 3) / 4 * 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t w[kPoints];
#pragma unroll
      for (int i = 0; i < kPoints; i += 4) load_four(w + i, from + half * eight_channels + 4 * i);
      take(w + kSkew, half, high);
    }
  }

  __device__ __forceinline__ void load(uint32_t base, uint32_t eight_channels, Piece piece, int,
                                       int skew, int high) {
    const uint32_t from = base + piece;
    if (skew == 0) return load_at<0>(from, eight_channels, high);
    if (skew == 1) return load_at<1>(from, eight_channels, high);
    if (skew == 2) return load_at<2>(from, eight_channels, high);
    load_at<3>(from, eight_channels, high);
  }

  __device__ __forceinline__ const uint32_t (&set(int m, int t) const)[4] {
    return a[t % 2 == 0 ? m + t / 2 : kEven + m + t / 2];
  }
};

// Single taps of pairs, pixels in order: a thread reads the two points of a pixel (TF32), or the
// words of two pixels (16-bit types), as 8 bytes, of which `kTwo` runs take one each. Four rows of
// 32 bytes lie on different banks.
template <typename Operand, int kElement>
struct PairWindow {
  using Piece = int4;
  static constexpr int kSteps = kElement == 4 ? 4 : 2, kTogether = kSteps;
  static constexpr int kEach = kElement == 4 ? 1 : 2;  // 8-pixel pieces of an instruction
  uint32_t a[kSteps][4];

  __device__ static __forceinline__ Piece piece(const int* pieces) {
    return *reinterpret_cast<const int4*>(pieces);
  }

  // One register of the run: TF32 the point that it is after, 16-bit types a half of each word.
  __device__ static __forceinline__ uint32_t take(uint2 two, int high) {
    if constexpr (kElement == 4) {
      return Operand::prepare(high ? two.y : two.x);
    } else {
      const uint32_t turn = high == 2 ? 0x7610 : 0x5432, same = high == 1 ? 0x7632 : 0x5410;
      return __byte_perm(two.x, two.y, high >= 2 ? turn : same);
    }
  }

  // `kWide`: from multiples of 8 bytes on.
  template <bool kTwo, bool kWide>
  __device__ __forceinline__ void load_at(uint32_t from, uint32_t eight_channels, Piece piece,
                                          int high, PairWindow& second, int second_high) {
    const int at[4] = {piece.x, piece.y, piece.z, piece.w};
    // Of TF32 a piece has 8 columns of K, of which a thread has one in either half; of 16-bit types
    // it has 8 of 16.
#pragma unroll
    for (int i = 0; i < 8 / kEach; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int later = kElement == 4 ? i % 2 * 8 : 0;
        const uint32_t place =
            from + half * eight_channels + (at[kElement == 4 ? i / 2 : i] + later) * 4;
        uint2 two{};
        if constexpr (kWide) {
          ptx::load_shared(two, place);
        } else {
          ptx::load_shared(two.x, place);
          if (kElement == 2 || kTwo) ptx::load_shared(two.y, place + 4);
        }
        a[i / 2][half + i % 2 * 2] = take(two, high);
        if constexpr (kTwo) second.a[i / 2][half + i % 2 * 2] = take(two, second_high);
      }
  }

  template <bool kTwo>
  __device__ __forceinline__ void load_runs(uint32_t base, uint32_t eight_channels, Piece piece,
                                            int skew, int high, PairWindow& second,
                                            int second_high) {
    const uint32_t from = base + skew * 4 + threadIdx.x % 4 * 8;
    if ((kElement == 2 || kTwo) && skew % 2 == 0)
      return load_at<kTwo, true>(from, eight_channels, piece, high, second, second_high);
    load_at<kTwo, false>(from, eight_channels, piece, high, second, second_high);
  }

  __device__ __forceinline__ void load(uint32_t base, uint32_t eight_channels, Piece piece, int,
                                       int skew, int high) {
    load_runs<false>(base, eight_channels, piece, skew, high, *this, 0);
  }

  __device__ __forceinline__ const uint32_t (&set(int m, int) const)[4] { return a[m]; }
};

template <typename Operand>
struct Window<Operand, 1, true, 4> : PairWindow<Operand, 4> {};
template <typename Operand>
struct Window<Operand, 1, true, 2> : PairWindow<Operand, 2> {};

// 16-bit pixels in order: instruction m of tap t needs pixels 2 t' and 2 t' + 1, moved by t, of the
// 8-pixel pieces 2 m and 2 m + 1. A tap that starts in the middle of a word takes two halves.
template <typename Operand, int T>
struct Window<Operand, T, false, 2> {
  using Piece = int4;
  static constexpr int kSteps = 2, kTogether = 2;
  uint32_t a[2][T][4];

  __device__ static __forceinline__ Piece piece(const int* pieces) {
    return *reinterpret_cast<const int4*>(pieces);
  }

  // Whether the first tap starts in mid-word: known here (0 or 1), or (2) by `even` and `odd`.
  template <int kSkew>
  __device__ __forceinline__ void load_at(uint32_t base, uint32_t eight_channels, Piece piece,
                                          uint32_t even = 0, uint32_t odd = 0) {
    constexpr int kWords = kSkew == 2 ? 1 + (T + 1) / 2 : (kSkew + T + 2) / 2;
    const int at[4] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t w[kWords];
#pragma unroll
        for (int k = 0; k < kWords; ++k)
          ptx::load_shared(w[k], base + half * eight_channels + at[i] * 2 + 4 * k);
#pragma unroll
        for (int t = 0; t < T; ++t) {
          const int first = kSkew == 2 ? t / 2 : (t + kSkew) / 2;
          uint32_t& to = a[i / 2][t][half + i % 2 * 2];
          if constexpr (kSkew == 2) {
            to = __byte_perm(w[first], w[first + 1], t % 2 == 0 ? even : odd);
          } else {
            to = (t + kSkew) % 2 == 0 ? w[first] : __byte_perm(w[first], w[first + 1], 0x5432);
          }
        }
      }
  }

  // With an odd number of taps the branch saves a word of two or three (kb69 1.20 -> 1.00 ms), with
  // 4 some registers (kb71 0.45 -> 0.37). With 2 it cost 6 to 10 %.
  __device__ __forceinline__ void load(uint32_t base, uint32_t eight_channels, Piece piece, int,
                                       int skew, int) {
    base += threadIdx.x % 4 * 4;
    if constexpr (T == 2) {
      const uint32_t even = skew ? 0x5432 : 0x3210, odd = skew ? 0x7654 : 0x5432;
      return load_at<2>(base, eight_channels, piece, even, odd);
    } else {
      if (skew == 0) return load_at<0>(base, eight_channels, piece);
      load_at<1>(base, eight_channels, piece);
    }
  }

  __device__ __forceinline__ const uint32_t (&set(int m, int t) const)[4] { return a[m][t]; }
};

}  // namespace upconv::wgrad
