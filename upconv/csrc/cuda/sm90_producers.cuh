// Hopper kernel: the thread that feeds both rings, and the loaders that turn boxes into tiles.
#pragma once

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
  const int units, stages;
  const uint32_t ring;
  int unit, stage = 0;
  uint32_t parity = 1;
  // Of this unit: slices that no turn has had yet, the next one's number in its plane, the plane.
  int slices = 0, slice = 0;
  const int* visit = nullptr;
  int turn = 0;  // whose turn comes next
  int left = 0;  // weight blocks of this turn
  // What each consumer needs next. Two pointers, not an array: that would lie in local memory.
  const uint4 *first = nullptr, *second = nullptr;

  __device__ __forceinline__ WeightFeed(const Sm90Params& p, const Shared& shared)
      : p(p),
        shared(shared),
        units(ptx::pinned(weight_units(p))),
        stages(ptx::pinned(p.stages)),
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
    ptx::barrier_arrive_expect(full, kStageBytes);
    const uint4* from = turn ? first : second;  // `turn` is one ahead
    ptx::bulk_copy(ring + stage * kStageBytes, from, kStageBytes, full);
    first += turn ? kStageBytes / 16 : 0;
    second += turn ? 0 : kStageBytes / 16;
    if (++stage == stages) stage = 0, parity ^= 1;
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
  const int units, blocks, chunks, bytes, chunk_bytes;  // blocks: of a plane; bytes: of a box
  int unit, block = 0, chunk = 0;
  uint32_t parity = 1;
  const int* visit = nullptr;
  int planes = 0;  // of the unit that are still to come, with this one
  int x = 0, y = 0, z = 0, image = 0;

  __device__ __forceinline__ BoxFeed(const Sm90Params& p, const Shared& shared,
                                     const CUtensorMap& map, int block_channels)
      : p(p),
        shared(shared),
        map(map),
        block_channels(block_channels),
        units(ptx::pinned(p.copy == kCopyBoxes ? unit_count(p) : 0)),
        blocks(ptx::pinned(p.slices * p.slice_blocks)),
        chunks(ptx::pinned(p.raw_chunks)),
        bytes(ptx::pinned(p.raw_w * p.raw_h * p.tile_o * p.raw_blocks * 16)),
        chunk_bytes(ptx::pinned(p.raw_bytes)),
        unit(blockIdx.x) {
    begin_unit();
  }
  __device__ __forceinline__ bool live() const { return unit < units; }

  // From `unit` on, the first one that reads anything.
  __device__ __forceinline__ void begin_unit() {
    for (; live(); unit += gridDim.x) {
      const Sm90Job& job = p.job[job_of(p, group_of(p, unit), 0)];
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
    ptx::barrier_arrive_expect(full, bytes);
    const int channel = block * block_channels;
    ptx::box_copy(shared.raw + chunk * chunk_bytes, map, x, y, z, channel, image, full);
    if (++chunk == chunks) chunk = 0, parity ^= 1;
    block += p.raw_blocks;
    if (block < blocks) return;
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
  BoxFeed boxes(p, shared, map, Operand::kBlockChannels);
  if (p.rings == 2) {
    OwnWeightFeed first(p, shared, 0), second(p, shared, 1);
    while (first.live() || second.live() || boxes.live()) {
      first.try_next();
      second.try_next();
      boxes.try_next();
    }
    return;
  }
  WeightFeed weights(p, shared);
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
  const uint32_t channel_step, block_step;  // of the box and of the tile, bytes
  const uint32_t tail_step;                 // from the head of a split number to its tail
  const int raw_blocks;
  // Every thread has as many places; those past the tile are read anywhere and not written, those
  // that pad it to 4 pixels are written and never used.
  int source[kMost];  // bytes into the box

  __device__ __forceinline__ static int places(const Sm90Params& p) {
    return (p.pixels + kLoaders * kWide - 1) / (kLoaders * kWide);
  }

  __device__ __forceinline__ BoxLoader(const Sm90Params& p, const Shared& shared)
      : p(p),
        shared(shared),
        channel_step(ptx::pinned<uint32_t>(p.raw_w * p.raw_h * sizeof(Element))),
        block_step(ptx::pinned(p.block_pitch * 16)),
        tail_step(Operand::kSplit ? ptx::pinned(p.slice_blocks * p.block_pitch * 16) : 0),
        raw_blocks(ptx::pinned(p.raw_blocks)) {
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
      const int pixel = (i * kLoaders + threadIdx.x) * kWide;
      const int column = pixel % p.pitch, row = pixel / p.pitch % p.rows;
      const int image = pixel / p.pitch / p.rows % p.tile_o;
      const int lane = pixel / p.pitch / p.rows / p.tile_o;
      const int box_row = p.flat ? 0 : row * p.tile_lanes + lane;
      const int box_column = p.flat ? row * p.pitch + column : column * p.in_step_x;
      const int at = ((image * p.raw_blocks * kE * p.raw_h + box_row) * p.raw_w + box_column) *
                     static_cast<int>(sizeof(Element));
      source[i] = lane < p.tile_lanes ? at : 0;
    }
  }

  // One pixel, or two of 16 bits, of every channel at one place of the box.
  __device__ __forceinline__ void read(uint32_t (&v)[kE], uint32_t from) const {
#pragma unroll
    for (int c = 0; c < kE; ++c, from += channel_step) {
      if constexpr (kStep) {
        unsigned short low, high;
        ptx::load_shared(low, from);
        ptx::load_shared(high, from + p.in_step_x * sizeof(Element));
        v[c] = low | static_cast<uint32_t>(high) << 16;
      } else {
        ptx::load_shared(v[c], from);
      }
    }
  }

  __device__ __forceinline__ void write(const uint32_t (&v)[kE], uint32_t block, int i,
                                        bool on) const {
    const uint32_t target = block + (i * kLoaders + threadIdx.x) * kWide * 16;
    if constexpr (kE == 4) {
      ptx::store_shared_if(on, target,
                           make_uint4(Operand::prepare_box(v[0]), Operand::prepare_box(v[1]),
                                      Operand::prepare_box(v[2]), Operand::prepare_box(v[3])));
      if constexpr (Operand::kSplit) {
        ptx::store_shared_if(on, target + tail_step,
                             make_uint4(Operand::tail(v[0]), Operand::tail(v[1]),
                                        Operand::tail(v[2]), Operand::tail(v[3])));
      }
    } else {
      // Two pixels: half of the lanes begin with the second one, so that 8 lanes hit all banks.
      const uint32_t odd = threadIdx.x / 4 % 2;
#pragma unroll
      for (uint32_t k = 0; k < 2; ++k) {
        const uint32_t pick = k ^ odd ? 0x7632 : 0x5410;
        ptx::store_shared_if(
            on, target + (k ^ odd) * 16,
            make_uint4(__byte_perm(v[0], v[1], pick), __byte_perm(v[2], v[3], pick),
                       __byte_perm(v[4], v[5], pick), __byte_perm(v[6], v[7], pick)));
      }
    }
  }

  // kBlocks channel blocks of a box, all kPlaces places, of which the last is written if `last`. As
  // many reads as registers allow are on their way together.
  template <int kBlocks, int kPlaces>
  __device__ __forceinline__ void place(uint32_t box, uint32_t target, bool last) const {
    constexpr int kRoom = (kStep ? 16 : 32) / kE / kBlocks;
    constexpr int kTogether = kPlaces < kRoom ? kPlaces : kRoom;
#pragma unroll
    for (int first = 0; first < kPlaces; first += kTogether) {
      uint32_t v[kBlocks][kTogether][kE];
#pragma unroll
      for (int b = 0; b < kBlocks; ++b)
#pragma unroll
        for (int i = first; i < first + kTogether && i < kPlaces; ++i) {
          read(v[b][i - first], box + b * kE * channel_step + source[i]);
        }
#pragma unroll
      for (int b = 0; b < kBlocks; ++b)
#pragma unroll
        for (int i = first; i < first + kTogether && i < kPlaces; ++i) {
          write(v[b][i - first], target + b * block_step, i, i + 1 < kPlaces || last);
        }
    }
  }

  // All channel blocks of a box, several at a time where a thread has few places.
  template <int kPlaces>
  __device__ __forceinline__ void place_box(uint32_t box, uint32_t target, bool last) const {
    constexpr int kBlocks = kStep || kPlaces > 2 ? 1 : kPlaces == 2 ? 2 : 4;
    int left = raw_blocks;
    for (; left >= kBlocks; left -= kBlocks) {
      place<kBlocks, kPlaces>(box, target, last);
      box += kBlocks * kE * channel_step;
      target += kBlocks * block_step;
    }
    for (; kBlocks > 1 && left > 0; --left) {
      place<1, kPlaces>(box, target, last);
      box += kE * channel_step;
      target += block_step;
    }
  }

  // The whole kernel's work, for a tile of which each thread has kPlaces places: a branch for each
  // place cost more than its reads.
  template <int kPlaces>
  __device__ __forceinline__ void run() const {
    int chunk = 0, slot = 0;
    uint32_t chunk_parity = 0, slot_parity = 1;
    const bool speaker = threadIdx.x % 32 == 0;
    const bool last = ((kPlaces - 1) * kLoaders + threadIdx.x) * kWide < p.pixels;
    const int units = ptx::pinned(unit_count(p)), slots = ptx::pinned(p.slots);
    const int chunks = ptx::pinned(p.raw_chunks), chunk_bytes = ptx::pinned(p.raw_bytes);
    const int boxes = ptx::pinned(p.slice_blocks / raw_blocks);
    for (int unit = blockIdx.x; unit < units; unit += gridDim.x) {
      const Unit where(p, unit);
      const Sm90Job& job = p.job[job_of(p, group_of(p, unit), 0)];
      const int* visit = shared.visits + job.visit * kVisitWords;
      for (int planes = job.visits; planes > 0; --planes, visit += kVisitWords) {
        const uint32_t phase = box_phase(box_column(p, where, visit), kE) * sizeof(Element);
        for (int slices = p.slices; slices > 0; --slices) {
          ptx::barrier_wait(shared.emptied + 8 * slot, slot_parity);
          uint32_t target = shared.slots + slot * slot_bytes(p);
          for (int box = boxes; box > 0; --box) {
            ptx::barrier_wait(shared.raw_full + 8 * chunk, chunk_parity);
            place_box<kPlaces>(shared.raw + chunk * chunk_bytes + phase, target, last);
            target += raw_blocks * block_step;
            __syncwarp();
            if (speaker) ptx::barrier_arrive(shared.raw_free + 8 * chunk);
            if (++chunk == chunks) chunk = 0, chunk_parity ^= 1;
          }
          ptx::fence_async_proxy();
          __syncwarp();
          if (speaker) ptx::barrier_arrive(shared.filled + 8 * slot);
          if (++slot == slots) slot = 0, slot_parity ^= 1;
        }
      }
    }
  }
};

template <typename Loader, int kPlaces = 1>
__device__ __forceinline__ void run_loader(const Sm90Params& p, const Loader& loader) {
  if (Loader::places(p) == kPlaces) {
    loader.template run<kPlaces>();
  } else if constexpr (kPlaces < Loader::kMost) {
    run_loader<Loader, kPlaces + 1>(p, loader);
  }
}

template <typename Operand>
__device__ __forceinline__ void load_boxes(const Sm90Params& p, const Shared& shared) {
  if constexpr (sizeof(typename Operand::Element) == 2) {
    if (p.in_step_x > 1) return run_loader(p, BoxLoader<Operand, true>(p, shared));
  }
  run_loader(p, BoxLoader<Operand, false>(p, shared));
}

}  // namespace upconv
