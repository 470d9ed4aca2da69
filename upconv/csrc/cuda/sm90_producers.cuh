// Hopper kernel: the thread that feeds both rings, and the loaders that turn boxes into tiles.
#pragma once

#include "sm90_gather.cuh"

namespace upconv {

// --- Feeder ----------------------------------------------------------------------------------

// The weight blocks of all units, in the order in which the consumers take their turns.
struct WeightFeed {
  const Sm90Params& p;
  const Shared& shared;
  int unit, turn = 0, left = 0, stage = 0;
  uint32_t parity = 1;
  int steps[2];            // of each consumer in a slice of this unit
  const uint4* source[2];  // what it needs next

  __device__ __forceinline__ WeightFeed(const Sm90Params& p, const Shared& shared)
      : p(p), shared(shared), unit(blockIdx.x) {
    begin_unit();
    find();
  }
  __device__ __forceinline__ bool live() const { return unit < unit_count(p); }

  __device__ __forceinline__ void begin_unit() {
    const int group = unit % p.groups;
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const Sm90Job& job = p.job[job_of(p, group, c)];
      steps[c] = p.alternate && c == 1 ? 0 : job.steps;
      source[c] = p.w + static_cast<int64_t>(job.weights) * (kStageBytes / 16);
    }
  }

  // The next turn that has weights.
  __device__ __forceinline__ void find() {
    while (left == 0 && live()) {
      const int slices = min(p.turn_slices, p.slices - turn / 2 * p.turn_slices);
      if (slices <= 0) {
        turn = 0;
        unit += gridDim.x;
        begin_unit();
      } else {
        left = slices * (turn % 2 ? steps[1] : steps[0]);
        ++turn;
      }
    }
  }

  __device__ __forceinline__ void try_next() {
    if (!live() || !ptx::barrier_test(shared.spent + 8 * stage, parity)) return;
    const uint32_t full = shared.weights_full + 8 * stage;
    const uint4*& from = turn % 2 ? source[0] : source[1];  // `turn` is one ahead
    ptx::barrier_arrive_expect(full, kStageBytes);
    ptx::bulk_copy(shared.weights + stage * kStageBytes, from, kStageBytes, full);
    from += kStageBytes / 16;
    if (++stage == p.stages) stage = 0, parity ^= 1;
    if (--left == 0) find();
  }
};

// First column of a unit's tile in the input, and how far a box must begin before it: boxes begin
// on 16 bytes, or the copy is an illegal instruction.
__device__ __forceinline__ int box_column(const Sm90Params& p, const Unit& where) {
  return where.x * p.in_step_x + p.shift_x;
}
__device__ __forceinline__ int box_phase(int column, int block_channels) {
  return column & (block_channels - 1);  // a channel block is 16 bytes, and so are as many columns
}

// The input of all units as TMA boxes: a few channel blocks of the whole tile each, margins
// included. What lies outside the image arrives as zeros.
struct BoxFeed {
  const Sm90Params& p;
  const Shared& shared;
  const CUtensorMap& map;
  const int block_channels;
  int unit, block = 0, chunk = 0;
  uint32_t parity = 1;
  int x = 0, y = 0, o = 0;

  __device__ __forceinline__ BoxFeed(const Sm90Params& p, const Shared& shared,
                                     const CUtensorMap& map, int block_channels)
      : p(p), shared(shared), map(map), block_channels(block_channels), unit(blockIdx.x) {
    if (p.copy != kCopyBoxes) unit = unit_count(p);
    find();
  }
  __device__ __forceinline__ bool live() const { return unit < unit_count(p); }

  __device__ __forceinline__ void find() {
    while (live() && slices_of(p, unit % p.groups) == 0) unit += gridDim.x;
    if (!live()) return;
    const Unit where(p, unit);
    x = box_column(p, where);
    x -= box_phase(x, block_channels);
    y = where.y * p.in_step_y + p.shift_y;
    o = where.o;
  }

