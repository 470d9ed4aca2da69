// The weight's gradient of all phases of a row: how grad_output comes to the tensor cores where
// kernel and stride are 2 x 2 and rows are short (mask heads of 14 x 14, decoders of 28 x 28).
//
// A quad is all four taps of a pixel. Below whole rows of x both rows of their patches lie one
// after the other in gy: one run of numbers for each channel, which TMA brings. (It takes as long
// for a short row as for a long one, and twice as long for one that begins on no 128 bytes: row by
// row, in sm90_wgrad_patch.cuh, such images take twice the time of others.) So the plan has those
// rows as one row, `in_w` pixels of x and four times as many numbers of gy. Nothing is rounded to
// TF32 on the way, for the bias's sake; the consumers do it.
#pragma once

#include "sm90_wgrad_phases_two.cuh"

namespace upconv::wgrad_phases {

// --- Configuration ---------------------------------------------------------------------------

constexpr int kMostSquareBytes = 4 * kInputBytes + kPiece;
// Of a channel of gy: an odd number of pieces, so that 8 channels lie on different banks.
__host__ __device__ inline int square_bytes(const PhasesWgradParams& p) {
  const int bytes = p.out_w * (p.operand == 0 ? 4 : 2);
  return ((bytes + kPiece - 1) / kPiece | 1) * kPiece;
}

// --- Operands --------------------------------------------------------------------------------

template <typename Type>
struct Square {
  using Operand = Type;
  static constexpr int kNumber = sizeof(typename Operand::Element);
  static constexpr bool kWide = kNumber == 4;
  static constexpr bool kAddsBias = true;
  static constexpr int kArrivals = 1;
  static constexpr int kZeroBytes = 0;  // TMA does it
  static constexpr int kBytes = kGradRows * kMostSquareBytes;
  static constexpr int kPixels = kPiece / kNumber, kOwn = kPixels / 4;  // of a group, a thread

  const uint32_t place;     // the thread's channel in a stage
  const uint32_t second;    // from one row of a patch to the other
  uint32_t group[kGroups];  // the thread's pixels in a channel
  uint32_t there;           // a bit for each group: are there such pixels?

  __device__ __forceinline__ explicit Square(const PhasesWgradParams& p)
      : place(ptx::pinned(slot() * square_bytes(p))), second(ptx::pinned(2 * p.square * kNumber)) {
    there = 0;
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
      const int pixel = i * kPixels + threadIdx.x % 4 * kOwn, row = pixel / p.square;
      const bool on = pixel < p.in_w;
      // Where there is no pixel TMA makes x zero: any number of gy that there is will do.
      group[i] = on ? (2 * pixel + 2 * p.square * row) * kNumber : 0;
      there |= on ? 1u << i : 0;
    }
  }

  __device__ static __forceinline__ int slot() { return Two<Operand, 1>::slot(); }

  static __device__ __forceinline__ void load_all(const PhasesWgradParams& p, const Shared& shared,
                                                  const CUtensorMap& x, const CUtensorMap& gy) {
    const auto fetch = [&](const Unit<Operand>& unit, const Part<Operand>& part, int stage,
                           uint32_t full) {
      fetch_below(p, unit, part, 0, 0, unit.out * kGradRows, shared.gradient + stage * kBytes, gy,
                  full);
    };
    feed_parts<Operand>(p, shared, x, kGradRows * square_bytes(p), fetch);
  }

  // The groups of a turn. Returns the sum of the thread's numbers.
  template <bool kAdds>
  __device__ __forceinline__ float load(Registers& to, uint32_t stage, int turn) const {
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < kTurnGroups; ++i) {
      const int number = kTurnGroups * turn + i;
      const uint32_t at = stage + place + group[number];
      uint2 rows[2];
      ptx::load_shared(rows[0], at);
      ptx::load_shared(rows[1], at + second);
      uint32_t taps[kTaps];
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        if constexpr (kWide) {
          taps[2 * k] = ptx::nearly_tf32(rows[k].x);
          taps[2 * k + 1] = ptx::nearly_tf32(rows[k].y);
        } else {
          taps[2 * k] = __byte_perm(rows[k].x, rows[k].y, 0x5410);
          taps[2 * k + 1] = __byte_perm(rows[k].x, rows[k].y, 0x7632);
        }
        if constexpr (kAdds) sum += there >> number & 1 ? total<Operand>(rows[k]) : 0.f;
      }
      put_group(to, i, taps);
    }
    return sum;
  }
};

}  // namespace upconv::wgrad_phases
