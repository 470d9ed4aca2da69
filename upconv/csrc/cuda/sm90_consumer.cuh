// Hopper kernel: what a consumer warpgroup does with a tile: multiply, then store
// (sm90_epilogue.cuh, sm90_lines.cuh).
#pragma once

#include "sm90_lines.cuh"
#include "sm90_split.cuh"
#include "wgmma.cuh"

namespace upconv {

// --- Consumers: main loop --------------------------------------------------------------------

// One warpgroup: MB blocks of 64 rows by N pixels.
template <typename Operand, int N, int MB>
struct Consumer : LineEpilogue<Operand, N, MB> {
  using Base = LineEpilogue<Operand, N, MB>;
  using Base::c, Base::d, Base::p, Base::shared;
  const bool issuer;   // the one thread of its warp that arrives on barriers
  const bool turns;    // the consumers share one ring of weights
  const int ring_end;  // the stage after this consumer's last
  float sum[Operand::kSplit ? MB : 1][Operand::kSplit ? N / 2 : 1];  // of what d held before
  bool begun[MB];     // split operands: does d hold anything?
  float counted = 1;  // what d then counts
  int stage, slot = 0;
  uint32_t stage_parity = 0, slot_parity = 0, turn_parity;
  // Steps in flight, each a stage and the slot that it reads last, plus one; 0 for none. One
  // register each: there is none to spare.
  int older = 0, newer = 0;

  __device__ __forceinline__ Consumer(const Sm90Params& p, const Shared& shared, int c)
      : Base{p, shared, c},
        issuer(threadIdx.x % 32 == 0),
        turns(!Operand::kSplit && p.rings == 1),
        ring_end(p.stages * (p.rings == 2 ? c + 1 : 1)),
        stage(ring_end - p.stages),
        turn_parity(c == 0 ? 1 : 0) {}  // the first turn is consumer 0's

  // Gives back what one retired step has read: its weight stage, and its slot if it was the last
  // step to read it.
  __device__ __forceinline__ void retire(int step) {
    ptx::barrier_arrive_if(issuer && (step & 0xff), shared.spent + 8 * (step & 0xff) - 8);
    ptx::barrier_arrive_if(issuer && step >> 8, shared.emptied + 8 * (step >> 8) - 8);
  }

  // Waits for everything in flight and gives it back.
  __device__ __forceinline__ void drain() {
    ptx::wgmma_wait<0>();
    retire(older);
    retire(newer);
    older = newer = 0;
  }

  __device__ __forceinline__ void begin_turn() {
    if (!turns) return;
    ptx::barrier_wait(shared.turn + 8 * c, turn_parity);
    turn_parity ^= 1;
  }
  // Hands the tensor cores on as soon as everything is issued, then gives back what was read.
  __device__ __forceinline__ void end_turn() {
    ptx::barrier_arrive_if(turns && issuer, shared.turn + 8 * (1 - c));
    drain();
    __syncwarp();
  }

  // Adds the products of row block j since the last time to its sums.
  __device__ __forceinline__ void add_up(int j) {
    drain();
    if (!begun[j]) return;
    begun[j] = false;
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      ptx::keep_after_wait(d[j][i]);
      sum[j][i] += counted * d[j][i];
    }
  }

  // WGMMA keeps the four warps together. Without one, the issuer's warp could run ahead and hand on
  // turns and slots twice while another warp still waits for the first time: a parity test cannot
  // tell two phases apart, and that warp would wait for ever.
  __device__ __forceinline__ void keep_together() { ptx::warpgroup_sync(1 + c); }

  // Back to the first stage, whose next block comes with the next phase, unless it stays for ever.
  __device__ __forceinline__ void wrap() {
    stage -= p.stages;
    stage_parity ^= 1 - p.resident;
  }
  // Moves past the weight blocks and slots of the other consumer's turn.
  __device__ __forceinline__ void skip_stages(int steps) {
    stage += steps;
    while (stage >= ring_end) wrap();
  }
  __device__ __forceinline__ void skip_slots(int slices) {
    slot += slices;
    while (slot >= p.slots) slot -= p.slots, slot_parity ^= 1;
  }

