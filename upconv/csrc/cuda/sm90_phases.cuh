// Transposed convolution of stride 2 with 3 or 4 taps and padding 1 in a row, on Hopper, straight
// on NCHW, and its input's gradient: generators of GANs (kernel 4, stride 2, padding 1), decoders
// with kernel 3, pose heads, the last layers of vocoders.
//
// The idea is that of sm90_patch.cuh: pixels are the rows of the product and come from registers,
// loaded straight from the box that TMA has brought. What is new are shifts. Outputs of a row with
// even and with odd numbers are two products of the same pixels with different taps; a thread has
// the inputs round its pixels in registers and multiplies them with every tap that wants them, into
// accumulators for even and odd outputs. No instruction moves a pixel from one thread to another.
//
// Rows: rows r and r + 8 of a product are neighbouring pixels, so that a thread has four outputs
// that lie side by side. Blocks: 64 pixels or twice as many, one after the other in an image, or in
// rows of octets of 8. Taps of other rows: a place in the box. One phase of the rows at a time.
// Port of shared memory, in cycles for 8 channels (4 x 4 taps, 2 x 64 pixels, 128 outputs, TF32):
// operand A 128, weights read 512 and written 256, boxes 50; the tensor cores take 1024.
//
// Roles: consumers  warps 0-7: two warpgroups, a block each, the same channels
//        feeders    one thread each of warps 8 and 9 for the consumers' boxes, of 10 for the
//        weights
// Pipelines: box_full[consumer][stage]   bytes of a box               -> its consumer may read
//            box_empty[consumer][stage]  each of the consumer's warps -> its feeder may fill again
//            full[stage]                 bytes of weights             -> consumers may read
//            empty[stage]                each warp of both consumers  -> the feeder may fill again
#pragma once

#include "sm90_phases_backward.cuh"
#include "sm90_phases_forward.cuh"
#include "wgmma_registers.cuh"

namespace upconv::phases {

// --- Feeders ---------------------------------------------------------------------------------

// The boxes of consumer `c`.
template <typename Way>
__device__ __forceinline__ void feed_boxes(const PhasesParams& p, const Shared& shared, int c,
                                           const CUtensorMap& map) {
  const Way way{p};
  const int units = p.shape.units, last = p.shape.blocks - 1, depth = p.shape.depth;
  const int bytes = box_bytes(p), pitch = box_pitch(p);
  Slot slot;
  for (int number = blockIdx.x; number < units; number += gridDim.x) {
    const Unit unit = unit_at(p, number);
    const Block block = block_at(p.shape, min(unit.pair * kConsumers + c, last));
    const Rows taps = taps_of(p, unit.phase);
    if (taps.z * taps.y == 0) continue;
    for (int k = 0; k < depth; ++k) {
      const uint32_t full = shared.box_full_at(c, slot.index);
      const uint32_t box = shared.boxes + (c * p.box_stages + slot.index) * pitch;
      ptx::barrier_wait(shared.box_empty_at(c, slot.index), slot.parity ^ 1);
      ptx::barrier_arrive_expect(full, bytes);
      way.fetch(block, unit.phase, k, box, map, full);
      slot.advance(p.box_stages);
    }
  }
}

// Packed weights: those of a stage for each tap of the rows, room for as many as a phase can have.
__device__ __forceinline__ void feed_weights(const PhasesParams& p, const Shared& shared) {
  const int units = p.shape.units, bytes = weight_bytes(p), depth = p.shape.depth;
  const int most = p.shape.most_z * p.shape.most_y;
  Slot slot;
  for (int number = blockIdx.x; number < units; number += gridDim.x) {
    const Unit unit = unit_at(p, number);
    const Rows taps = taps_of(p, unit.phase);
    const int64_t number_of = static_cast<int64_t>(unit.group) * p.shape.row_phases + unit.phase;
    const char* from = static_cast<const char*>(p.w) + number_of * depth * most * bytes;
    for (int k = 0; k < depth; ++k, from += static_cast<int64_t>(most) * bytes) {
      for (int tap = 0; tap < taps.z * taps.y; ++tap) {
        const uint32_t full = shared.full + 8 * slot.index;
        ptx::barrier_wait(shared.empty + 8 * slot.index, slot.parity ^ 1);
        ptx::barrier_arrive_expect(full, bytes);
        ptx::bulk_copy(shared.weights + slot.index * bytes, from + tap * bytes, bytes, full);
        slot.advance(p.weight_stages);
      }
    }
    if (p.resident) return;
  }
}

// --- Consumers -------------------------------------------------------------------------------

template <typename Way>
struct Consumer {
  static constexpr int N = Way::kColumns, kBlocks = Way::kBlocks, kTaps = Way::kTaps;
  static constexpr int kSteps = Way::kSteps, kTurns = kSteps * kBlocks;
  // With 64 columns, products are over before what the next ones want has been loaded: it is loaded
  // ahead, into registers of its own.
  static constexpr bool kAhead = kTurns == 4;
  static constexpr int kSets = kAhead ? 4 : 2;  // of registers
  static constexpr int kWeightBytes = N * kStepBytes * kTaps * kSteps;
  static constexpr int kSums = Way::kSums * kBlocks;

