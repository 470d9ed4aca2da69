// The weight's gradient of all phases of a row: how grad_output comes to the tensor cores where the
// stride is 2, the padding 1, and there are 3 or 4 taps.
//
// Of pixel i the taps 1 and 2 want gy at 2 i and 2 i + 1, the taps 0 and 3 at 2 i - 1 and 2 i + 2.
// A part of gy has 32 bytes below 16 bytes of x. TMA brings what is below a row, or a part of one,
// with what lies beside it. Where a part has several rows, loaders copy them in pieces of 16 bytes:
// TMA takes as long for a short row as for a long one. (Two rows of 128 bytes: 0.075 ms with TMA,
// 0.071 with loaders; one of 256: 1.52 and 1.71.) Beside such rows lie zeros.
// Nothing is rounded to TF32 on the way, for the bias's sake; the consumers do it.
#pragma once

#include "sm90_wgrad_phases_layout.cuh"

namespace upconv::wgrad_phases {

// --- Configuration ---------------------------------------------------------------------------

constexpr int kLoaders = 128;
constexpr int kPieces = 2 * kGroups;              // of one channel of gy in a part
constexpr int kChannelStep = kLoaders / kPieces;  // from one of a loader's channels to the next

// A channel of gy, with so many rows: 16 bytes before each of them; an odd number of pieces, so
// that 8 channels lie on different banks. What lies behind the last row is what lies before the
// next channel's first.
__host__ __device__ constexpr int channel_bytes(int rows) {
  return ((kPieces + rows) | 1) * kPiece;
}
__host__ __device__ constexpr int two_bytes(int rows) {
  return kGradRows * channel_bytes(rows) + kPiece;
}

// The same where TMA brings a part's only row: 16 bytes before it, and 32 behind it.
constexpr int kBoxedBytes = (kPieces + 3) * kPiece;

// --- Loaders ---------------------------------------------------------------------------------

template <typename Operand, int kRows>
struct TwoLoader {
  using Element = typename Operand::Element;
  static constexpr int kNumbers = kPiece / sizeof(Element);  // of a piece
  static constexpr int kChannelBytes = channel_bytes(kRows);
  static constexpr int kRowPieces = kPieces / kRows;

  const PhasesWgradParams& p;
  const int thread, row, column, channel;  // in the part: of a loader's first piece
  const uint32_t place;
  const int64_t plane;  // numbers of a channel of gy

  __device__ __forceinline__ explicit TwoLoader(const PhasesWgradParams& p)
      : p(p),
        thread(threadIdx.x - 128 * kConsumers),
        row(thread % kPieces / kRowPieces),
        column(thread % kRowPieces * kNumbers),
        channel(thread / kPieces),
        place(channel * kChannelBytes + (thread % kPieces + row + 1) * kPiece),
        plane(static_cast<int64_t>(p.out_d) * p.out_h * p.out_w) {}

  // Is there a row of gy below the loader's row of the part?
  __device__ __forceinline__ bool below(const Unit<Operand>& unit,
                                        const Part<Operand>& part) const {
    const int z = part.z * p.stride_z + unit.row_z - p.pad_z;
    const int y = (part.y + row) * p.stride_y + unit.row_y - p.pad_y;
    return part.y + row < p.in_h && static_cast<unsigned>(z) < p.out_d &&
           static_cast<unsigned>(y) < p.out_h;
  }
  // Where the first row below the part is, or would be, of the unit's first channel.
  __device__ __forceinline__ int64_t start(const Unit<Operand>& unit,
                                           const Part<Operand>& part) const {
    const int64_t channels = static_cast<int64_t>(part.image) * p.out_channels;
    const int z = part.z * p.stride_z + unit.row_z - p.pad_z;
    const int y = part.y * p.stride_y + unit.row_y - p.pad_y;
    return (channels + unit.out * kGradRows) * plane +
           (static_cast<int64_t>(z) * p.out_h + y) * p.out_w;
  }

  // The loader's pieces from `from` on, one for each of its channels.
  template <bool kAll>
  __device__ __forceinline__ void copy(const Element* from, int channels, int bytes,
                                       uint32_t to) const {
    const int64_t step = bytes ? kChannelStep * plane : 0;
#pragma unroll
    for (int i = 0; i < kGradRows / kChannelStep; ++i) {
      const bool on = kAll || i < channels;
      ptx::copy_async<kPiece>(to + place + i * kChannelStep * kChannelBytes,
                              on ? from + i * step : p.gy, on ? bytes : 0);
    }
  }

