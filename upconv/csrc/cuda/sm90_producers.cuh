// Hopper kernel: the thread that feeds both rings.
#pragma once

#include "sm90_boxes.cuh"
#include "sm90_gather.cuh"

namespace upconv {

// --- Feeder ----------------------------------------------------------------------------------

// Where the units end whose weights are loaded: after this block's first one if they then stay.
__device__ __forceinline__ int weight_units(const Sm90Params& p) {
  return p.resident ? static_cast<int>(blockIdx.x) + 1 : unit_count(p);
}

// The weights of consumer `c` in a unit.
__device__ __forceinline__ const uint4* weights_of(const Sm90Params& p, int unit, int c) {
  const int64_t skipped =
      p.conv_groups > 1 ? static_cast<int64_t>(Unit(p, unit).conv_group) * p.weight_blocks : 0;
  const Sm90Job& job = p.job[job_of(p, group_of(p, unit), c)];
  return p.w + (skipped + job.weights) * (kStageBytes / 16);
}

// The weight blocks of all units for one consumer, which has a ring of its own.
struct OwnWeightFeed {
  const Sm90Params& p;
  const Shared& shared;
  const int c, units, stages, end;
  int unit, stage, left = 0;
  uint32_t parity = 1;
  const uint4* from = nullptr;

  __device__ __forceinline__ OwnWeightFeed(const Sm90Params& p, const Shared& shared, int c)
      : p(p),
        shared(shared),
        c(c),
        units(ptx::pinned(weight_units(p))),
        stages(ptx::pinned(p.stages)),
        end(ptx::pinned(p.stages * (c + 1))),
        unit(static_cast<int>(blockIdx.x) - static_cast<int>(gridDim.x)),
        stage(end - stages) {
    find();
  }
  __device__ __forceinline__ bool live() const { return unit < units; }

  // The next unit that has weights.
  __device__ __forceinline__ void find() {
    while (left == 0) {
      unit += gridDim.x;
      if (!live()) return;
      from = weights_of(p, unit, c);
      left = p.job[job_of(p, group_of(p, unit), c)].steps;
    }
  }

  __device__ __forceinline__ void try_next() {
    if (!live() || !ptx::barrier_test(shared.spent + 8 * stage, parity)) return;
    const uint32_t full = shared.weights_full + 8 * stage;
    ptx::barrier_arrive_expect(full, kStageBytes);
    ptx::bulk_copy(shared.weights + stage * kStageBytes, from, kStageBytes, full);
    from += kStageBytes / 16;
    if (++stage == end) stage -= stages, parity ^= 1;
    if (--left == 0) find();
  }
};

// The weight blocks of all units, in the order in which the consumers take their turns.
struct WeightFeed {
  const Sm90Params& p;
  const Shared& shared;
  const int units, stages, passes;
  const uint32_t ring;
  int unit, pass = 0, stage = 0;
  uint32_t parity = 1;
  // Of this unit: slices that no turn has had yet, the next one's number in its plane, the plane.
  int slices = 0, slice = 0;
  const int* visit = nullptr;
  int turn = 0;  // whose turn comes next
  int left = 0;  // weight blocks of this turn
  // What each consumer needs next. Two pointers, not an array: that would lie in local memory.
  const uint4 *first = nullptr, *second = nullptr;

  __device__ __forceinline__ WeightFeed(const Sm90Params& p, const Shared& shared, int passes)
      : p(p),
        shared(shared),
        units(ptx::pinned(weight_units(p))),
        stages(ptx::pinned(p.stages)),
        passes(p.resident ? 1 : passes),
        ring(ptx::pinned(shared.weights)),
        unit(blockIdx.x) {
    begin_unit();
    find();
  }
  __device__ __forceinline__ bool live() const { return unit < units; }

  __device__ __forceinline__ void begin_unit() {
    const int group = group_of(p, unit);
    first = weights_of(p, unit, 0);
    second = weights_of(p, unit, 1);
    slices = slices_of(p, group);
    slice = 0;
    visit = shared.visits + p.job[job_of(p, group, 0)].visit * kVisitWords;
  }

  // The next turn that has weights.
  __device__ __forceinline__ void find() {
    while (left == 0 && live()) {
      if (slices == 0) {
        if (++pass == passes) pass = 0, unit += gridDim.x;
        begin_unit();
        continue;
      }
      const int count = min(p.turn_slices, slices);
      left = steps_in(p, visit, turn, slice, count);
      if (turn == 1) {
        slices -= count;
        slice += count;
        while (slice >= p.slices) slice -= p.slices, visit += kVisitWords;
      }
      turn ^= 1;
    }
  }

  __device__ __forceinline__ void try_next() {
    if (!live() || !ptx::barrier_test(shared.spent + 8 * stage, parity)) return;
    const uint32_t full = shared.weights_full + 8 * stage;
    ptx::barrier_arrive_expect(full, kStageBytes);
    const uint4* from = turn ? first : second;  // `turn` is one ahead
    ptx::bulk_copy(ring + stage * kStageBytes, from, kStageBytes, full);
    first += turn ? kStageBytes / 16 : 0;
    second += turn ? 0 : kStageBytes / 16;
    if (++stage == stages) stage = 0, parity ^= 1;
    if (--left == 0) find();
  }
};

// One thread starts every copy of weights and boxes as soon as there is room for it.
template <typename Operand, bool kRows>
__device__ __forceinline__ void feed(const Sm90Params& p, const Shared& shared,
                                     const CUtensorMap& map) {
  const int passes = Bands<Operand::kSplit>(shared).count();
  BoxFeed<kRows> boxes(p, shared, map, Operand::kBlockChannels, kWhole<Operand>, passes);
  if (p.rings == 2) {
    OwnWeightFeed first(p, shared, 0), second(p, shared, 1);
    while (first.live() || second.live() || boxes.live()) {
      first.try_next();
      second.try_next();
      boxes.try_next();
    }
    return;
  }
  WeightFeed weights(p, shared, passes);
  while (weights.live() || boxes.live()) {
    weights.try_next();
    boxes.try_next();
  }
}

}  // namespace upconv