  const PhasesParams& p;
  const Shared& shared;
  const Way way;
  const int c, warp, lane;
  const Channels channels;
  // Of a box: from one tap to the next in a slice, to the next slice, the first tap's place, all.
  const int row_step, slice_step, first_tap, pitch;
  uint32_t place[kBlocks];    // of a thread's pixels in the first box
  typename Way::Edges edges;  // of the block
  Slot box, weights;
  Rows taps;
  int tap_z, tap_y, tap;  // `tap`: its place in the box
  uint32_t over;          // the barrier of what the products before read; zero for none
  uint32_t a[kSets][Way::kOperands][4];
  float d[kSums][N / 2];

  __device__ __forceinline__ Consumer(const PhasesParams& p, const Shared& shared)
      : p(p),
        shared(shared),
        way{p},
        c(threadIdx.x / 128),
        warp(threadIdx.x / 32 % 4),
        lane(threadIdx.x % 32),
        channels(channels_of(p, lane)),
        row_step(ptx::pinned(row_bytes(p) * Way::kRowStep)),
        slice_step(ptx::pinned(slice_bytes(p) * Way::kRowStep)),
        first_tap(ptx::pinned(way.first_tap())),
        pitch(ptx::pinned(box_pitch(p))) {
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      place[b] = shared.boxes + c * p.box_stages * box_pitch(p) + channels.first +
                 way.place(b, warp, lane);
    }
  }

  // What one turn multiplies: a step of K, of a block.
  template <int kTurn>
  __device__ __forceinline__ void load(uint32_t (&rows)[Way::kOperands][4]) const {
    constexpr int kStep = kTurn / kBlocks, b = kTurn % kBlocks;
    way.load(rows, place[b] + box.index * pitch + tap + kStep * channels.step, channels, edges, b);
  }

  // One tap of the rows and the channels of a box, in turns. When some products have been started,
  // those before are over, and their registers and memory are free.
  template <int kSet>
  __device__ __forceinline__ void multiply() {
    if (tap_z == 0 && tap_y == 0) {
      ptx::barrier_wait(shared.box_full_at(c, box.index), box.parity);
    }
    load<0>(a[kSet]);
    ptx::barrier_wait(shared.full + 8 * weights.index, weights.parity);
    take_turns<kSet, 0>((shared.weights + weights.index * kWeightBytes) >> 4 | N << 16);
    advance();
  }

