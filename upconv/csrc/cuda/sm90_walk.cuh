// Transposed convolution and its input's gradient on Hopper, straight on NCHW, of layers in which
// neighbouring outputs meet the same taps: those of stride 1.
//
// Pixels are the rows of the product and come from registers, as in sm90_patch.cuh, loaded straight
// from the box that TMA has brought. What is new is the walk. A thread block goes through the
// planes of an image (the rows, where it has no depth), and multiplies each plane of the input with
// the taps of all planes at once: its columns are channels x taps of the walk, and sums of as many
// planes of outputs are on their way. The oldest is then complete, and is stored; the others move
// up by one. So each plane is read once, no row of a product is empty, however few the channels
// are, and rows of 72 or 192 columns cost the port of shared memory less than the tensor cores
// need.
//
// Rows: rows r and r + 8 of a product are neighbouring pixels. A thread loads a window of two
// pixels and as many more as there are taps in a row, from which all taps of the row are made
// without another load; the window begins with an even pixel of the box. A warp has octets of 8
// pixels, which follow each other along the rows of a plane, or of a strip of it: no pixel is
// computed twice, and none for nothing but at the ends of rows. Port of shared memory, in cycles
// for 8 channels (3 taps, 64 pixels, 192 columns, TF32): windows 32, weights read 144 and, where
// they come in a ring, written 72; the tensor cores take 288.
//
// Roles: consumers  warps 0-7: two warpgroups, a run of octets each, the same channels and planes
//        feeders    one thread each of warp 8 for the boxes of both consumers, of 9 for the weights
//        writers    warps 10 and 11, one for each consumer's outputs
// Pipelines: box_full[consumer][stage]      bytes of a box               -> its consumer may read
//            box_empty[consumer][stage]     each of the consumer's warps -> its box may be replaced
//            full[stage]                    bytes of weights             -> consumers may read
//            empty[stage]                   each warp of both consumers  -> the feeder may fill
//            finished outputs, from a consumer to its writer: sm90_staging.cuh
#pragma once

#include "sm90_walk_store.cuh"
#include "wgmma_registers.cuh"

