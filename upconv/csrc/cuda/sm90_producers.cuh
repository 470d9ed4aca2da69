// Hopper kernel: the thread that feeds both rings, and the loaders that turn boxes into tiles.
#pragma once

#include "sm90_gather.cuh"

namespace upconv {

// --- Feeder ----------------------------------------------------------------------------------

// The weight blocks of all units, in the order in which the consumers take their turns.
struct WeightFeed {
  const Sm90Params& p;
  const Shared& shared;
  int unit, stage = 0;
  uint32_t parity = 1;
  // Of this unit: slices that no turn has had yet, the next one's number in its plane, the plane.
  int slices = 0, slice = 0;
  const int* visit = nullptr;
  int turn = 0;            // whose turn comes next
  int left = 0;            // weight blocks of this turn
  const uint4* source[2];  // what each consumer needs next

  __device__ __forceinline__ WeightFeed(const Sm90Params& p, const Shared& shared)
      : p(p), shared(shared), unit(blockIdx.x) {
    begin_unit();
    find();
  }
  __device__ __forceinline__ bool live() const { return unit < unit_count(p); }

  __device__ __forceinline__ void begin_unit() {
    const int group = unit % p.job_groups;
    const int64_t first = static_cast<int64_t>(Unit(p, unit).conv_group) * p.weight_blocks;
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const Sm90Job& job = p.job[job_of(p, group, c)];
      source[c] = p.w + (first + job.weights) * (kStageBytes / 16);
    }
    slices = slices_of(p, group);
    slice = 0;
    visit = shared.visits + p.job[job_of(p, group, 0)].visit * kVisitWords;
  }

