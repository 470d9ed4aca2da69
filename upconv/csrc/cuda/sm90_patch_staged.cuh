// Hopper kernel for patches 2 wide, forward, on trial: outputs leave through shared memory, where a
// writer copies them from while the products go on (sm90_staging.cuh).
//
// A piece is some runs of columns: the two outputs of a row that each of a consumer's pixels has in
// a channel and in one row of its patch. Below whole blocks of an image a channel's outputs follow
// each other; where patches are 2 high, the writer goes through them in that order. Rows of 14
// pixels are 112 or 56 bytes of outputs, and the sector of 32 bytes in which one ends and the next
// one begins is then written at once: written in halves, sectors are what holds up such layers.
#pragma once

#include "sm90_patch_forward.cuh"
#include "sm90_patch_paired.cuh"
#include "sm90_staging.cuh"

namespace upconv::patch {

constexpr int kPairs = kBlock / 2;  // of pixels: four outputs in a run

// From one run of a piece to the next: what four lanes lay down in as many runs, 32 bytes each,
// falls on different banks.
__host__ __device__ constexpr int run_pitch(int element_bytes) {
  return 2 * kBlock * element_bytes + 32;
}
// Runs of a piece: each wait for a piece is 50 cycles or more.
__host__ __device__ constexpr int piece_runs(int element_bytes) {
  return staging::kMostBytes / (2 * kBlock * element_bytes);
}
__host__ __device__ constexpr int piece_bytes(int element_bytes) {
  return piece_runs(element_bytes) * run_pitch(element_bytes);
}

// Behind all others in shared memory: barriers, where the writers' runs go, and the pieces.
struct StagedPart {
  uint32_t barriers, places, pieces;

  __device__ __forceinline__ StagedPart(const PatchParams& p, const Shared& shared)
      : barriers(shared.weights + p.weight_stages * weight_bytes(p)),
        places(barriers + staging::kBarrierBytes),
        pieces(places + kConsumers * kTableBytes) {}
  __host__ __device__ static int bytes(const PatchParams& p, int element_bytes) {
    return staging::kBarrierBytes +
           kConsumers * (kTableBytes + p.stage_pieces * piece_bytes(element_bytes));
  }
  __device__ __forceinline__ staging::Pieces pieces_of(const PatchParams& p, int c,
                                                       int element_bytes) const {
    return staging::Pieces(barriers, pieces, p.stage_pieces, piece_bytes(element_bytes), c);
  }
};

template <typename Base, int N>
struct Staged : Base {
  using typename Base::Element, typename Base::Operand;
  static constexpr bool kStaged = true;
  static constexpr int kSize = sizeof(Element), kPitch = run_pitch(kSize);
  static constexpr int kPieceRuns = piece_runs(kSize);
  using Vector = VectorOf<4 * kSize>;

  // --- A consumer's side ---

  struct Target {};
  template <typename Block>
  __device__ __forceinline__ Target target(const Block&, int, int, int) const {
    return {};
  }

  // The accumulators of a thread: four outputs side by side, in every fourth run.
  __device__ static __forceinline__ void lay_down(const float (&d)[N / 2], staging::Pieces& pieces,
                                                  int warp, int lane, uint32_t table) {
    const uint32_t place = lane % 4 * kPitch + (8 * warp + lane / 4) * 4 * kSize;
    constexpr int kEach = kPieceRuns / 4;  // of a thread
#pragma unroll
    for (int round = 0; round < N / 2 / kPieceRuns; ++round) {
      uint32_t bias[kEach];
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        ptx::load_shared(bias[i], table + lane % 4 * 8 + (kEach * round + i) * 32 + 4);
      }
      const uint32_t to = pieces.wait_for_room() + place;
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        const float* v = &d[(kEach * round + i) * 4];
        const float b = __uint_as_float(bias[i]);
        ptx::store_shared(to + i * 4 * kPitch, four_of(v[0] + b, v[1] + b, v[2] + b, v[3] + b));
      }
      pieces.hand_over();
    }
  }
  __device__ static __forceinline__ Vector four_of(float v0, float v1, float v2, float v3) {
    alignas(16) const Element four[] = {Operand::from_float(v0), Operand::from_float(v1),
                                        Operand::from_float(v2), Operand::from_float(v3)};
    return *reinterpret_cast<const Vector*>(four);
  }
};

// --- The feeder of boxes -----------------------------------------------------------------------

// Those of both consumers, in turn: feed_both in sm90_phases_staged.cuh tells why they are not
// feed_boxes.
template <typename Way>
__device__ __forceinline__ void feed_both(const PatchParams& p, const Shared& shared,
                                          const CUtensorMap& whole, const CUtensorMap& rest) {
  const Way way{p};
  const int units = unit_count<Way>(p), last = Way::block_count(p) - 1;
  const int depth = Way::depth(p);
  Slot slot;
  for (int unit = blockIdx.x; unit < units; unit += gridDim.x) {
    typename Way::Block blocks[kConsumers];
#pragma unroll
    for (int c = 0; c < kConsumers; ++c) {
      blocks[c] = way.block(min(p.shape.by_groups(unit) * kConsumers + c, last));
    }
    for (int k = 0; k < depth; ++k) {
#pragma unroll
      for (int c = 0; c < kConsumers; ++c) {
        const uint32_t full = shared.box_full_at(c, slot.index);
        const uint32_t box = shared.boxes + (c * p.box_stages + slot.index) * Way::kBytes;
        ptx::barrier_wait(shared.box_empty_at(c, slot.index), slot.parity ^ 1);
        ptx::barrier_arrive_expect(full, Way::kBytes);
#pragma unroll
        for (int part = 0; part < Way::kParts; ++part) {
          way.fetch(blocks[c], k, part, box + part * (Way::kBytes / Way::kParts), whole, rest,
                    full);
        }
      }
      slot.advance(p.box_stages);
    }
  }
}

