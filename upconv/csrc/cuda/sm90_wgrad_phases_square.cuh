// The weight's gradient of all phases of a row: how grad_output comes to the tensor cores where
// kernel and stride are 2 x 2 and rows are short (mask heads of 14 x 14, decoders of 28 x 28).
//
// A quad is all four taps of a pixel. Below whole rows of x both rows of their patches lie one
// after the other in gy: one run of numbers for each channel, which TMA brings. (It takes as long
// for a short row as for a long one, and twice as long for one that begins on no 128 bytes: row by
// row, in sm90_wgrad_patch.cuh, such images take twice the time of others.) So the plan has those
// rows as one row, `in_w` pixels of x and four times as many numbers of gy. Nothing is rounded to
// TF32 on the way, for the bias's sake; the consumers do it.
//
// Planes of x of 16-bit numbers may be no multiple of 16 bytes (392 for 14 x 14), which TMA cannot
// read; those of gy are. Then loaders copy x. What they copy may lie anywhere, so that a part is
// filled up with several runs of whole rows, one behind the other: 2 x 28 pixels of 64. The runs of
// all images are numbered in one sequence, of which a part has the next `runs`.
#pragma once

#include "sm90_wgrad_phases_two.cuh"

namespace upconv::wgrad_phases {

// --- Configuration ---------------------------------------------------------------------------

constexpr int kMostSquareBytes = 4 * kInputBytes + kPiece;
// Of a channel of gy: an odd number of pieces, so that 8 channels lie on different banks.
__host__ __device__ inline int square_bytes(const PhasesWgradParams& p) {
  const int bytes = p.out_w * number_bytes(p);
  return ((bytes + kPiece - 1) / kPiece | 1) * kPiece;
}
// From one run of gy in a part to the next.
__host__ __device__ inline int run_step(const PhasesWgradParams& p) {
  return kGradRows * square_bytes(p);
}

// --- Loaders ---------------------------------------------------------------------------------

// Copies x to where TMA with its swizzle would have put it: of each channel a row of 128 bytes, in
// which pieces of 16 change places. Each copy has `kCopy` bytes, 4 or 8, on which all runs begin.
// Neighbouring lanes copy what lies side by side, so that a warp writes to one row or two: to a row
// for each lane its copies would take 32 accesses to shared memory.
template <typename Operand, int kCopy>
struct RunLoader {
  using Element = typename Operand::Element;
  static constexpr int kCopies = kInputBytes / kCopy;  // of one channel in a part
  static constexpr int kStep = kLoaders / kCopies;  // from one of a loader's channels to the next
  static constexpr int kChannels = 64;              // whose copies are started in one go

  const PhasesWgradParams& p;
  const int channel, pixel;  // in the part: of a loader's first copy
  const int run;             // which one of the part's; behind its pixels there is none
  const uint32_t place;
  const int rows;       // of a channel of x
  const int64_t plane;  // numbers of a channel of x

  __device__ __forceinline__ explicit RunLoader(const PhasesWgradParams& p)
      : p(p),
        channel((threadIdx.x - 128 * kConsumers) / kCopies),
        pixel(threadIdx.x % kCopies * (kCopy / static_cast<int>(sizeof(Element)))),
        run(pixel / p.in_w),
        place(channel * kInputBytes + (threadIdx.x % kCopies * kCopy ^ channel * kPiece)),
        rows(p.in_d * p.in_h),
        plane(static_cast<int64_t>(rows) * p.in_w) {}

  // The loader's copies from `from` on, one for each of its channels, or zeros.
  template <bool kAll>
  __device__ __forceinline__ void copy(const Element* from, int channels, int bytes,
                                       uint32_t to) const {
    const int64_t step = bytes ? kStep * plane : 0;
#pragma unroll 1
    for (int first = 0; first < p.tile_n; first += kChannels) {
#pragma unroll
      for (int i = 0; i < kChannels / kStep; ++i) {
        const bool on = kAll || first + i * kStep < channels;
        const uint32_t swizzled = place ^ i * kStep % 8 * kPiece;
        ptx::copy_async<kCopy>(to + i * kStep * kInputBytes + swizzled, on ? from : p.x,
                               on ? bytes : 0);
        from += step;
      }
      to += kChannels * kInputBytes;
    }
  }

