// Hopper kernel for both phases of a row, forward, on trial: outputs leave through shared memory,
// where a writer copies them from while the products go on (sm90_staging.cuh).
//
// A piece is 8 channels of all outputs that a consumer has: both phases of its pixels side by side,
// four outputs of each of its threads at a time. Rows of outputs must have whole fours.
#pragma once

#include "sm90_phases_forward.cuh"

namespace upconv::phases {

template <typename Type, int N, int kMany, int kWidth>
struct Staged : Forward<Type, N, kMany, kWidth> {
  using Base = Forward<Type, N, kMany, kWidth>;
  using Base::kSums;
  using typename Base::Element, typename Base::Operand;
  using typename Base::Vector;
  static constexpr bool kStaged = true;
  static constexpr int kSize = sizeof(Element), kFour = 4 * kSize;
  static constexpr int kPairs = kMany * kBlock / 2;  // of pixels
  static constexpr int kPitch = stage_pitch(kMany, kSize);
  static constexpr int kRounds = N / kStageChannels;

  // The accumulators of a thread: four outputs side by side, in two of every 8 channels.
  __device__ static __forceinline__ void lay_down(const float (&d)[kSums * kMany][N / 2],
                                                  staging::Pieces& pieces, int warp, int lane,
                                                  uint32_t table) {
    const uint32_t place = lane % 4 * 2 * kPitch + (8 * warp + lane / 4) * kFour;
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
      uint2 bias;
      ptx::load_shared(bias, table + lane % 4 * 8 + round * 32);
      const uint32_t to = pieces.wait_for_room() + place;
#pragma unroll
      for (int b = 0; b < kMany; ++b) {
        const float *even = &d[b][4 * round], *odd = &d[kMany + b][4 * round];
        const uint32_t at = to + b * (kBlock / 2) * kFour;
        ptx::store_shared(at, Base::four_of(bias.x, even[0], odd[0], even[2], odd[2]));
        ptx::store_shared(at + kPitch, Base::four_of(bias.y, even[1], odd[1], even[3], odd[3]));
      }
      pieces.hand_over();
    }
  }
};

// --- The feeder of boxes -----------------------------------------------------------------------

// Those of both consumers, in turn. Not one function with feed_boxes: with that ptxas works out the
// addresses of the proven forms otherwise, in up to 5 % more instructions.
template <typename Way>
__device__ __forceinline__ void feed_both(const PhasesParams& p, const Shared& shared,
                                          const CUtensorMap& map) {
  const Way way{p};
  const int units = p.shape.units, last = p.shape.blocks - 1, depth = p.shape.depth;
  const int bytes = box_bytes(p), pitch = box_pitch(p);
  Slot slot;
  for (int number = blockIdx.x; number < units; number += gridDim.x) {
    const Unit unit = unit_at(p, number);
    Block blocks[kConsumers];
#pragma unroll
    for (int c = 0; c < kConsumers; ++c) {
      blocks[c] = block_at(p.shape, min(unit.pair * kConsumers + c, last));
    }
    const Rows taps = taps_of(p, unit.phase);
    if (taps.z * taps.y == 0) continue;
    for (int k = 0; k < depth; ++k) {
#pragma unroll
      for (int c = 0; c < kConsumers; ++c) {
        const uint32_t full = shared.box_full_at(c, slot.index);
        const uint32_t box = shared.boxes + (c * p.box_stages + slot.index) * pitch;
        ptx::barrier_wait(shared.box_empty_at(c, slot.index), slot.parity ^ 1);
        ptx::barrier_arrive_expect(full, bytes);
        way.fetch(blocks[c], unit.phase, k, box, map, full);
      }
      slot.advance(p.box_stages);
    }
  }
}

// --- The writer --------------------------------------------------------------------------------

// The warp that copies what consumer `c` has laid down.
template <typename Way>
struct Writer {
  using Element = typename Way::Element;
  using Vector = typename Way::Vector;
  static constexpr int kMany = Way::kPairs / 32;  // pairs of pixels that a lane has

  const PhasesParams& p;
  const int c, lane;
  const int64_t area;
  staging::Pieces pieces;

  __device__ __forceinline__ Writer(const PhasesParams& p, const Shared& shared, int c)
      : p(p),
        c(c),
        lane(threadIdx.x % 32),
        area(static_cast<int64_t>(p.out_d) * p.out_h * p.out_w),
        pieces(shared.pieces_of(p, c)) {}

  __device__ __forceinline__ void run() {
    for (int number = blockIdx.x; number < p.shape.units; number += gridDim.x) {
      const Unit unit = unit_at(p, number);
      const int own = unit.pair * kConsumers + c;
      if (own >= p.shape.blocks) continue;
      Element* to[kMany];
      const Block block = block_at(p.shape, own);
#pragma unroll
      for (int b = 0; b < kMany; ++b) to[b] = first_output(block, unit, b);
      write(to, p.out_channels - unit.group * Way::kColumns);
    }
  }

  // Where four outputs of a lane's pixels go, in the first channel of a group; null for none.
  __device__ __forceinline__ Element* first_output(const Block& block, const Unit& unit,
                                                   int b) const {
    const int number = 2 * (b * 32 + lane), row = p.shape.by_block_w(number);
    const Own at = pixel_at(p, block, {number - row * p.shape.block_w, row});
    const Rows phase = phase_at(p, unit.phase);
    const int z = block.z * p.stride_z + phase.z, y = at.y * p.stride_y + phase.y, x = at.x * 2;
    if (z >= p.out_d || y >= p.out_h || x >= p.out_w) return nullptr;
    const int64_t channel =
        static_cast<int64_t>(block.image) * p.out_channels + unit.group * Way::kColumns;
    return static_cast<Element*>(p.result) + channel * area +
           (static_cast<int64_t>(z) * p.out_h + y) * p.out_w + x;
  }

  // All pieces of a unit; `left`: channels that there are.
  __device__ __forceinline__ void write(Element* (&to)[kMany], int left) {
#pragma unroll 1
    for (int round = 0; round < Way::kRounds; ++round, left -= kStageChannels) {
      const uint32_t from = pieces.wait_for_outputs() + lane * Way::kFour;
#pragma unroll
      for (int b = 0; b < kMany; ++b) {
        if (to[b] == nullptr) continue;
        write_channels(from + b * 32 * Way::kFour, to[b], min(left, kStageChannels));
        to[b] += kStageChannels * area;
      }
      pieces.hand_back();
    }
  }

  __device__ __forceinline__ void write_channels(uint32_t from, Element* to, int channels) const {
    Vector v[kStageChannels];
#pragma unroll
    for (int i = 0; i < kStageChannels; ++i) ptx::load_shared(v[i], from + i * Way::kPitch);
#pragma unroll
    for (int i = 0; i < kStageChannels; ++i, to += area) {
      if (i < channels) __stcs(reinterpret_cast<Vector*>(to), v[i]);
    }
  }
};

}  // namespace upconv::phases