  // The next turn that has weights.
  __device__ __forceinline__ void find() {
    while (left == 0 && live()) {
      if (slices == 0) {
        unit += gridDim.x;
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
    const uint4*& from = turn ? source[0] : source[1];  // `turn` is one ahead
    ptx::barrier_arrive_expect(full, kStageBytes);
    ptx::bulk_copy(shared.weights + stage * kStageBytes, from, kStageBytes, full);
    from += kStageBytes / 16;
    if (++stage == p.stages) stage = 0, parity ^= 1;
    if (--left == 0) find();
  }
};

// First column of a unit's tile in the input, and how far a box must begin before it: boxes begin
// on 16 bytes, or the copy is an illegal instruction.
__device__ __forceinline__ int box_column(const Sm90Params& p, const Unit& where,
                                          const int* visit) {
  return p.flat ? where.y * p.in_w : where.x * p.in_step_x + visit[kVisitPlane + 2];
}
__device__ __forceinline__ int box_phase(int column, int block_channels) {
  return column & (block_channels - 1);  // a channel block is 16 bytes, and so are as many columns
}

// The input of all units as TMA boxes: a few channel blocks of the whole tile each, margins
// included. What lies outside the image or the group arrives as zeros.
struct BoxFeed {
  const Sm90Params& p;
  const Shared& shared;
  const CUtensorMap& map;
  const int block_channels;
  int unit, block = 0, chunk = 0;
  uint32_t parity = 1;
  const int* visit = nullptr;
  int planes = 0;  // of the unit that are still to come, with this one
  int x = 0, y = 0, z = 0, image = 0;

  __device__ __forceinline__ BoxFeed(const Sm90Params& p, const Shared& shared,
                                     const CUtensorMap& map, int block_channels)
      : p(p), shared(shared), map(map), block_channels(block_channels), unit(blockIdx.x) {
    if (p.copy != kCopyBoxes) unit = unit_count(p);
    begin_unit();
  }
  __device__ __forceinline__ bool live() const { return unit < unit_count(p); }

  // From `unit` on, the first one that reads anything.
  __device__ __forceinline__ void begin_unit() {
    for (; live(); unit += gridDim.x) {
      const Sm90Job& job = p.job[job_of(p, unit % p.job_groups, 0)];
      planes = job.visits;
      visit = shared.visits + job.visit * kVisitWords;
      if (planes) break;
    }
    if (live()) begin_plane();
  }

  __device__ __forceinline__ void begin_plane() {
    const Unit where(p, unit);
    x = box_column(p, where, visit);
    x -= box_phase(x, block_channels);
    y = p.flat ? 0 : where.y * p.lanes * p.in_step_y + visit[kVisitPlane + 1];
    z = where.z * p.in_step_z + visit[kVisitPlane];
    image = where.o * p.conv_groups + where.conv_group;
  }

  __device__ __forceinline__ void try_next() {
    if (!live() || !ptx::barrier_test(shared.raw_free + 8 * chunk, parity)) return;
    const uint32_t full = shared.raw_full + 8 * chunk;
    ptx::barrier_arrive_expect(full, p.raw_w * p.raw_h * p.tile_o * p.raw_blocks * 16);
    const int channel = block * block_channels;
    ptx::box_copy(shared.raw + chunk * p.raw_bytes, map, x, y, z, channel, image, full);
    if (++chunk == p.raw_chunks) chunk = 0, parity ^= 1;
    block += p.raw_blocks;
    if (block < p.slices * p.slice_blocks) return;
    block = 0;
    if (--planes) {
      visit += kVisitWords;
      begin_plane();
    } else {
      unit += gridDim.x;
      begin_unit();
    }
  }
};

// One thread starts every copy of weights and boxes as soon as there is room for it.
template <typename Operand>
__device__ __forceinline__ void feed(const Sm90Params& p, const Shared& shared,
                                     const CUtensorMap& map) {
  WeightFeed weights(p, shared);
  BoxFeed boxes(p, shared, map, Operand::kBlockChannels);
  while (weights.live() || boxes.live()) {
    weights.try_next();
    boxes.try_next();
  }
}

// --- Box loaders -----------------------------------------------------------------------------

// Turns boxes from [channel][row][column] into [pixel][channel], 16 bytes a pixel. Neighbouring
// lanes take neighbouring pixels: every read and every write is free of bank conflicts, but for the
// reads of every in_step_x-th column. kStep: columns have a step, so that two pixels of 16 bits do
// not lie together.
template <typename Operand, bool kStep>
struct BoxLoader {
  using Element = typename Operand::Element;
  static constexpr int kE = Operand::kBlockChannels;
  static constexpr int kWide = kE / 4;  // pixels of one 4-byte read: 1, or 2 of 16 bits
  static constexpr int kMost = kMaxItems * kItemPixels * kLoaders / 4 / kLoaders / kWide;
  const Sm90Params& p;
  const Shared& shared;
  const uint32_t channel_step;  // bytes
  int places;                   // of this thread
  int source[kMost];            // bytes into the box, -1: zeros

  __device__ __forceinline__ BoxLoader(const Sm90Params& p, const Shared& shared)
      : p(p), shared(shared), channel_step(p.raw_w * p.raw_h * sizeof(Element)), places(0) {
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
      const int pixel = (i * kLoaders + threadIdx.x) * kWide;
      if (pixel < p.pixels) places = i + 1;
      const int column = pixel % p.pitch, row = pixel / p.pitch % p.rows;
      const int image = pixel / p.pitch / p.rows % p.tile_o;
      const int lane = pixel / p.pitch / p.rows / p.tile_o;
      const int box_row = p.flat ? 0 : row * p.lanes + lane;
      const int box_column = p.flat ? row * p.pitch + column : column * p.in_step_x;
      const int at = ((image * p.raw_blocks * kE * p.raw_h + box_row) * p.raw_w + box_column) *
                     static_cast<int>(sizeof(Element));
      source[i] = lane < p.lanes ? at : -1;
    }
  }

  // One pixel, or two of 16 bits, of every channel at one place of the box.
  __device__ __forceinline__ void read(uint32_t (&v)[kE], uint32_t box, int at) const {
#pragma unroll
    for (int c = 0; c < kE; ++c) {
      v[c] = 0;
      if constexpr (kStep) {
        unsigned short low = 0, high = 0;
        const uint32_t from = box + at + c * channel_step;
        if (at >= 0) ptx::load_shared(low, from);
        if (at >= 0) ptx::load_shared(high, from + p.in_step_x * sizeof(Element));
        v[c] = low | static_cast<uint32_t>(high) << 16;
      } else {
        if (at >= 0) ptx::load_shared(v[c], box + at + c * channel_step);
      }
    }
  }

  __device__ __forceinline__ void write(const uint32_t (&v)[kE], uint32_t block, int i) const {
    const uint32_t target = block + (i * kLoaders + threadIdx.x) * kWide * 16;
    if constexpr (kE == 4) {
      ptx::store_shared(target, make_uint4(Operand::prepare(v[0]), Operand::prepare(v[1]),
                                           Operand::prepare(v[2]), Operand::prepare(v[3])));
    } else {
      // Two pixels: half of the lanes begin with the second one, so that 8 lanes hit all banks.
      const uint32_t odd = threadIdx.x / 4 % 2;
#pragma unroll
      for (uint32_t k = 0; k < 2; ++k) {
        const uint32_t pick = k ^ odd ? 0x7632 : 0x5410;
        ptx::store_shared(target + (k ^ odd) * 16,
                          make_uint4(__byte_perm(v[0], v[1], pick), __byte_perm(v[2], v[3], pick),
                                     __byte_perm(v[4], v[5], pick), __byte_perm(v[6], v[7], pick)));
      }
    }
  }

  // kBlocks channel blocks of a box, kPlaces places at a time: 4 in all, so that their latencies
  // overlap; 2 where a place takes two reads.
  template <int kBlocks, int kPlaces>
  __device__ __forceinline__ void place(uint32_t box, uint32_t target) const {
    static_assert(kBlocks * kPlaces == (kStep ? 2 : 4), "registers");
    uint32_t v[kBlocks][kPlaces][kE];
#pragma unroll
    for (int first = 0; first < kMost; first += kPlaces) {
      if (first >= places) break;
#pragma unroll
      for (int b = 0; b < kBlocks; ++b)
#pragma unroll
        for (int i = 0; i < kPlaces; ++i) {
          if (first + i < kMost && first + i < places)
            read(v[b][i], box + b * kE * channel_step, source[(first + i) % kMost]);
        }
#pragma unroll
      for (int b = 0; b < kBlocks; ++b)
#pragma unroll
        for (int i = 0; i < kPlaces; ++i) {
          if (first + i < kMost && first + i < places)
            write(v[b][i], target + b * p.block_pitch * 16, first + i);
        }
    }
  }

  // All channel blocks of a box; small tiles have too few places to keep a thread busy with one.
  __device__ __forceinline__ void place_box(uint32_t box, uint32_t target) const {
    const int blocks = kStep || places > 2 ? 1 : min(places == 1 ? 4 : 2, p.raw_blocks);
    for (int i = 0; i < p.raw_blocks; i += blocks) {
      if constexpr (kStep) {
        place<1, 2>(box, target);
      } else if (blocks == 1) {
        place<1, 4>(box, target);
      } else if (blocks == 2) {
        place<2, 2>(box, target);
      } else {
        place<4, 1>(box, target);
      }
      box += blocks * kE * channel_step;
      target += blocks * p.block_pitch * 16;
    }
  }

  __device__ __forceinline__ void run() const {
    int chunk = 0, slot = 0;
    uint32_t chunk_parity = 0, slot_parity = 1;
    const bool speaker = threadIdx.x % 32 == 0;
    for (int unit = blockIdx.x; unit < unit_count(p); unit += gridDim.x) {
      const Unit where(p, unit);
      const Sm90Job& job = p.job[job_of(p, unit % p.job_groups, 0)];
      const int* visit = shared.visits + job.visit * kVisitWords;
      for (int planes = job.visits; planes > 0; --planes, visit += kVisitWords) {
        const uint32_t phase = box_phase(box_column(p, where, visit), kE) * sizeof(Element);
        for (int slices = p.slices; slices > 0; --slices) {
          ptx::barrier_wait(shared.emptied + 8 * slot, slot_parity);
          uint32_t target = shared.slots + slot * slot_bytes(p);
          for (int block = 0; block < p.slice_blocks; block += p.raw_blocks) {
            ptx::barrier_wait(shared.raw_full + 8 * chunk, chunk_parity);
            place_box(shared.raw + chunk * p.raw_bytes + phase, target);
            target += p.raw_blocks * p.block_pitch * 16;
            __syncwarp();
            if (speaker) ptx::barrier_arrive(shared.raw_free + 8 * chunk);
            if (++chunk == p.raw_chunks) chunk = 0, chunk_parity ^= 1;
          }
          ptx::fence_async_proxy();
          __syncwarp();
          if (speaker) ptx::barrier_arrive(shared.filled + 8 * slot);
          if (++slot == p.slots) slot = 0, slot_parity ^= 1;
        }
      }
    }
  }
};

template <typename Operand>
__device__ __forceinline__ void load_boxes(const Sm90Params& p, const Shared& shared) {
  if constexpr (sizeof(typename Operand::Element) == 2) {
    if (p.in_step_x > 1) return BoxLoader<Operand, true>(p, shared).run();
  }
  BoxLoader<Operand, false>(p, shared).run();
}

}  // namespace upconv