namespace upconv::walk {

// Planes of the input that a unit meets: its results', and as many more as the walk has taps. Those
// that the input does not have nobody brings or multiplies.
struct Planes {
  int first, steps;  // of the input
};
__device__ __forceinline__ Planes planes_of(const WalkParams& p, const Unit& unit) {
  return {unit.first + p.low_z, unit.last - unit.first + p.kernel_z - 1};
}
__device__ __forceinline__ bool is_there(const WalkParams& p, int plane) {
  return static_cast<uint32_t>(plane) < static_cast<uint32_t>(p.in_d);
}

// --- Feeders ---------------------------------------------------------------------------------

// The boxes of both consumers, in turn.
__device__ __forceinline__ void feed_boxes(const WalkParams& p, const Shared& shared,
                                           const CUtensorMap& map) {
  const int units = p.shape.units, last = p.shape.blocks - 1, depth = p.shape.depth;
  const int bytes = box_bytes(p), pitch = box_pitch(p), channels = box_channels(p);
  Slot slot;
  for (int number = blockIdx.x; number < units; number += gridDim.x) {
    const Unit unit = unit_at(p, number);
    Block blocks[kConsumers];
#pragma unroll
    for (int c = 0; c < kConsumers; ++c) {
      blocks[c] = block_at(p, min(unit.pair * kConsumers + c, last));
    }
    const Planes planes = planes_of(p, unit);
    for (int i = 0; i < planes.steps; ++i) {
      if (!is_there(p, planes.first + i)) continue;
      for (int k = 0; k < depth; ++k) {
#pragma unroll
        for (int c = 0; c < kConsumers; ++c) {
          const uint32_t full = shared.box_full_at(c, slot.index);
          ptx::barrier_wait(shared.box_empty_at(c, slot.index), slot.parity ^ 1);
          ptx::barrier_arrive_expect(full, bytes);
          ptx::box_copy(shared.boxes + (c * p.box_stages + slot.index) * pitch, map,
                        blocks[c].x + p.low_x - p.lead, blocks[c].y + p.low_y, planes.first + i,
                        k * channels, blocks[c].image, full);
        }
        slot.advance(p.box_stages);
      }
    }
  }
}

// Packed weights: those of a stage for each row of taps.
__device__ __forceinline__ void feed_weights(const WalkParams& p, const Shared& shared) {
  const int units = p.shape.units, bytes = weight_bytes(p), stages = p.shape.depth * p.kernel_y;
  Slot slot;
  for (int number = blockIdx.x; number < units; number += gridDim.x) {
    const Unit unit = unit_at(p, number);
    const Planes planes = planes_of(p, unit);
    const char* from =
        static_cast<const char*>(p.w) + static_cast<int64_t>(unit.group) * stages * bytes;
    for (int i = 0; i < planes.steps; ++i) {
      if (!is_there(p, planes.first + i)) continue;
      for (int k = 0; k < stages; ++k) {
        const uint32_t full = shared.full + 8 * slot.index;
        ptx::barrier_wait(shared.empty + 8 * slot.index, slot.parity ^ 1);
        ptx::barrier_arrive_expect(full, bytes);
        ptx::bulk_copy(shared.weights + slot.index * bytes, from + static_cast<int64_t>(k) * bytes,
                       bytes, full);
        slot.advance(p.weight_stages);
      }
      if (p.resident) return;
    }
  }
}

// --- Consumers -------------------------------------------------------------------------------

// C: channels of a tile; kWalk, kTaps: taps of the walk and of a row.
template <typename Type, int C, int kWalk, int kMany, int kTaps>
struct Consumer {
  using Operand = Type;
  using Element = typename Operand::Element;
  using Writer = walk::Writer<Operand, C, kMany>;
  static constexpr bool kWide = sizeof(Element) == 4;
  static constexpr int N = C * kWalk, kBlocks = kMany, kSteps = steps_of(kBlocks);
  static constexpr int kTurns = kSteps * kBlocks;
  static constexpr int kSums = N / 2, kOldest = kSums - C / 2;
  // A product starts when the one before has taken its operand, and what is asked for behind it
  // waits for that. So what the next turn wants is loaded before the products of this one, into
  // registers of its own, where there are enough.
  static constexpr bool kAhead = kBlocks * kSums + 4 * 4 * kTaps <= 160;
  static constexpr int kSets = kAhead ? 4 : 2;  // of registers
  static constexpr int kWeightBytes = N * kStepBytes * kTaps * kSteps;
  static_assert(2 * kTurns % kSets == 0, "two rows of taps go round all sets");
  static_assert(kTaps % 2, "windows are whole pairs of pixels");

  const WalkParams& p;
  const Shared& shared;
  const int c, warp, lane;
  const Channels channels;
  // Of a box: from one row of taps to the next, and to the next box.
  const int row_step, pitch;
  Outputs<Operand, C, kBlocks> outputs;
  uint32_t place[kBlocks];  // of a thread's windows in the first box
  Slot box, weights;
  int tap_y, tap;  // `tap`: its place in the box
  uint32_t over;   // the barrier of what the products before read; zero for none
  uint32_t a[kSets][kTaps][4];
  float d[kBlocks][kSums];

  __device__ __forceinline__ Consumer(const WalkParams& p, const Shared& shared)
      : p(p),
        shared(shared),
        c(threadIdx.x / 128),
        warp(threadIdx.x / 32 % 4),
        lane(threadIdx.x % 32),
        channels(pixels::channels_of(channel_bytes(p), sizeof(Element), lane)),
        row_step(ptx::pinned(p.step_y * p.box_w * static_cast<int>(sizeof(Element)))),
        pitch(ptx::pinned(box_pitch(p))),
        outputs(p, shared, c, warp, lane) {}

  __device__ __forceinline__ void begin_block(const Block& block) {
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      const Own own = octet_at(p, block, (warp * kBlocks + b) * 2 + lane / 16);
      const int pixel = own.y * p.box_w + p.lead + own.x + lane / 4 % 4 * 2;
      place[b] = shared.boxes + c * p.box_stages * box_pitch(p) + channels.first +
                 pixel * static_cast<int>(sizeof(Element));
    }
  }