  __device__ __forceinline__ void try_next() {
    if (!live() || !ptx::barrier_test(shared.raw_free + 8 * chunk, parity)) return;
    const uint32_t full = shared.raw_full + 8 * chunk;
    ptx::barrier_arrive_expect(full, p.raw_w * p.raw_h * p.tile_o * p.raw_blocks * 16);
    ptx::box_copy(shared.raw + chunk * p.raw_bytes, map, x, y, block * block_channels, o, full);
    if (++chunk == p.raw_chunks) chunk = 0, parity ^= 1;
    block += p.raw_blocks;
    if (block < p.slices * p.slice_blocks) return;
    block = 0;
    unit += gridDim.x;
    find();
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
// lanes take neighbouring pixels: every read and every write is free of bank conflicts.
template <typename Operand>
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
      const int lane = pixel / p.pitch / p.rows / p.tile_o;  // of in_step_y rows
      const int at =
          ((image * p.raw_blocks * kE * p.raw_h + row * p.in_step_y + lane) * p.raw_w + column) *
          static_cast<int>(sizeof(Element));
      source[i] = lane < p.in_step_y ? at : -1;
    }
  }

  // 4 bytes of every channel at one place of the box.
  __device__ __forceinline__ void read(uint32_t (&v)[kE], uint32_t box, int at) const {
#pragma unroll
    for (int c = 0; c < kE; ++c) {
      v[c] = 0;
      if (at >= 0) ptx::load_shared(v[c], box + at + c * channel_step);
    }
  }

  __device__ __forceinline__ void write(const uint32_t (&v)[kE], uint32_t plane, int i) const {
    const uint32_t target = plane + (i * kLoaders + threadIdx.x) * kWide * 16;
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

  // kPlanes channel blocks of a box, kPlaces places at a time: 4 in all, so that their latencies
  // overlap.
  template <int kPlanes, int kPlaces>
  __device__ __forceinline__ void place(uint32_t box, uint32_t plane) const {
    static_assert(kPlanes * kPlaces == 4, "registers");
    uint32_t v[kPlanes][kPlaces][kE];
#pragma unroll
    for (int first = 0; first < kMost; first += kPlaces) {
      if (first >= places) break;
#pragma unroll
      for (int b = 0; b < kPlanes; ++b)
#pragma unroll
        for (int i = 0; i < kPlaces; ++i) {
          if (first + i < kMost && first + i < places)
            read(v[b][i], box + b * kE * channel_step, source[(first + i) % kMost]);
        }
#pragma unroll
      for (int b = 0; b < kPlanes; ++b)
#pragma unroll
        for (int i = 0; i < kPlaces; ++i) {
          if (first + i < kMost && first + i < places)
            write(v[b][i], plane + b * p.plane * 16, first + i);
        }
    }
  }

  // All channel blocks of a box; small tiles have too few places to keep a thread busy with one.
  __device__ __forceinline__ void place_box(uint32_t box, uint32_t plane) const {
    const int planes = places > 2 ? 1 : min(places == 1 ? 4 : 2, p.raw_blocks);
    for (int i = 0; i < p.raw_blocks; i += planes) {
      if (planes == 1) {
        place<1, 4>(box, plane);
      } else if (planes == 2) {
        place<2, 2>(box, plane);
      } else {
        place<4, 1>(box, plane);
      }
      box += planes * kE * channel_step;
      plane += planes * p.plane * 16;
    }
  }

  __device__ __forceinline__ void run() const {
    int chunk = 0, slot = 0;
    uint32_t chunk_parity = 0, slot_parity = 1;
    const bool speaker = threadIdx.x % 32 == 0;
    for (int unit = blockIdx.x; unit < unit_count(p); unit += gridDim.x) {
      const uint32_t phase = box_phase(box_column(p, Unit(p, unit)), kE) * sizeof(Element);
      for (int slices = slices_of(p, unit % p.groups); slices > 0; --slices) {
        ptx::barrier_wait(shared.emptied + 8 * slot, slot_parity);
        uint32_t plane = shared.slots + slot * slot_bytes(p);
        for (int block = 0; block < p.slice_blocks; block += p.raw_blocks) {
          ptx::barrier_wait(shared.raw_full + 8 * chunk, chunk_parity);
          place_box(shared.raw + chunk * p.raw_bytes + phase, plane);
          plane += p.raw_blocks * p.plane * 16;
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
};

}  // namespace upconv