  // Starts TMA for gy below the next runs. Behind the last one there is no such image.
  __device__ __forceinline__ void start_runs(const Unit<Operand>& unit, Part<Operand>& next,
                                             uint32_t to, const CUtensorMap& gy,
                                             uint32_t full) const {
    ptx::barrier_arrive_expect(full, p.runs * run_step(p));
#pragma unroll 1
    for (int i = 0; i < p.runs; ++i) {
      fetch_below(p, unit, next, 0, 0, unit.out * kGradRows, to + i * run_step(p), gy, full);
      next.advance(p);
    }
  }

  // WGMMA reads shared memory on another way than copies write it: the fence is between them.
  __device__ __forceinline__ void hand_over(uint32_t full) const {
    ptx::fence_async_proxy();
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::barrier_arrive(full);
  }

  // Copies of one part are on their way while those of the part before it are waited for. So three
  // stages are the least: consumers give one back when they have begun the next.
  __device__ __forceinline__ void load(const Shared& shared, const CUtensorMap& gy,
                                       int gradient_bytes) const {
    const bool starts = threadIdx.x / 32 == kConsumerWarps && ptx::elected();
    Slot slot;
    int before = -1;
    for (int number = blockIdx.x; number < unit_count(p); number += gridDim.x) {
      const Unit<Operand> unit(p, number);
      const int left = p.in_channels - unit.in * p.tile_n;
      Part<Operand> next(p, unit.first * p.runs);
      int own = unit.first * p.runs + run, image = own / rows;
      own -= image * rows;
#pragma unroll 1
      for (int i = unit.first; i < unit.end; ++i) {
        const uint32_t full = shared.full + 8 * slot.index;
        const uint32_t to = shared.input + slot.index * input_bytes(p);
        ptx::barrier_wait(shared.empty + 8 * slot.index, slot.parity ^ 1);
        if (starts) start_runs(unit, next, shared.gradient + slot.index * gradient_bytes, gy, full);
        const bool there = run < p.runs && image < p.batch;
        const int first = image * p.in_channels + unit.in * p.tile_n + channel;
        const Element* from = static_cast<const Element*>(p.x);
        if (there) from += first * plane + own * p.in_w + pixel - run * p.in_w;
        if (left >= p.tile_n) {
          copy<true>(from, left - channel, there ? kCopy : 0, to);
        } else {
          copy<false>(from, left - channel, there ? kCopy : 0, to);
        }
        ptx::copy_async_commit();
        ptx::copy_async_wait<1>();
        if (before >= 0) hand_over(shared.full + 8 * before);
        before = slot.index;
        for (own += p.runs; own >= rows; own -= rows) ++image;
        slot.advance(p.stages);
      }
    }
    ptx::copy_async_wait<0>();
    if (before >= 0) hand_over(shared.full + 8 * before);
  }
};

// --- Operands --------------------------------------------------------------------------------

// `kCopied`: loaders copy x, and a part has several runs.
template <typename Type, bool kCopied>
struct Square {
  using Operand = Type;
  static constexpr int kNumber = sizeof(typename Operand::Element);
  static constexpr bool kWide = kNumber == 4;
  static constexpr bool kAddsBias = true;
  static constexpr int kArrivals = kCopied ? kLoaders / 32 + 1 : 1;  // the loaders' warps, and TMA
  static constexpr int kZeroBytes = 0;                               // whoever brings x does it
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
      const int all = i * kPixels + threadIdx.x % 4 * kOwn, run = kCopied ? all / p.in_w : 0;
      const int pixel = all - run * p.in_w, row = pixel / p.square;
      const bool on = kCopied ? run < p.runs : pixel < p.in_w;
      // Where there is no pixel x is zero: any number of gy that there is will do.
      group[i] = on ? run * run_step(p) + (2 * pixel + 2 * p.square * row) * kNumber : 0;
      there |= on ? 1u << i : 0;
    }
  }

  __device__ static __forceinline__ int slot() { return Two<Operand, 1>::slot(); }

  static __device__ __forceinline__ void load_all(const PhasesWgradParams& p, const Shared& shared,
                                                  const CUtensorMap& x, const CUtensorMap& gy) {
    if constexpr (kCopied) {
      constexpr int kMost = 8, kLeast = 4;  // bytes
      if (p.in_w * kNumber % kMost == 0)
        return RunLoader<Operand, kMost>(p).load(shared, gy, kBytes);
      return RunLoader<Operand, kLeast>(p).load(shared, gy, kBytes);
    }
    const auto fetch = [&](const Unit<Operand>& unit, const Part<Operand>& part, int stage,
                           uint32_t full) {
      fetch_below(p, unit, part, 0, 0, unit.out * kGradRows, shared.gradient + stage * kBytes, gy,
                  full);
    };
    feed_parts<Operand>(p, shared, x, run_step(p), fetch);
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