// --- The writer --------------------------------------------------------------------------------

// The warp that copies what consumer `c` has laid down: two runs at a time, of which a lane has two
// times four outputs.
template <typename Way, int N>
struct Writer {
  using Element = typename Way::Element;
  using Vector = typename Way::Vector;
  static constexpr int kTwo = 2, kPieceRuns = Way::kPieceRuns;
  static constexpr int kBatch = 4;  // runs that are read before any is written, two apart

  const PatchParams& p;
  const Way way;
  const int c, lane;
  const uint32_t table;  // where the runs of a group go, from a pixel's first output
  staging::Pieces pieces;

  __device__ __forceinline__ Writer(const PatchParams& p, const StagedPart& staged, int c)
      : p(p),
        way{p},
        c(c),
        lane(threadIdx.x % 32),
        table(staged.places + c * kTableBytes),
        pieces(staged.pieces_of(p, c, Way::kSize)) {}

  __device__ __forceinline__ void run() {
    const int units = unit_count<Way>(p), blocks = Way::block_count(p);
    int group_before = -1;
    for (int unit = blockIdx.x; unit < units; unit += gridDim.x) {
      const int pair = p.shape.by_groups(unit), group = unit - pair * p.shape.groups;
      const int own = pair * kConsumers + c;
      if (own >= blocks) continue;
      if (group != group_before) begin_group(group);
      group_before = group;
      const auto block = way.block(own);
      Part parts[kTwo];
#pragma unroll
      for (int i = 0; i < kTwo; ++i) {
        const Place at = place_of(block, 32 * i + lane);
        parts[i] = {way.output(block, group, 2 * at.pair),
                    static_cast<uint32_t>(at.run * Way::kPitch + at.pair * 4 * Way::kSize),
                    table + at.run * 8};
      }
      write(parts);
    }
  }

  __device__ __forceinline__ void begin_group(int group) const {
    __syncwarp();
    for (int i = lane; i < way.group_runs(); i += 32) {
      ptx::store_shared(table + i * 8, way.run_at(group, i));
    }
    __syncwarp();
  }

  // Of two runs, 64 times four outputs, what is number `v`: in the order of memory, where these are
  // two rows of patches, below each other, of pixels that follow each other.
  struct Place {
    int run, pair;
  };
  template <typename Block>
  __device__ __forceinline__ Place place_of(const Block& block, int v) const {
    if (!block.whole || p.step_y != 2) return {v / kPairs, v % kPairs};
    const int x = block.pixel - p.shape.by_in_w(block.pixel) * p.in_w;
    const int first = min((p.in_w - x) / 2, kPairs);  // pairs of the first row
    if (v < 2 * first) return {v >= first, v < first ? v : v - first};
    const int row = p.shape.by_in_w(v - 2 * first), at = v - 2 * first - row * p.in_w;
    const int begin = first + row * (p.in_w / 2), pairs = min(p.in_w / 2, kPairs - begin);
    return {at >= pairs, begin + (at < pairs ? at : at - pairs)};
  }

  // One of a lane's two places: its first output in a group's first channel, null for none; from
  // the first byte of two runs; and where the table says how far it is for the run.
  struct Part {
    Element* to;
    uint32_t from, table;
  };
  __device__ __forceinline__ void write(const Part (&parts)[kTwo]) {
#pragma unroll 1
    for (int round = 0; round < N / 2 / kPieceRuns; ++round) {
      const uint32_t base = pieces.wait_for_outputs(), table = round * kPieceRuns * 8;
      Runs runs[2];  // those of the second place are asked for before the first are written
      read(runs[0], parts[0], base, table);
#pragma unroll 1
      for (int run = 0; run < kPieceRuns; run += kBatch * kTwo) {
        const uint32_t from = base + run * Way::kPitch;
        read(runs[1], parts[1], from, table + run * 8);
        store(runs[0], parts[0]);
        const int next = run + kBatch * kTwo < kPieceRuns ? kBatch * kTwo : 0;
        read(runs[0], parts[0], from + next * Way::kPitch, table + (run + next) * 8);
        store(runs[1], parts[1]);
      }
      pieces.hand_back();
    }
  }

  struct Runs {
    Vector v[kBatch];
    uint32_t place[kBatch];
  };
  __device__ __forceinline__ void read(Runs& runs, const Part& part, uint32_t piece,
                                       uint32_t table) const {
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      ptx::load_shared(runs.v[k], piece + part.from + k * kTwo * Way::kPitch);
      ptx::load_shared(runs.place[k], part.table + table + k * kTwo * 8);
    }
  }
  __device__ __forceinline__ void store(const Runs& runs, const Part& part) const {
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      if (part.to == nullptr || runs.place[k] == kNone) continue;
      Element* const to = part.to + static_cast<int64_t>(runs.place[k]) * 2;
      __stcs(reinterpret_cast<Vector*>(to), runs.v[k]);
    }
  }
};

}  // namespace upconv::patch