  template <int kFirst, int kTurn>
  __device__ __forceinline__ void take_turns(uint32_t low) {
    constexpr int kSet = (kFirst + kTurn) % kSets, kNext = (kSet + 1) % kSets;
    // 8 columns are 128 bytes, the other 16 bytes of their K come after all columns.
    const uint64_t high = static_cast<uint64_t>(128 >> 4) << 32;
    constexpr int kStep = kTurn / kBlocks, b = kTurn % kBlocks;
    // Before the products, each of which starts when the one before has taken its operand.
    if constexpr (kAhead && kTurn + 1 < kTurns) load<kTurn + 1>(a[kNext]);
    ptx::wgmma_fence();
#pragma unroll
    for (int product = 0; product < kTaps; ++product) {
      const uint32_t from = low + (kStep * kTaps + product) * (N * kStepBytes >> 4);
      WgmmaRegisters<typename Way::Operand, N>::run(d[Way::sum_of(product) * kBlocks + b],
                                                    a[kSet][Way::operand_of(product)], high | from);
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<1>();
    if (kTurn == 0) give_back();
    if constexpr (kTurn + 1 < kTurns) {
      if (!kAhead) load<kTurn + 1>(a[kNext]);
      take_turns<kFirst, kTurn + 1>(low);
    }
  }

  // Lane 0 the weights that the products before read, lane 1 their box, where it is over.
  __device__ __forceinline__ void give_back() const { ptx::barrier_arrive_if(over != 0, over); }

  // The next tap; after the last one, the next box.
  __device__ __forceinline__ void advance() {
    over = lane == 0 ? shared.empty + 8 * weights.index : 0;
    weights.advance(p.weight_stages);
    tap += row_step;
    if (++tap_y < taps.y) return;
    tap_y = 0;
    tap += slice_step - taps.y * row_step;
    if (++tap_z < taps.z) return;
    tap_z = 0;
    tap = first_tap;
    if (lane == 1) over = shared.box_empty_at(c, box.index);
    box.advance(p.box_stages);
  }

  __device__ __forceinline__ void run() {
    const int units = p.shape.units, blocks = p.shape.blocks;
    const uint32_t table = shared.tables + c * kTableBytes;
    int group = -1;
    for (int number = blockIdx.x; number < units; number += gridDim.x) {
      const Unit unit = unit_at(p, number);
      const int own = unit.pair * kConsumers + c;
      const Block block = block_at(p.shape, min(own, blocks - 1));
      edges = way.edges(block, warp, lane);
      if (unit.group != group) {
        group = unit.group;
        ptx::warpgroup_sync(1 + c);
        way.begin_group(table, group);
        ptx::warpgroup_sync(1 + c);
      }
#pragma unroll
      for (int i = 0; i < kSums * (N / 2); ++i) d[i / (N / 2)][i % (N / 2)] = 0.f;
      taps = taps_of(p, unit.phase);
      tap_z = tap_y = 0, tap = first_tap, over = 0;
      if (p.resident) weights = {};  // full once and for all, and always from the first
      const int times = p.shape.depth * taps.z * taps.y;
#pragma unroll 1
      for (int k = 0; k < times; k += 2) {
        multiply<0>();
        if (k + 1 == times) break;  // with a branch round it, ptxas would serialize the products
        multiply<kTurns % kSets>();
      }
      ptx::wgmma_wait<0>();
#pragma unroll
      for (int i = 0; i < kSums * (N / 2); ++i) {
        ptx::keep_after_wait(d[i / (N / 2)][i % (N / 2)]);
      }
      give_back();
      if (own < blocks) way.store(d, block, unit, warp, lane, table);
    }
  }
};

// --- The kernel ------------------------------------------------------------------------------

template <typename Way>
__global__ void __launch_bounds__(kThreads, 1)
    sm90_phases(const __grid_constant__ PhasesParams p, const __grid_constant__ CUtensorMap map) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const Shared shared(p, memory);
  shared.begin();
  // 168 registers a thread, handed round: 2 x 232 + 40.
  if (threadIdx.x < 128 * kConsumers) {
    ptx::take_registers<232>();
    Consumer<Way>(p, shared).run();
  } else {
    ptx::give_registers<40>();
    const int feeder = threadIdx.x / 32 - kConsumerWarps;
    if (feeder > kConsumers || !ptx::elected()) return;
    if (feeder == kConsumers) return feed_weights(p, shared);
    feed_boxes<Way>(p, shared, feeder, map);
  }
}

}  // namespace upconv::phases
