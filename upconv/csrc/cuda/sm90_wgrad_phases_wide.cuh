// The weight's gradient of all phases of a row: how grad_output comes to the tensor cores where the
// stride is 4 or 8, and kernel and padding are multiples of 4.
//
// Four taps side by side (a quad) of a pixel lie side by side in gy, so that one load brings them.
// What 32 pixels want of a row is one run of numbers for each channel: TMA brings it, rounded to
// TF32, and makes zero what is beyond the row. (Of 16-bit types a part has two such runs, side by
// side or of two whole rows.) Lanes have a channel each, or one of two quads of it: what a quarter
// of a warp loads lies on different banks, or is the same.
#pragma once

#include "sm90_wgrad_phases_layout.cuh"

namespace upconv::wgrad_phases {

// --- Configuration ---------------------------------------------------------------------------

constexpr int kRunPixels = 32;  // of a box

// Bytes of a channel in a box: the run, and 8 bytes before it where it begins between two times 16
// bytes (16-bit types).
template <typename Operand>
__host__ __device__ constexpr int run_bytes(int stride, int quads) {
  constexpr int kNumber = sizeof(typename Operand::Element);
  const int numbers = kRunPixels * stride + (kTaps * quads > stride ? kTaps * quads - stride : 0);
  const int bytes = numbers * kNumber + (kNumber == 2 ? 8 : 0);
  const int pieces = (bytes + kPiece - 1) / kPiece;
  // A stride of 4: channels half of all banks apart.
  return (stride == 4 ? (pieces + 7) / 8 * 8 + 4 : pieces) * kPiece;
}

template <typename Type, int kStride, int kQuads>
struct Wide {
  using Operand = Type;
  using Element = typename Operand::Element;
  static constexpr int kNumber = sizeof(Element);
  static constexpr int kWordNumbers = 4 / kNumber;  // TMA counts words: no more than 256 in a row
  static constexpr bool kWide = kNumber == 4;
  static constexpr bool kAddsBias = false;
  static constexpr int kArrivals = 1;
  static constexpr int kChannels = kGradRows / kQuads;
  static constexpr int kBoxes = kPartPixels<Operand> / kRunPixels;
  static constexpr int kRunBytes = run_bytes<Operand>(kStride, kQuads);
  static constexpr int kBoxBytes = (kChannels * kRunBytes + 127) / 128 * 128;
  static constexpr int kBytes = kBoxes * kBoxBytes;
  static constexpr int kZeroBytes = 0;  // TMA does it

  const uint32_t place;  // the thread's in a stage

  __device__ __forceinline__ explicit Wide(const PhasesWgradParams& p)
      : place(ptx::pinned(slot() / kQuads * kRunBytes + slot() % kQuads * kTaps * kNumber +
                          lead(p) * kNumber + threadIdx.x % 4 * kStride * kWordNumbers * kNumber)) {
  }

  // The thread's channel of gy and its quad.
  __device__ static __forceinline__ int slot() {
    return threadIdx.x / 32 * 8 + threadIdx.x % 32 / 4;
  }

  // Numbers by which a box begins before its run.
  __host__ __device__ static int lead(const PhasesWgradParams& p) {
    constexpr int kWhole = kPiece / kNumber;
    return (kWhole - p.pad_x % kWhole) % kWhole;
  }

  static __device__ __forceinline__ void load_all(const PhasesWgradParams& p, const Shared& shared,
                                                  const CUtensorMap& x, const CUtensorMap& gy) {
    const auto fetch = [&](const Unit<Operand>& unit, const Part<Operand>& part, int stage,
                           uint32_t full) {
      const int first = unit.window * kQuads * kTaps - p.pad_x - lead(p);
#pragma unroll
      for (int box = 0; box < kBoxes; ++box) {
        // The next of a row's pixels, or those of the next row.
        const int row = p.rows > 1 ? box : 0, along = p.rows > 1 ? 0 : box * kRunPixels;
        fetch_below(p, unit, part, row, (first + (part.x + along) * kStride) / kWordNumbers,
                    unit.out * kChannels, shared.gradient + stage * kBytes + box * kBoxBytes, gy,
                    full);
      }
    };
    feed_parts<Operand>(p, shared, x, kBoxes * kChannels * kRunBytes, fetch);
  }

  // The groups of a turn: one pixel of the thread's in each (TF32), or two.
  template <bool kAdds>
  __device__ __forceinline__ float load(Registers& to, uint32_t stage, int turn) const {
    constexpr int kPixels = kPiece / kNumber, kBoxGroups = kRunPixels / kPixels;
#pragma unroll
    for (int i = 0; i < kTurnGroups; ++i) {
      const int group = kTurnGroups * turn + i;
      const uint32_t at = stage + place + group / kBoxGroups * kBoxBytes +
                          group % kBoxGroups * (kPixels * kStride * kNumber);
      uint32_t taps[kTaps];
      if constexpr (kWide) {
        uint4 quad;
        ptx::load_shared(quad, at);
        taps[0] = quad.x, taps[1] = quad.y, taps[2] = quad.z, taps[3] = quad.w;
      } else {
        uint2 one, next;
        ptx::load_shared(one, at);
        ptx::load_shared(next, at + kStride * kNumber);
        taps[0] = __byte_perm(one.x, next.x, 0x5410);
        taps[1] = __byte_perm(one.x, next.x, 0x7632);
        taps[2] = __byte_perm(one.y, next.y, 0x5410);
        taps[3] = __byte_perm(one.y, next.y, 0x7632);
      }
      put_group(to, i, taps);
    }
    return 0.f;
  }
};

}  // namespace upconv::wgrad_phases