  // One weight block: kPairs instructions, each two channel blocks deep at its own place in the
  // tile. Two steps stay in flight behind it. `adds`: not the first of a sum (split operands;
  // zeroed registers instead took them 1 to 23 % longer).
  template <int kPairs>
  __device__ __forceinline__ void multiply(float (&accumulator)[N / 2], uint32_t tile,
                                           const int* offsets, bool adds) {
    uint32_t b[kPairs];
    load_offsets(b, offsets);
    ptx::barrier_wait(shared.weights_full + 8 * stage, stage_parity);
    const uint32_t a = descriptor_low(shared.weights + stage * kStageBytes, kRowsPerBlock);
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < kPairs; ++k) {
      const uint64_t rows = descriptor(a + k * 2 * kRowsPerBlock, kGroup),
                     columns = descriptor(tile + b[k], p.strip);
      if constexpr (Operand::kSplit) {
        Wgmma<Operand, N>::run(accumulator, rows, columns, k > 0 || adds);
      } else {
        Wgmma<Operand, N>::run(accumulator, rows, columns);
      }
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<2>();
    retire(older);
    older = newer;
    newer = p.resident ? 0 : stage + 1;
    if (++stage == ring_end) wrap();
  }

  // Whole steps, then what is left in a step of 2 and a step of 1. Lists start on whole steps.
  __device__ __forceinline__ void multiply_list(float (&accumulator)[N / 2], uint32_t tile,
                                                const int* pair, int count, bool adds = true) {
    int left = count;
    for (; left >= 4; left -= 4, pair += 4, adds = true) {
      multiply<4>(accumulator, tile, pair, adds);
    }
    if (left == 0) return;
    if (left & 2) multiply<2>(accumulator, tile, pair, adds);
    if (left & 1) multiply<1>(accumulator, tile, pair + (left & 2), adds || left & 2);
  }

  // Split operands: each part of the list three times (see Split).
  __device__ __forceinline__ void multiply_parts(int j, uint32_t tile, const int* pair, int count) {
    const uint32_t tails = p.slice_blocks * p.block_pitch;
    for (int first = 0; first < count; first += p.sum_pairs) {
      const int part = min(count - first, p.sum_pairs);
      if (first) add_up(j);
#pragma unroll 1
      for (int time = 0; time < 3; ++time) {
        multiply_list(d[j], tile + (time == 1 ? tails : 0), pair + first, part, begun[j]);
        begun[j] = true;
      }
    }
  }

  // `lists`: each block's tap list, its first pair and their number in 16 bits each.
  __device__ __forceinline__ void multiply_slice(const uint32_t (&lists)[MB]) {
    // Two steps at most are held back while waiting; with fewer slots than three the one that is
    // waited for may depend on them.
    if (p.slots < 3) drain();
    ptx::barrier_wait(shared.filled + 8 * slot, slot_parity);
    const uint32_t tile =
        descriptor_low(shared.slots + slot * slot_bytes(p), p.block_pitch) + this->first_pixel();
#pragma unroll
    for (int j = 0; j < MB; ++j) {
      const int* pair = shared.pairs + (lists[j] >> 16);
      const int count = lists[j] & 0xffff;
      if constexpr (Operand::kSplit) {
        multiply_parts(j, tile, pair, count);
      } else {
        multiply_list(d[j], tile, pair, count);
      }
    }
    uint32_t pairs = 0;
#pragma unroll
    for (int j = 0; j < MB; ++j) pairs |= lists[j] & 0xffff;
    if (pairs) {
      newer |= (slot + 1) << 8;
    } else {  // a job without taps in this plane has read nothing
      keep_together();
      retire((slot + 1) << 8);
    }
    skip_slots(1);
  }