  // The operands of a step of K, of a block: one for each tap of a row, from windows of pixels in
  // the first and second 16 bytes of K.
  template <int kTurn>
  __device__ __forceinline__ void load(uint32_t (&to)[kTaps][4]) const {
    constexpr int kStep = kTurn / kBlocks, b = kTurn % kBlocks;
    const uint32_t from = place[b] + box.index * pitch + tap + kStep * channels.step;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t window[kTaps + 1];
#pragma unroll
      for (int pair = 0; pair <= kTaps / 2; ++pair) {
        if constexpr (kWide) {
          uint2 two;
          ptx::load_shared(two, from + half * channels.other + 8 * pair);
          window[2 * pair] = two.x, window[2 * pair + 1] = two.y;
        } else {
          const uint32_t at = from + half * channels.eight + 4 * pair;
          uint32_t first, other;
          ptx::load_shared(first, at);
          ptx::load_shared(other, at + channels.other);
          window[2 * pair] = low_halves(first, other);
          window[2 * pair + 1] = high_halves(first, other);
        }
      }
#pragma unroll
      for (int i = 0; i < kTaps; ++i) {
        to[i][2 * half] = window[i];
        to[i][2 * half + 1] = window[i + 1];
      }
    }
  }

  // One row of taps and the channels of a box, in turns. When some products have been started,
  // those before are over, and their registers and memory are free. kFirst: the first turn's
  // registers; `more`: there is another row or box of this unit.
  template <int kFirst>
  __device__ __forceinline__ void multiply(bool more) {
    if constexpr (!kAhead) {
      if (tap_y == 0) wait_for_box();
      load<0>(a[0]);
    }
    ptx::barrier_wait(shared.full + 8 * weights.index, weights.parity);
    take_turns<kFirst, 0>((shared.weights + weights.index * kWeightBytes) >> 4 | N << 16, more);
    if constexpr (!kAhead) advance();
  }
  __device__ __forceinline__ void wait_for_box() const {
    ptx::barrier_wait(shared.box_full_at(c, box.index), box.parity);
  }

  template <int kFirst, int kTurn>
  __device__ __forceinline__ void take_turns(uint32_t low, bool more) {
    constexpr int kSet = (kFirst + kTurn) % kSets, kNext = (kSet + 1) % kSets;
    // 8 columns are 128 bytes, the other 16 bytes of their K come after all columns.
    const uint64_t high = static_cast<uint64_t>(128 >> 4) << 32;
    constexpr int kStep = kTurn / kBlocks, b = kTurn % kBlocks;
    if constexpr (kAhead) {
      if constexpr (kTurn + 1 == kTurns) {
        advance();
        if (tap_y == 0 && more) wait_for_box();  // where there is none nobody uses what is loaded
      }
      load<(kTurn + 1) % kTurns>(a[kNext]);
    }
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < kTaps; ++i) {
      const uint32_t from = low + (kStep * kTaps + i) * (N * kStepBytes >> 4);
      WgmmaRegisters<Operand, N>::run(d[b], a[kSet][i], high | from);
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<1>();
    if (kTurn == 0) give_back();
    if constexpr (kTurn + 1 < kTurns) {
      if constexpr (!kAhead) load<kTurn + 1>(a[kNext]);
      take_turns<kFirst, kTurn + 1>(low, more);
    }
  }

  // Lane 0 the weights that the row before read, lane 1 its box, where it is over.
  __device__ __forceinline__ void give_back() const { ptx::barrier_arrive_if(over != 0, over); }

  // The next row of taps; after the last one, the next box.
  __device__ __forceinline__ void advance() {
    over = lane == 0 ? shared.empty + 8 * weights.index : 0;
    weights.advance(p.weight_stages);
    tap += row_step;
    if (++tap_y < p.kernel_y) return;
    tap_y = 0, tap = 0;
    if (lane == 1) over = shared.box_empty_at(c, box.index);
    box.advance(p.box_stages);
  }

  // All products of a plane of the input. With a branch round the wait ptxas would serialize the
  // products.
  __device__ __forceinline__ void take_plane(bool there, bool more) {
    over = 0;
    if (p.resident) weights = {};  // full once and for all, and always from the first
    const int times = there ? p.shape.depth * p.kernel_y : 0;
#pragma unroll 1
    for (int k = 0; k < times; k += 2) {
      multiply<0>(more || k + 1 < times);
      if (k + 1 == times) break;  // with a branch round it, ptxas would serialize the products
      multiply<kTurns % kSets>(more || k + 2 < times);
    }
    ptx::wgmma_wait<0>();
#pragma unroll
    for (int i = 0; i < kBlocks * kSums; ++i) ptx::keep_after_wait(d[i / kSums][i % kSums]);
    give_back();
    if constexpr (kTurns % kSets) {
      if (times % 2) begin_with<kTurns>();
    }
  }
  // What has been loaded for the next plane, into the registers of its first turn.
  template <int kSet>
  __device__ __forceinline__ void begin_with() {
#pragma unroll
    for (int i = 0; i < 4 * kTaps; ++i) a[0][i / 4][i % 4] = a[kSet][i / 4][i % 4];
  }

  // Sums of the taps after the last plane's: the oldest ones have been stored. The youngest begin
  // with the bias, straight from shared memory: a zero before all products and an addition behind
  // them would be two instructions more for each, while nothing is multiplied.
  __device__ __forceinline__ void move_up() {
    const float nothing = ptx::unknown(-0.f);  // additions take half the time of moves
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
      for (int i = kSums - 1; i >= C / 2; --i) {
        d[b][i] = d[b][i - C / 2] + nothing;
        ptx::keep_after_wait(d[b][i]);
      }
    }
    begin_sums(0);
  }
  // Of a plane of outputs: rows r and r + 8 of a product have the same channels, two of every 8.
  __device__ __forceinline__ void begin_sums(int first) {
    const uint32_t bias = shared.bias_of(c) + lane % 4 * 8;
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
      for (int i = 0; i < C / 2; i += 2) {
        ptx::load_shared(d[b][first + i], d[b][first + i + 1], bias + i / 4 * 32);
      }
    }
  }

  __device__ __forceinline__ void run() {
    const int units = p.shape.units, blocks = p.shape.blocks;
    for (int number = blockIdx.x; number < units; number += gridDim.x) {
      const Unit unit = unit_at(p, number);
      const int own = unit.pair * kConsumers + c;
      const Planes planes = planes_of(p, unit);
      const int last = min(planes.steps, p.in_d - planes.first) - 1;  // that the input has
      begin_block(block_at(p, min(own, blocks - 1)));
      ptx::warpgroup_sync(1 + c);
      outputs.begin_group(unit.group);
      ptx::warpgroup_sync(1 + c);
#pragma unroll
      for (int first = 0; first < kSums; first += C / 2) begin_sums(first);
      tap_y = 0, tap = 0;
      if (kAhead && last >= 0 && planes.first + last >= 0) {
        wait_for_box();
        load<0>(a[0]);
      }
#pragma unroll 1
      for (int i = 0; i < planes.steps; ++i) {
        take_plane(is_there(p, planes.first + i), i < last);
        if (i >= kWalk - 1 && own < blocks) outputs.lay_down(d, kOldest);
        move_up();
      }
    }
  }
};

// --- The kernel ------------------------------------------------------------------------------

template <typename Consumer>
__global__ void __launch_bounds__(kThreads, 1)
    sm90_walk(const __grid_constant__ WalkParams p, const __grid_constant__ CUtensorMap map) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const Shared shared(p, memory);
  shared.begin();
  // 168 registers a thread, handed round: 2 x 216 + 72.
  if (threadIdx.x < 128 * kConsumers) {
    ptx::take_registers<216>();
    Consumer(p, shared).run();
  } else {
    ptx::give_registers<72>();
    const int role = threadIdx.x / 32 - kConsumerWarps;
    if (role >= 2) return typename Consumer::Writer(p, shared, role - 2).run();
    if (!ptx::elected()) return;
    if (role == 1) return feed_weights(p, shared);
    feed_boxes(p, shared, map);
  }
}

}  // namespace upconv::walk