  __device__ __forceinline__ void run(const Shared& shared, const CUtensorMap& x) const {
    const bool starts = threadIdx.x / 32 == kConsumerWarps && ptx::elected();
    const int64_t own = channel * plane + row * p.stride_y * p.out_w + column;
    Slot slot;
    for (int number = blockIdx.x; number < unit_count(p); number += gridDim.x) {
      const Unit<Operand> unit(p, number);
      const int left = p.out_channels - unit.out * kGradRows;
      const int channels = (left - channel + kChannelStep - 1) / kChannelStep;
      Part<Operand> part(p, unit.first);
#pragma unroll 1
      for (int i = unit.first; i < unit.end; ++i) {
        const uint32_t full = shared.full + 8 * slot.index;
        const uint32_t to = shared.gradient + slot.index * two_bytes(kRows);
        const int64_t first = start(unit, part);
        const bool there = below(unit, part);
        ptx::barrier_wait(shared.empty + 8 * slot.index, slot.parity ^ 1);
        if (starts) {
          ptx::barrier_arrive_expect(full, input_bytes(p));
          start_input(p, shared, slot, x, part, unit.in, full);
        }
        const Element* from = static_cast<const Element*>(p.gy) + (there ? first + own : 0);
        if (left >= kGradRows) {
          copy<true>(from, channels, there ? kPiece : 0, to);
        } else {
          copy<false>(from, channels, there ? kPiece : 0, to);
        }
        ptx::copy_async_arrive(full);
        part.advance(p);
        slot.advance(p.stages);
      }
    }
    ptx::copy_async_wait<0>();
  }
};

// --- Operands --------------------------------------------------------------------------------

template <typename Type, int kRows>
struct Two {
  using Operand = Type;
  static constexpr int kNumber = sizeof(typename Operand::Element);
  static constexpr bool kWide = kNumber == 4;
  static constexpr bool kAddsBias = true;
  static constexpr bool kBoxed = kRows == 1;
  static constexpr int kChannelBytes = kBoxed ? kBoxedBytes : channel_bytes(kRows);
  static constexpr int kBytes = kBoxed ? kGradRows * kBoxedBytes : two_bytes(kRows);
  static constexpr int kZeroBytes = kBoxed ? 0 : kBytes;       // what lies beside the rows
  static constexpr int kArrivals = kBoxed ? 1 : kLoaders + 1;  // all loaders', and that of x

  // What a part begins with, in registers: computed anew it would take a fifth of the time.
  const uint32_t place;  // the thread's in a stage
  const int first_rows;  // of the warp's: one or zero

  __device__ __forceinline__ explicit Two(const PhasesWgradParams&)
      : place(ptx::pinned(slot() * kChannelBytes + kPiece + threadIdx.x % 4 * 8)),
        first_rows(ptx::pinned(threadIdx.x % 32 < 16 ? 1 : 0)) {}

  // The thread's channel of gy: rows r and r + 8 of a product are two taps of it. Of 8 channels
  // those with even numbers come first: what half a warp loads then lies on different banks.
  __device__ static __forceinline__ int slot() {
    return threadIdx.x / 32 * 8 + even_first(threadIdx.x % 32 / 4);
  }
  // The first of the four threads that have a channel.
  __device__ static __forceinline__ int thread_of(int channel) {
    return channel / 8 * 32 + row_of(channel % 8) * 4;
  }

  static __device__ __forceinline__ void load_all(const PhasesWgradParams& p, const Shared& shared,
                                                  const CUtensorMap& x, const CUtensorMap& gy) {
    if constexpr (!kBoxed) {
      TwoLoader<Operand, kRows>(p).run(shared, x);
    } else {
      const auto fetch = [&](const Unit<Operand>& unit, const Part<Operand>& part, int stage,
                             uint32_t full) {
        fetch_below(p, unit, part, 0, (2 * part.x * kNumber - kPiece) / 4, unit.out * kGradRows,
                    shared.gradient + stage * kBytes, gy, full);
      };
      feed_parts<Operand>(p, shared, x, kBytes, fetch);
    }
  }

  // The thread's two words of a group and those beside them. Lanes of the first rows read the one
  // before first, the others the one behind: 32 banks instead of 16. (16-bit types: a word has two
  // numbers, a register two pixels.)
  __device__ __forceinline__ uint2 load_group(uint32_t at, uint32_t (&taps)[kTaps]) const {
    uint2 both;
    uint32_t one, other;
    ptx::load_shared(both, at);
    ptx::load_shared(one, at + 8 - 12 * first_rows);
    ptx::load_shared(other, at - 4 + 12 * first_rows);
    const uint32_t before = first_rows ? one : other, behind = first_rows ? other : one;
    if constexpr (kWide) {
      taps[0] = ptx::nearly_tf32(before);
      taps[1] = ptx::nearly_tf32(both.x);
      taps[2] = ptx::nearly_tf32(both.y);
      taps[3] = ptx::nearly_tf32(behind);
    } else {
      taps[0] = __byte_perm(before, both.x, 0x7632);
      taps[1] = __byte_perm(both.x, both.y, 0x5410);
      taps[2] = __byte_perm(both.x, both.y, 0x7632);
      taps[3] = __byte_perm(both.y, behind, 0x5410);
    }
    return both;
  }

  // The groups of a turn. Returns the sum of the thread's numbers.
  template <bool kAdds>
  __device__ __forceinline__ float load(Registers& to, uint32_t stage, int turn) const {
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < kTurnGroups; ++i) {
      const int group = kTurnGroups * turn + i;
      uint32_t taps[kTaps];
      const uint2 both =
          load_group(stage + place + group * 32 + group * kRows / kGroups * kPiece, taps);
      if constexpr (kAdds) sum += total<Operand>(both);
      put_group(to, i, taps);
    }
    return sum;
  }
};

}  // namespace upconv::wgrad_phases