  // The tap lists of this consumer's job in a plane.
  __device__ __forceinline__ void load_lists(uint32_t (&lists)[MB], const int* visit) const {
    visit += p.alternate ? 0 : c * kMaxBlocks;
#pragma unroll
    for (int j = 0; j < MB; ++j) {
      const uint32_t list = visit[j];  // an Sm90List, as it lies in memory
      lists[j] = list << 16 | list >> 16;
    }
  }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int j = 0; j < MB; ++j) {
      begun[j] = false;
#pragma unroll
      for (int i = 0; i < N / 2; ++i) {
        if constexpr (Operand::kSplit) {
          sum[j][i] = 0.f;
        } else {
          d[j][i] = 0.f;
        }
      }
    }
  }

  // `visit`: the first plane of the unit, in the table.
  __device__ __forceinline__ void accumulate(const int* visit, int slices) {
    int unsummed = 0;  // slices
    uint32_t lists[MB];
    load_lists(lists, visit);
    // A unit without slices takes an empty turn: the other consumer waits for it.
    int slice = 0, left = slices;
    do {
      const int rest = max(left - p.turn_slices, 0);  // after this turn
      const int other_steps =
          p.alternate || !turns ? 0 : steps_in(p, visit, 1 - c, slice, left - rest);
      if (c == 1) skip_stages(other_steps);
      begin_turn();
      if (!left) keep_together();
      for (; left > rest; --left) {
        multiply_slice(lists);
        if constexpr (Operand::kSplit) {
          if (++unsummed == p.sum_slices || left == 1) {
            unsummed = 0;
#pragma unroll
            for (int j = 0; j < MB; ++j) add_up(j);
          }
        }
        if (++slice == p.slices) {
          slice = 0;
          visit += kVisitWords;
          load_lists(lists, visit);  // after the last plane: of nothing that is used
        }
      }
      end_turn();
      if (c == 0) skip_stages(other_steps);
    } while (left);
#pragma unroll
    for (int j = 0; j < MB; ++j)
#pragma unroll
      for (int i = 0; i < N / 2; ++i) ptx::keep_after_wait(d[j][i]);
  }

  // Split operands: once for each band of the input; then the sums as numbers that are not scaled.
  __device__ __forceinline__ void accumulate_bands(const Unit& where, int job, const int* visit,
                                                   int slices) {
    const int row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
    const int* scales = row_scales(p, p.w) + row_place(p, where.conv_group, job, row);
    int scale[MB][2];
#pragma unroll
    for (int j = 0; j < MB; ++j) {
      scale[j][0] = __ldg(scales + j * kRowsPerBlock);
      scale[j][1] = __ldg(scales + j * kRowsPerBlock + 8);
    }
    const Bands<Operand::kSplit> bands(shared);
#pragma unroll 1
    for (int pass = 0; pass < bands.count(); ++pass) {
      counted = bands.unit(pass);
      accumulate(visit, slices);
    }
#pragma unroll
    for (int j = 0; j < MB; ++j)
#pragma unroll
      for (int i = 0; i < N / 2; ++i) {
        d[j][i] = unscaled(sum[j][i], scale[j][i / 2 % 2] + bands.scale(0));
      }
  }

  // Moves past a whole unit of the other consumer.
  __device__ __forceinline__ void skip_unit(int unit) {
    const int group = group_of(p, unit);
    skip_stages(p.job[group].steps);
    skip_slots(slices_of(p, group));
  }

  __device__ __forceinline__ void run() {
    const bool skips = p.alternate && !Operand::kSplit;  // every other unit
    const int step = skips ? 2 * gridDim.x : gridDim.x;
    for (int unit = blockIdx.x + skips * c * gridDim.x; unit < unit_count(p); unit += step) {
      if (skips && c == 1) skip_unit(unit - gridDim.x);
      const int group = group_of(p, unit);
      const Sm90Job& job = p.job[job_of(p, group, c)];
      const int* visit = shared.visits + job.visit * kVisitWords;
      clear();
      if constexpr (Operand::kSplit) {
        accumulate_bands(Unit(p, unit), job_of(p, group, c), visit, slices_of(p, group));
      } else {
        accumulate(visit, slices_of(p, group));
      }
      this->store(job, Unit(p, unit));
      if (skips && c == 0) skip_unit(unit + gridDim.x);
    }
  }
};

}  // namespace upconv
