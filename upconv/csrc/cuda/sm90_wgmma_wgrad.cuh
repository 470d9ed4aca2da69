// The weight's gradient on Hopper, straight on NCHW: gw[ci, co, k] = sum over images and pixels i
// of x[ci, i] * gy[co, i * stride - padding + k * dilation].
//
// The idea. Pixels are the reduced dimension K. Rows of 64 grad_output channels come from registers
// (operand A), N input channels from shared memory (operand B, K-major). A tap moves grad_output
// along K by single pixels, which no descriptor can; in registers it costs little. For TF32 K is
// numbered so that taps share registers: a thread holds 8 neighbouring pixels of its two channels,
// 8 t .. 8 t + 7, and those to their right. Pixel 8 t + v of a unit of 32 is element t of vector v
// in shared memory, instruction m takes vectors m and m + 4, and so the next tap finds its operand
// in the next set of registers. One window of shared memory reads serves a whole run of taps.
// 16-bit types keep their pixels in order, so that the input comes in copies of 16 bytes.
//
// Few channels: each of the four warps of a product has taps of its own, for 16 channels of
// grad_output. With 32 channels, two kernel rows fill a product; with 16, four.
// Stride: grad_output is taken apart into its phases on the way in ("planes"). At width stride 2
// planes keep both width phases, as they lie in memory, and are taken apart in registers.
// Rows: chunks (one input row, a strip of columns) follow each other down the image in a ring, and
// a tap of another kernel row finds its row of grad_output in an older chunk of the ring.
// Groups: every input channel meets every channel of grad_output, and what belongs to no group is
// left out at the end. With few channels a group the tensor cores have the time.
// Depth: a slice along the depth is an image of its own; each tap in depth has planes of its own.
//
// Accumulators: consumers x G runs x T taps x 64 x N. Blocks share the pixels ("workers"); each
// writes its sums to the workspace, and a second kernel adds them in a fixed order.
//
// Roles: producers   warps 0-3   fill the ring: the TMA brings grad_output where its points lie
// side
//                                by side in memory, and then also input whose rows begin on 16
//                                bytes; otherwise asynchronous copies of each thread
//        consumers   C warpgroups, each with its own taps or channels, on the same chunks
// Pipelines: raw[stage]    the input's bytes, where producers have yet to change their order
//            full[stage]   128 producer threads and the bytes of all boxes -> consumers may read
//            empty[stage]  each consumer arrives once, and each warp of the producers where they
//                          add up the bias's gradient  -> producers may fill again
#pragma once

#include "sm90_wgrad_add.cuh"
#include "sm90_wgrad_consumer.cuh"
#include "sm90_wgrad_odd_rows.cuh"
#include "sm90_wgrad_producers.cuh"

namespace upconv::wgrad {

// --- The kernel ------------------------------------------------------------------------------

template <typename Operand, int C, int N, int G, int T, bool kPairs, int kOdd>
__global__ void __launch_bounds__(128 * (C + 1), 1)
    sm90_wgmma_wgrad(const __grid_constant__ WgradParams p, const __grid_constant__ CUtensorMap gy,
                     const __grid_constant__ CUtensorMap x) {
  static_assert(C == 2 || C == 3, "registers are shared out for two or three consumers");
  // ptxas wants accumulators and register operands within what the block is launched with (168 or
  // 128 a thread), whatever setmaxnreg adds: 5 taps of N = 64 make it serialize the products.
  static_assert(G * T * N <= (C == 2 ? 256 : 192), "the accumulators would spill");
  static_assert(C * G <= kWgradRuns, "beyond the plan");
  extern __shared__ __align__(1024) unsigned char memory[];
  const Shared shared(memory);
  if (threadIdx.x == 0) {
    // Producers that add up a chunk give it back as well, each warp once.
    const int readers = C + (p.job[Share(p).job].sums > 0 ? kProducers / 32 : 0);
    for (int i = 0; i < p.stages; ++i) {
      ptx::barrier_init(shared.full + 8 * i, kProducers + boxes(p));
      ptx::barrier_init(shared.empty + 8 * i, readers);
      ptx::barrier_init(shared.raw + 8 * i, kOdd ? kProducers : 1);
    }
    ptx::barrier_init_fence();
  }
  const int pieces = p.segment / 8;
  for (int i = threadIdx.x; i < chunk_pixels(p) / 8; i += blockDim.x) {
    shared.pieces[i] = i / pieces * p.segment_pitch + i % pieces * 8 * p.spread;
  }
  __syncthreads();
  // 168 registers a thread for 3 warpgroups, 128 for 4, handed round: 88 + 2 x 208, 80 + 3 x 144,
  // and 56 + 3 x 152 where the sums need them.
  constexpr bool kTight = C == 3 && G * T * N > 144;
  constexpr int kFew = C == 2 ? 88 : kTight ? 56 : 80, kMany = C == 2 ? 208 : kTight ? 152 : 144;
  if (threadIdx.x < 128) {
    ptx::give_registers<kFew>();
    if constexpr (kOdd > 0) {
      OddProducer<Operand, N, T, kOdd>(p, shared, gy, x).run();
    } else {
      Producer<Operand, N, kPairs, T, kOdd>(p, shared, gy, x).run();
    }
  } else {
    ptx::take_registers<kMany>();
    const int c = threadIdx.x / 128 - 1;
    // TF32 has a consumer for what the TMA has rounded: 3 of 4 instructions of a window less. For
    // the bias's gradient it does not round.
    constexpr bool kRounds = sizeof(typename Operand::Element) == 4;
    if (kRounds && boxes(p) && !p.sums) {
      Consumer<Operand, N, G, T, kPairs, kOdd, kRounds>(p, shared, c).run(c);
    } else {
      Consumer<Operand, N, G, T, kPairs, kOdd, false>(p, shared, c).run(c);
    }
  }
}

}  // namespace upconv::wgrad
