// Hopper kernel for the weight's gradient: which thread of the producers copies what, and the
// copies.
#pragma once

#include "sm90_wgrad_layout.cuh"

namespace upconv::wgrad {

// --- Who copies what -------------------------------------------------------------------------

// What one thread copies of each row of a chunk: always the same place, in every `jump`-th channel.
// Every division is done once, before the first chunk.
struct Place {
  int channel, log_jump, count;
  int where;  // image * 65536 + point

  // Nothing: the TMA brings it.
  __device__ __forceinline__ Place() : channel(0), log_jump(0), count(0), where(0) {}
  // `per_image` items of `points` points each, `images` times; they begin at point `first`.
  __device__ __forceinline__ Place(int per_image, int images, int points, int first, int channels) {
    const int row = max(per_image * images, 1), thread = threadIdx.x, item = thread % row;
    const int image = per_image > 0 ? item / per_image : 0;
    // A power of two that divides the channels evenly.
    const int jump = min(1 << (31 - __clz(kProducers / row)), channels & -channels);
    log_jump = 31 - __clz(jump);
    channel = thread / row;
    count = per_image > 0 && channel < jump ? channels >> log_jump : 0;
    where = image << 16 | (first + (item - image * per_image) * points);
  }
  __device__ __forceinline__ Place(int channel, int log_jump, int count, int where)
      : channel(channel), log_jump(log_jump), count(count), where(where) {}

  __device__ __forceinline__ int image() const { return where >> 16; }
  __device__ __forceinline__ int point() const { return where & 0xffff; }
  // How many of this thread's channels exist, `channels` of them counted from its first: 0 or
  // less where none does.
  __device__ __forceinline__ int existing(int channels) const {
    return (channels + (1 << log_jump) - 1) >> log_jump;
  }
};

// The same for input that is woven from copies of 8 or 16 bytes. One item is a square of 4 x 4
// words of a channel: vector t of it comes from the t-th piece of a unit and waits in the place of
// the t-th of 4 vectors; when all four are there, thread `thread` turns rows into columns. 8
// channels lie side by side, which spreads a warp's vectors over the banks. `image` is the unit of
// the chunk, `point` the square in it.
__device__ __forceinline__ Place square(int thread, int units, int squares, int channels) {
  const int row = units * squares, group = thread / 8, item = group % row;
  const int jump = min(8 << (31 - __clz(kProducers / 8 / row)), channels & -channels);
  const int channel = group / row * 8 + thread % 8, log_jump = 31 - __clz(jump);
  const int where = item / squares << 16 | item % squares;
  return Place(channel, log_jump, channel < jump ? channels >> log_jump : 0, where);
}

// Which of the 4 x 8 squares of its warp a thread copies for, and which vector of each. Lanes side
// by side copy what lies side by side in memory (each thread its own square took 32 wavefronts a
// copy and warp, not 4): 16 of them a row of two units, or of what the warp has.
template <bool kBothHalves>
struct Lane {
  int vector, thread;  // the first of the 4 squares: those of every second channel follow

  __device__ __forceinline__ Lane() {
    const int lane = threadIdx.x % 32;
    const int group = kBothHalves ? lane / 8 % 2 * 2 + lane % 2 : lane / 4 % 4;
    vector = kBothHalves ? lane / 2 % 4 : lane % 4;
    thread = threadIdx.x - lane + group * 8 + lane / 16;
  }
};

// --- Copies ----------------------------------------------------------------------------------

// `count` channels of one place, `step` elements apart in memory; those from `exist` on are zero.
// Several at a time: one after the other, the latency of the address arithmetic set the pace (12
// to 24 cycles a copy and multiprocessor).
template <typename Element, int kBytes, int kBatch>
__device__ __forceinline__ void copy_channels(uint32_t target, uint32_t jump, const Element* source,
                                              int64_t step, int count, int exist) {
  const bool whole = exist >= count;
#pragma unroll 1
  for (; count >= kBatch; count -= kBatch, exist -= kBatch) {
    if (whole) {
#pragma unroll
      for (int k = 0; k < kBatch; ++k)
        ptx::copy_async<kBytes>(target + k * jump, source + k * step, kBytes);
    } else {
#pragma unroll
      for (int k = 0; k < kBatch; ++k)
        ptx::copy_async<kBytes>(target + k * jump, source + k * step, k < exist ? kBytes : 0);
    }
    source += kBatch * step;
    target += kBatch * jump;
  }
#pragma unroll 1
  for (; count > 0; --count, --exist) {
    ptx::copy_async<kBytes>(target, source, exist > 0 ? kBytes : 0);
    source += step;
    target += jump;
  }
}

// 16-bit elements, two of them to a word; each is zero where its column does not exist. Eight words
// are on their way before the first is written: one after the other, each waits for memory.
template <typename Element>
__device__ __forceinline__ void copy_elements(uint32_t target, uint32_t jump, const Element* source,
                                              int64_t step, int count, int exist, int next,
                                              bool first, bool second) {
  constexpr int kBatch = 8;
  const unsigned short* from = reinterpret_cast<const unsigned short*>(source);
#pragma unroll 1
  for (; count > 0; count -= kBatch, exist -= kBatch) {
    uint32_t low[kBatch], high[kBatch];
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      low[k] = high[k] = 0;
      if (k < exist && first) low[k] = __ldg(from);
      if (k < exist && second) high[k] = __ldg(from + next);
      from += step;
    }
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      if (k < count) ptx::store_shared(target, low[k] | high[k] << 16);
      target += jump;
    }
  }
}

}  // namespace upconv::wgrad
