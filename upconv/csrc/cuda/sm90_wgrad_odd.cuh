// Hopper kernel for the weight's gradient: grad_output with rows of 16-bit elements that begin
// anywhere, in mid-word too.
//
// With an odd number of elements in a row or plane, every row and every channel begins at another
// place of 16 bytes. The TMA brings 8 channels that follow each other as one, each with the up to
// seven elements before it that lie in its first 16 bytes. A point is an element, and at stride 2 a
// row holds both width phases, as it lies in memory. The rows g and g + 8 of a thread have places
// of their own; which half of a word an element is, is known when they are read.
#pragma once

#include "sm90_wgrad_layout.cuh"

namespace upconv::wgrad {

// --- Places ----------------------------------------------------------------------------------

// The words with which the windows of both rows of a thread begin, and with which half, in one
// register: the halves (1 bit each), the first row's address, and how far away the second's is.
struct OddBase {
  uint32_t packed;

  // How many elements later in its 16 bytes a row's class of channels begins than the first.
  __device__ static __forceinline__ int later(const WgradParams& p, int row) {
    return row % kRows / class_rows(p) * (p.out_volume & 7) & 7;
  }

  OddBase() = default;
  // `place` as the consumers keep it: address and skew below, how much later above. `lane`: what
  // the thread's own pixels add.
  __device__ __forceinline__ OddBase(const WgradParams& p, uint32_t place, uint32_t stage,
                                     uint32_t late, uint32_t lane) {
    const uint32_t skew = place & 1;
    const uint32_t first = ((late + (place >> 25)) & 7) + skew;
    const uint32_t second = ((late + (place >> 28)) & 7) + skew;
    const uint32_t between = 4 * p.pitch + second / 2 - first / 2;  // words: rows g and g + 8
    packed = ((place & 0x3fffc) + stage + lane + first / 2 * 4) | first % 2 | second % 2 << 1 |
             between << 18;
  }

  // Where the row begins, and whether with the upper half.
  __device__ __forceinline__ uint32_t word(int half) const {
    return (packed & 0x3fffc) + (half ? packed >> 18 << 2 : 0);
  }
  __device__ __forceinline__ bool upper(int half) const { return packed >> half & 1; }
};

// --- Windows ---------------------------------------------------------------------------------

// Pixels in order: of the 8-pixel pieces 2 m and 2 m + 1, instruction m of tap t needs the elements
// under pixels 2 t' and 2 t' + 1, moved by the tap. `kOdd` as in sm90_wgrad_params.h.
template <int T, int kOdd>
struct OddWindow {
  using Piece = int4;
  static constexpr int kSteps = 2, kTogether = 2;
  static constexpr int kSpread = kOdd == 1 ? 1 : 2, kApart = kOdd == 3 ? 2 : 1;
  // Words that hold all elements of a pair of pixels, whichever half comes first.
  static constexpr int kWords = (kSpread + (T - 1) * kApart + 1) / 2 + 1;
  uint32_t a[2][T][4];

  __device__ static __forceinline__ Piece piece(const int* pieces) {
    return *reinterpret_cast<const int4*>(pieces);
  }

  // Stride 1: neighbours, which begin in either half.
  __device__ __forceinline__ void take_one(uint32_t (*to)[4], int at, const uint32_t* w, bool odd) {
    const uint32_t even = odd ? 0x5432 : 0x3210, next = odd ? 0x7654 : 0x5432;
#pragma unroll
    for (int t = 0; t < T; ++t)
      to[t][at] = __byte_perm(w[t / 2], w[t / 2 + 1], t % 2 == 0 ? even : next);
  }

  // Stride 2: the same half of neighbouring words. An odd element is the other half, or that of the
  // next word.
  __device__ __forceinline__ void take_two(uint32_t (*to)[4], int at, const uint32_t* w, bool odd) {
    const uint32_t same = odd ? 0x7632 : 0x5410, other = odd ? 0x5410 : 0x7632;
#pragma unroll
    for (int t = 0; t < T; ++t) {
      const int k = t * kApart / 2;
      if (t * kApart % 2 == 0) {
        to[t][at] = __byte_perm(w[k], w[k + 1], same);
      } else {
        to[t][at] = __byte_perm(odd ? w[k + 1] : w[k], odd ? w[k + 2] : w[k + 1], other);
      }
    }
  }

  __device__ __forceinline__ void load(OddBase base, Piece piece) {
    const int at[4] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        base.packed = ptx::computed_here(base.packed);
        const uint32_t begin = base.word(half);
        const bool odd = base.upper(half);
        uint32_t (*to)[4] = a[i / 2];
        const int place = half + i % 2 * 2;
        if constexpr (kSpread == 1) {
          uint32_t w[kWords];
#pragma unroll
          for (int k = 0; k < kWords; ++k) ptx::load_shared(w[k], begin + at[i] * 2 + 4 * k);
          take_one(to, place, w, odd);
        } else {
          // 8 bytes at a time, which four rows spread over all banks; single words of every second
          // bank would take as long each.
          uint32_t w[kWords + 2];
#pragma unroll
          for (int k = 0; k <= kWords; k += 2) {
            uint2 two;
            ptx::load_shared(two, (begin & ~7u) + at[i] * 2 + 4 * k);
            w[k] = two.x, w[k + 1] = two.y;
          }
#pragma unroll
          for (int k = 0; k < kWords; ++k) w[k] = begin & 4 ? w[k + 1] : w[k];
          take_two(to, place, w, odd);
        }
      }
  }

  __device__ __forceinline__ const uint32_t (&set(int m, int t) const)[4] { return a[m][t]; }
};

}  // namespace upconv::wgrad
