// The forward kernel on mma.sync for few output channels: the last layers of generators, vocoders
// and networks for super-resolution.
//
// Few output channels leave most of a product empty, and reading the input once for each tap costs
// more than the products. Here the rows of the product are neighbouring pixels, its columns output
// channels x phases of depth and height x all taps of the width, and K is input channels x shifted
// rows: no pixel is read at a second column, so that pixels are operands as they lie in the
// contiguous layout. What the taps of the width have to say to an output is added up behind the
// products, through shared memory: out[b * stride + phase] is the sum over the phase's taps of
// column (sum, tap) at pixel b + shift.
//
// Pipeline: boxes of some channels (input rows x columns with margins, zeros outside) come into
// slots. By TMA where rows begin on 16 bytes (float32 arrives rounded): every warp waits for a box
// and hands its slot back by itself, and the warps take turns to have a slot filled again. Else by
// cp.async, with one __syncthreads a box. Each warp multiplies one row of places; its sums are its
// own, so that adding up needs no barrier. A block walks through the units of one group. What
// limits is what boxes bring: with their margins 1.5 times the input, at 4.7 TB/s from L2.
#pragma once

#include <type_traits>

#include "overlap_pack.cuh"
#include "overlap_store.cuh"

namespace upconv::overlap {

// --- Multiply --------------------------------------------------------------------------------

// Where this lane reads a warp's pixels in a box, for the first channel of its K and the first
// shift. 4-byte pixels: two neighbours, which are rows g and g + 8 of the product; 16-bit pixels:
// the row of 8 pixels whose address it gives for a transposed load.
template <typename Operand>
__device__ __forceinline__ int lane_place(const OverlapParams& p, const Warp& warp) {
  const int lane = threadIdx.x % 32;
  const bool wide = kBytes<Operand> == 4;
  const int channel = wide ? lane % 4 : lane / 16 * 8 + lane % 8;
  const int pixel = wide ? lane / 4 * 2 : lane / 8 % 2 * 8;
  return ((warp.y * p.channels + channel) * p.pitch + warp.x * p.valid + pixel) * kBytes<Operand>;
}

// The rows of one step of K: 16 pixels.
template <typename Operand>
__device__ __forceinline__ void load_pixels(uint32_t from, uint32_t channel_bytes,
                                            uint32_t (&a)[4]) {
  if constexpr (kBytes<Operand> == 4) {
    uint32_t low[2], high[2];
    mma_ptx::load_shared(from, low);
    mma_ptx::load_shared(from + 4 * channel_bytes, high);
    a[0] = low[0], a[1] = low[1], a[2] = high[0], a[3] = high[1];
  } else {
    mma_ptx::load_matrices_transposed(from, a);
  }
}

// One step of K for all pixels of a warp. `kAll`: every tile of columns has a tap there.
template <typename Operand, bool kRounded, bool kAll, int kM, int kN>
__device__ __forceinline__ void multiply_step(uint32_t from, uint32_t channel_bytes,
                                              uint32_t weights, int tiles,
                                              float (&sums)[kM][kN][4]) {
  constexpr bool kReady = kRounded && !Operand::kSplit;
  typename std::conditional_t<kReady, Fragment<4>, typename Operand::template Prepared<4>> a[kM];
#pragma unroll
  for (int m = 0; m < kM; ++m) {
    uint32_t read[4];
    load_pixels<Operand>(from + m * 16 * kBytes<Operand>, channel_bytes, read);
    if constexpr (kReady) {
#pragma unroll
      for (int i = 0; i < 4; ++i) a[m].words[i] = read[i];
    } else {
      a[m] = Operand::prepared(read);
    }
  }
#pragma unroll
  for (int n = 0; n < kN; ++n) {
    if (!kAll && !(tiles >> n & 1)) continue;
    uint32_t words[2];
    mma_ptx::load_shared(weights + n * 256, words);
    const auto b = gather::packed<Operand>(words);
#pragma unroll
    for (int m = 0; m < kM; ++m) Operand::multiply(sums[m][n], a[m], b);
  }
}

// The steps of a box from `begin` to `end`.
template <typename Operand, bool kRounded, bool kAll, int kM, int kN>
__device__ __forceinline__ void multiply_steps(const BoxStep* steps, int begin, int end,
                                               uint32_t box, uint32_t channel_bytes,
                                               uint32_t weights, float (&sums)[kM][kN][4]) {
  weights += begin * kN * 256;
#pragma unroll 1
  for (int i = begin; i < end; ++i, weights += kN * 256) {
    const BoxStep step = steps[i];
    multiply_step<Operand, kRounded, kAll, kM, kN>(box + step.offset, channel_bytes, weights,
                                                   step.tiles, sums);
  }
}

// --- The kernel ------------------------------------------------------------------------------

template <typename Operand, bool kBoxes, int kM, int kN>
__global__ void __launch_bounds__(kOverlapThreads, 1)
    overlap_fprop_kernel(const __grid_constant__ OverlapParams p,
                         const __grid_constant__ OverlapBoxes boxes) {
  const Shared shared(p, shared_memory());
  int group = blockIdx.x;
  const int share = split_off(group, p.by_shares, p.shares);
  const int first = share * p.each + min(share, p.more), units = p.each + (share < p.more);
  if constexpr (kBoxes) {
#if UPCONV_OVERLAP_TMA
    if (threadIdx.x == 0) {
      for (int i = 0; i < p.stages; ++i) {
        mma_ptx::barrier_init(shared.full(i), 1);
        mma_ptx::barrier_init(shared.empty(i), p.warps);
      }
      mma_ptx::barrier_init_fence();
    }
#endif
  } else {
    list_box(p, shared.lines);
  }
  load_weights(p, shared, group);
  list_steps<Operand>(p, shared);
  __syncthreads();

  // Box `index`, into a slot that has been handed back as often as `slot` says. Of boxes by TMA
  // one warp has it brought, each in its turn.
  const int total = units * p.chunks;
  Unit next(p, first), now = next;
  int next_chunk = 0, turn = threadIdx.x / 32;
  const auto load = [&](int index, const Slot& slot, bool used) {
    const bool mine = !kBoxes || turn == 0;
    turn = turn == 0 ? p.warps - 1 : turn - 1;
    if (index >= total) {
      if (!kBoxes) mma_ptx::copy_async_commit();  // what is waited for are numbers of commits
      return;
    }
    if (mine) {
#if UPCONV_OVERLAP_TMA
      if (kBoxes && used) mma_ptx::barrier_wait(shared.empty(slot.index), slot.parity);
#endif
      load_box<kBoxes, Operand>(p, boxes, shared, group, next, next_chunk, slot.index);
    }
    if (++next_chunk == p.chunks) next_chunk = 0, next.advance(p);
  };
  Slot before;  // of the box before this one
  for (int i = 0; i < p.stages - 1; ++i, before.advance(p)) load(i, before, false);
  if constexpr (kBoxes) {  // else the weights belong to what the first box is waited for with
    mma_ptx::copy_async_commit();
    mma_ptx::copy_async_wait<0>();
    __syncthreads();
  }

  float sums[kM][kN][4] = {};
  const Warp warp(p);
  const uint32_t pixels = mma_ptx::shared_address(shared.boxes) + lane_place<Operand>(p, warp);
  const uint32_t weights = mma_ptx::shared_address(shared.weights) + threadIdx.x % 32 * 8;
  const uint32_t channel_bytes = p.pitch * kBytes<Operand>;
  const int steps = p.shifts * p.steps, steps_all = p.shifts_all * p.steps;
  int chunk = 0;
  before.parity = 1;  // its first turn fills a slot that nobody has had
  Slot slot;
  for (int index = 0; index < total; ++index, slot.advance(p)) {
    wait_for_box<kBoxes>(p, shared, slot);
    load(index + p.stages - 1, before, index > 0);
    before.advance(p);
    const uint32_t box = pixels + slot.index * p.box_bytes;
    const uint32_t packed = weights + chunk * steps * kN * 256;
    multiply_steps<Operand, kBoxes, true>(shared.steps, 0, steps_all, box, channel_bytes, packed,
                                          sums);
    multiply_steps<Operand, kBoxes, false>(shared.steps, steps_all, steps, box, channel_bytes,
                                           packed, sums);
    hand_back<kBoxes>(shared, slot);
    if (++chunk < p.chunks) continue;
    chunk = 0;
    store_unit<Operand, kM, kN>(p, shared, group, now, warp, sums);
    now.advance(p);
  }
}

}  // namespace upconv::overlap
