// Dense transposed convolution on Hopper, straight on NCHW (or channels_last), no scratch memory.
//
// The idea. A tile of the input lies in shared memory as [16-byte channel block][pixel][16 bytes].
// WGMMA reads it as a K-major operand; moving the descriptor's start by 16 bytes moves the operand
// by one pixel, so every tap of every phase is the same tile at another start address. Rows of the
// tile follow each other with their margins, so that one instruction spans several rows, or several
// small images; the columns that fall on margins are computed and not stored.
//
// Roles, 12 warps:
//   loaders    warps 0-2   fill a ring of channel slices of the tile from global memory
//   weights    warp 3      one thread a ring streams packed weights with bulk copies
//   consumer 0 warps 4-7   64 x N accumulators (times MB), then its own stores
//   consumer 1 warps 8-11  the same one slice behind: while one of them stores, the other has the
//                          tensor cores to itself. The two share the tile and differ in weights
//                          (other channels or phases), or share weights and split the pixels.
// Pipelines (mbarriers, in order of travel of an input slot and of a weight stage):
//   filled[slot]   96 loader threads arrive -> consumer 0 may read
//   passed[slot]   consumer 0 arrives once  -> consumer 1 may read
//   emptied[slot]  consumer 1 arrives once  -> loaders may fill again
//   weights_full[ring][stage]  bulk copy completes   -> the ring's consumer may read
//   spent[ring][stage]         consumer arrives once -> the copy of a later step may start
// Consumers that split the pixels read one common ring of weights, so neither can be a whole slice
// behind: both read a slot when it is filled, and both arrive on emptied and spent.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "ptx.cuh"
#include "sm90_params.h"
#include "wgmma.cuh"

namespace upconv {

// --- Configuration ---------------------------------------------------------------------------

struct Tf32 {
  using Element = float;
  static constexpr int kBlockChannels = 4;
  static __device__ __forceinline__ uint32_t prepare(uint32_t bits) { return ptx::round_to_tf32(bits); }
  static __device__ __forceinline__ float to_float(Element v) { return v; }
  static __device__ __forceinline__ Element from_float(float v) { return v; }
};
struct Bf16 {
  using Element = __nv_bfloat16;
  static constexpr int kBlockChannels = 8;
  static __device__ __forceinline__ uint32_t prepare(uint32_t bits) { return bits; }
  static __device__ __forceinline__ float to_float(Element v) { return __bfloat162float(v); }
  static __device__ __forceinline__ Element from_float(float v) { return __float2bfloat16(v); }
};
struct Fp16 {
  using Element = __half;
  static constexpr int kBlockChannels = 8;
  static __device__ __forceinline__ uint32_t prepare(uint32_t bits) { return bits; }
  static __device__ __forceinline__ float to_float(Element v) { return __half2float(v); }
  static __device__ __forceinline__ Element from_float(float v) { return __float2half_rn(v); }
};

constexpr int kLoaders = 96;
constexpr int kThreads = 128 + 256;
constexpr int kRowsPerBlock = 64;  // output rows of one WGMMA: channels, or folds x channels
constexpr int kStageBytes = kStepBytes;
constexpr int kMaxSlots = 16;
constexpr int kMaxStages = 16;
constexpr int kStagingBytes = 8 * 544;  // of one warp: 8 rows of 512 bytes and padding
constexpr int kBarrierBytes = 1024;
constexpr int kColumnBytes = 2 * 256 * 4;  // where each accumulator column lies in the tile

constexpr int kInFlight = 6;    // items that each loader thread has on their way
constexpr int kItemPixels = 4;  // an item is 4 neighbouring pixels of one channel block
constexpr int kItemBytes = 64;
constexpr int kRawBytes = kInFlight * kItemBytes * kLoaders;
constexpr int kMaxItems = 8;  // items of one thread in a pass over the tile
constexpr int kOffsetBytes = 2 * kMaxItems * kLoaders * 4;
constexpr int kPairBytes = kMaxPairs * 4;

// Shared memory: barriers, column tables, 8 staging slices (one a consumer warp), the
// loaders' raw ring, weight rings, input ring.
// Consumers that split the pixels share one ring of weights.
__host__ __device__ inline int weight_rings(const Sm90Params& p) { return p.split_pixels ? 1 : 2; }
__host__ __device__ inline int slot_bytes(const Sm90Params& p) {
  return p.slice_blocks * p.plane * 16;
}
__host__ __device__ inline int shared_bytes(const Sm90Params& p) {
  // 4 KB of slack: operands of columns that are not stored may reach past the last plane.
  return kBarrierBytes + kColumnBytes + kOffsetBytes + kPairBytes + 8 * kStagingBytes + kRawBytes + weight_rings(p) * p.stages * kStageBytes +
         p.slots * slot_bytes(p) + 4096;
}

struct Shared {
  uint32_t filled, passed, emptied, spent, weights_full;  // barrier arrays
  int* columns;
  int* offsets;
  int* pairs;
  unsigned char* staging;
  uint32_t raw, weights, slots;

  __device__ __forceinline__ Shared(const Sm90Params& p, unsigned char* memory) {
    const uint32_t base = ptx::shared_address(memory);
    filled = base;
    passed = filled + 8 * kMaxSlots;
    emptied = passed + 8 * kMaxSlots;
    spent = emptied + 8 * kMaxSlots;
    weights_full = spent + 2 * 8 * kMaxStages;
    columns = reinterpret_cast<int*>(memory + kBarrierBytes);
    offsets = columns + kColumnBytes / 4;
    pairs = offsets + kOffsetBytes / 4;
    staging = memory + kBarrierBytes + kColumnBytes + kOffsetBytes + kPairBytes;
    raw = base + kBarrierBytes + kColumnBytes + kOffsetBytes + kPairBytes + 8 * kStagingBytes;
    weights = raw + kRawBytes;
    slots = weights + weight_rings(p) * p.stages * kStageBytes;
  }
};
static_assert(3 * 8 * kMaxSlots + 4 * 8 * kMaxStages <= kBarrierBytes, "barriers overrun");

// A unit of work: one tile, one job group. Units of the same tile follow each other, so that their
// input comes from L2.
struct Unit {
  int o, y, x;  // first image, q row, q column
  int group;

  __device__ __forceinline__ Unit(const Sm90Params& p, int index) {
    group = index % p.groups;
    int tile = index / p.groups;
    x = tile % p.tiles_x * p.tile_w;
    tile /= p.tiles_x;
    y = tile % p.tiles_y * p.tile_h;
    o = tile / p.tiles_y * p.tile_o;
  }
};

__device__ __forceinline__ int unit_count(const Sm90Params& p) {
  return p.tiles_o * p.tiles_y * p.tiles_x * p.groups;
}

// Index of the job of consumer `c`; the same for both when they split the pixels.
__device__ __forceinline__ int job_of(const Sm90Params& p, int group, int c) {
  return p.split_pixels ? group : 2 * group + c;
}

// Slices that the unit needs: none when no phase of it has a tap.
__device__ __forceinline__ int slices_of(const Sm90Params& p, int group) {
  const int steps = p.job[job_of(p, group, 0)].steps + p.job[job_of(p, group, 1)].steps;
  return steps ? p.slices : 0;
}

// --- Loaders ---------------------------------------------------------------------------------

// An item is 4 neighbouring pixels of one channel block: 64 bytes. Each loader thread copies its
// items asynchronously into a ring of its own, then turns them from [channel][pixel] into
// [pixel][channel] on the way to the slot: 36 KB in flight for each multiprocessor, and no register
// waits for memory. Plain loads into 64 registers were 1.4x slower on kb57: a wait for the oldest
// of them waits for all.
struct Item {
  uint32_t v[16];
};

// Where a thread's next item lies in the tile; moves in jumps of a fixed number of items, with no
// division after the first.
struct Walker {
  int quad, row, image, plane;
  int jump_quad, jump_row;

  __device__ __forceinline__ Walker(const Sm90Params& p, int start, int jump) {
    const int quads = p.pitch / kItemPixels;
    plane = 0;
    image = 0;
    row = start / quads;
    quad = start - row * quads;
    jump_row = jump / quads;
    jump_quad = jump - jump_row * quads;
    wrap(p);
  }
  __device__ __forceinline__ void wrap(const Sm90Params& p) {
    while (row >= p.rows) {
      row -= p.rows;
      if (++image == p.tile_o) image = 0, ++plane;
    }
  }
  __device__ __forceinline__ void advance(const Sm90Params& p) {
    quad += jump_quad;
    row += jump_row;
    if (quad * kItemPixels >= p.pitch) quad -= p.pitch / kItemPixels, ++row;
    wrap(p);
  }
};

template <typename Operand>
struct Loader {
  using Element = typename Operand::Element;
  static constexpr int kE = Operand::kBlockChannels;
  static constexpr int kVector = kItemBytes / kE;  // bytes of one channel of an item: 16 or 8
  static constexpr int kOutside = -(1 << 30);      // offset of an item outside the image
  const Sm90Params& p;
  const Shared& shared;
  // 4 channel blocks and 32 items side by side: a warp then reads 8 neighbouring items of a channel
  // and its 16-byte stores hit every bank once. The other blocks of the slice come in later passes.
  const int lane_blocks, lane_block, lane_item, jump, pass_items;
  const uint32_t ring;           // this thread's part of the raw ring
  const int64_t channel_step;    // elements from one channel to the next
  int* const offsets;            // this thread's items: where they lie, and their first column
  static constexpr int kColumns = kMaxItems * kLoaders;  // from an offset to its column
  // What is copied next.
  int unit, slice = 0, slices = 0, pass = 0, item = 0;
  const Element* source = nullptr;  // first channel of the pass
  int channels = 0;                 // that exist from there on

  __device__ __forceinline__ Loader(const Sm90Params& p, const Shared& shared)
      : p(p),
        shared(shared),
        lane_blocks(min(p.slice_blocks, 4)),
        lane_block(threadIdx.x % lane_blocks),
        lane_item(threadIdx.x / lane_blocks),
        jump(kLoaders / lane_blocks),
        pass_items((p.pixels / kItemPixels + jump - 1) / jump),
        ring(shared.raw + threadIdx.x * kVector),
        channel_step(p.channels_last ? 1 : static_cast<int64_t>(p.in_h) * p.in_w),
        offsets(shared.offsets + threadIdx.x),
        unit(static_cast<int>(blockIdx.x) - static_cast<int>(gridDim.x)) {
    next_unit();
  }

  __device__ __forceinline__ bool live() const { return unit < unit_count(p); }

  // Finds the next unit that reads anything, and where this thread's items of it lie: once for all
  // slices.
  __device__ __forceinline__ void next_unit() {
    do {
      unit += gridDim.x;
      if (!live()) return;
      slices = slices_of(p, unit % p.groups);
    } while (slices == 0);
    const Unit where(p, unit);
    Walker walker(p, lane_item, jump);
    for (int i = 0; i < pass_items; ++i) {
      const int lane_y = walker.plane / p.in_step_x, lane_x = walker.plane % p.in_step_x;
      const int image = walker.image;
      const int iy = (where.y + walker.row) * p.in_step_y + lane_y + p.shift_y;
      const int ix = (where.x + walker.quad * kItemPixels) * p.in_step_x + lane_x + p.shift_x;
      const bool row_inside = lane_y < p.in_step_y && where.o + image < p.batch &&
                              static_cast<unsigned>(iy) < p.in_h;
      // Columns are checked where an item can hang over the edge; else all 4 are in or out.
      const bool whole = p.copy == 0 && !p.channels_last;
      const bool inside = row_inside && (!whole || static_cast<unsigned>(ix) < p.in_w);
      const int images_above = p.channels_last ? image : image * p.in_channels;
      offsets[i * kLoaders] = inside ? (images_above * p.in_h + iy) * p.in_w + ix : kOutside;
      offsets[i * kLoaders + kColumns] = inside ? ix : p.in_w;
      walker.advance(p);
    }
    slice = 0;
    const int64_t area = static_cast<int64_t>(p.in_h) * p.in_w;
    source = static_cast<const Element*>(p.x) + where.o * area * p.in_channels +
             lane_block * kE * channel_step;
    channels = p.in_channels - lane_block * kE;
  }

  // Shared address of vector `i` of a ring entry: a channel, or a pixel when channels are last.
  __device__ __forceinline__ uint32_t raw(int entry, int i) const {
    return ring + (entry * kE + i) * (kLoaders * kVector);
  }
  __device__ __forceinline__ uint32_t raw_pixel(int entry, int i) const {
    return shared.raw + ((entry * kItemPixels + i) * kLoaders + threadIdx.x) * 16;
  }

  // Starts the copies of the next item.
  __device__ __forceinline__ void fetch(int entry) {
    const int offset = offsets[item * kLoaders];
    if (p.channels_last) {
      fetch_channels_last(entry, offset);
    } else if (p.copy == 0) {
      const Element* from = source + offset;
      const int bytes = offset == kOutside ? 0 : kVector;
#pragma unroll
      for (int c = 0; c < kE; ++c) {
        ptx::copy_async<kVector>(raw(entry, c), from, c < channels ? bytes : 0);
        from += channel_step;
      }
    } else {
      fetch_edges(entry, offset);
    }
    if (++item < pass_items) return;
    item = 0;
    source += lane_blocks * kE * channel_step;
    channels -= lane_blocks * kE;
    if (++pass * lane_blocks < p.slice_blocks) return;
    pass = 0;
    if (++slice == slices) next_unit();
  }

  // Rows that do not start on whole vectors: 4 bytes at a time, or single elements where a 16-bit
  // row has an odd length. Every column is checked by itself.
  __device__ __forceinline__ void fetch_edges(int entry, int offset) {
    const int column = offsets[item * kLoaders + kColumns];
    const Element* from = source + offset;
    constexpr int kStep = 4 / sizeof(Element);
#pragma unroll
    for (int c = 0; c < kE; ++c) {
#pragma unroll
      for (int i = 0; i < kItemPixels; i += kStep) {
        const int first = column + i * p.in_step_x;
        const Element* at = from + i * p.in_step_x;
        const uint32_t target = raw(entry, c) + i * sizeof(Element);
        if (kStep == 1 || p.copy == 1) {
          const bool on = c < channels && static_cast<unsigned>(first) < p.in_w;
          ptx::copy_async<4>(target, at, on ? 4 : 0);
        } else {
          uint32_t v = 0;
#pragma unroll
          for (int k = 0; k < kStep; ++k) {
            const bool on = c < channels && static_cast<unsigned>(first + k * p.in_step_x) < p.in_w;
            const auto* half = reinterpret_cast<const unsigned short*>(at + k * p.in_step_x);
            if (on) v |= static_cast<uint32_t>(__ldg(half)) << (16 * k);
          }
          ptx::store_shared(target, v);
        }
      }
      from += channel_step;
    }
  }

  __device__ __forceinline__ void fetch_channels_last(int entry, int offset) {
    const int column = offsets[item * kLoaders + kColumns];
    const Element* from = source + static_cast<int64_t>(offset) * p.in_channels;
#pragma unroll
    for (int i = 0; i < kItemPixels; ++i) {
      const bool on = 0 < channels && static_cast<unsigned>(column + i * p.in_step_x) < p.in_w;
      ptx::copy_async<16>(raw_pixel(entry, i), from, on ? 16 : 0);
      from += p.in_step_x * p.in_channels;
    }
  }

  // An item that has arrived, in registers, as the global memory has it.
  __device__ __forceinline__ void read(int entry, Item& to) const {
    if (p.channels_last || kE == 4) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint4 v = ptx::load_shared4(p.channels_last ? raw_pixel(entry, i) : raw(entry, i));
        to.v[4 * i] = v.x, to.v[4 * i + 1] = v.y, to.v[4 * i + 2] = v.z, to.v[4 * i + 3] = v.w;
      }
    } else {
#pragma unroll
      for (int c = 0; c < kE; ++c) {
        const uint2 v = ptx::load_shared2(raw(entry, c));
        to.v[2 * c % 16] = v.x, to.v[(2 * c + 1) % 16] = v.y;
      }
    }
  }

  // Puts an item into the slot, as 4 pixels of 16 bytes.
  __device__ __forceinline__ void place(const Item& from, uint32_t target) const {
#pragma unroll
    for (int i = 0; i < kItemPixels; ++i) {
      uint32_t word[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        if (p.channels_last) {
          word[k] = from.v[4 * i + k];
        } else if constexpr (kE == 4) {
          word[k] = from.v[4 * k + i];
        } else {  // channels 2k and 2k + 1 of pixel i
          word[k] = __byte_perm(from.v[4 * k + i / 2], from.v[4 * k + 2 + i / 2],
                                i % 2 ? 0x7632 : 0x5410);
        }
      }
      ptx::store_shared(target + i * 16,
                        make_uint4(Operand::prepare(word[0]), Operand::prepare(word[1]),
                                   Operand::prepare(word[2]), Operand::prepare(word[3])));
    }
  }
};

// Where the next item goes: follows the loader's order, kInFlight items behind.
template <typename Operand>
struct Placer {
  const Loader<Operand>& loader;
  int slot = 0, item = 0, pass = 0;
  uint32_t parity = 1;

  __device__ __forceinline__ void put(const Item& from) {
    const Sm90Params& p = loader.p;
    const Shared& shared = loader.shared;
    if (item == 0 && pass == 0) ptx::barrier_wait(shared.emptied + 8 * slot, parity);
    const int pixel = (loader.lane_item + item * loader.jump) * kItemPixels;
    const int block = pass * loader.lane_blocks + loader.lane_block;
    if (pixel < p.pixels) {
      loader.place(from, shared.slots + slot * slot_bytes(p) + (block * p.plane + pixel) * 16);
    }
    if (++item < loader.pass_items) return;
    item = 0;
    if (++pass * loader.lane_blocks < p.slice_blocks) return;
    pass = 0;
    ptx::fence_async_proxy();
    ptx::barrier_arrive(shared.filled + 8 * slot);
    if (++slot == p.slots) slot = 0, parity ^= 1;
  }
};

template <typename Operand>
__device__ __forceinline__ void load_tiles(const Sm90Params& p, const Shared& shared) {
  Loader<Operand> loader(p, shared);
  Placer<Operand> placer{loader};
  int next = 0, oldest = 0, waiting = 0;
  while (true) {
    while (waiting < kInFlight && loader.live()) {
      loader.fetch(next);
      ptx::copy_async_commit();
      next = next + 1 == kInFlight ? 0 : next + 1;
      ++waiting;
    }
    if (waiting == 0) return;
    // Two items at a time, so that their shared-memory latencies overlap.
    if (waiting == kInFlight) {
      ptx::copy_async_wait<kInFlight - 2>();
    } else {
      ptx::copy_async_wait<0>();
    }
    const int second = oldest + 1 == kInFlight ? 0 : oldest + 1;
    Item one, two;
    loader.read(oldest, one);
    loader.read(second, two);
    placer.put(one);
    oldest = second;
    if (--waiting == 0) continue;
    placer.put(two);
    oldest = oldest + 1 == kInFlight ? 0 : oldest + 1;
    --waiting;
  }
}

// --- Weights ---------------------------------------------------------------------------------

// One thread a ring: the weight blocks that its consumer needs, in order, over all units. Threads
// of the same warp that serve two rings wait independently.
__device__ __forceinline__ void stream_weights(const Sm90Params& p, const Shared& shared) {
  const int ring = threadIdx.x % 32;
  if (ring >= weight_rings(p)) return;
  const uint32_t memory = shared.weights + ring * p.stages * kStageBytes;
  const uint32_t full = shared.weights_full + ring * 8 * kMaxStages;
  const uint32_t spent = shared.spent + ring * 8 * kMaxStages;
  int stage = 0;
  uint32_t parity = 1;
  for (int unit = blockIdx.x; unit < unit_count(p); unit += gridDim.x) {
    const Sm90Job& job = p.job[job_of(p, unit % p.groups, ring)];
    const uint4* source = p.w + static_cast<int64_t>(job.weights) * (kStageBytes / 16);
    for (int left = job.steps * p.slices; left > 0; --left) {
      ptx::barrier_wait(spent + 8 * stage, parity);
      ptx::barrier_arrive_expect(full + 8 * stage, kStageBytes);
      ptx::bulk_copy(memory + stage * kStageBytes, source, kStageBytes, full + 8 * stage);
      source += kStageBytes / 16;
      if (++stage == p.stages) stage = 0, parity ^= 1;
    }
  }
}

// --- Consumers: main loop --------------------------------------------------------------------

// Shared-memory operand without swizzle: 8 rows of 16 bytes make a core matrix; `k_step` is the
// distance of the two core matrices along K, 128 bytes the distance along rows. All in 16 bytes;
// moving the operand adds to the low word, which never carries.
__device__ __forceinline__ uint32_t descriptor_low(uint32_t address, uint32_t k_step) {
  return (address >> 4) | (k_step << 16);
}
__device__ __forceinline__ uint64_t descriptor(uint32_t low) {
  return static_cast<uint64_t>(128 >> 4) << 32 | low;
}

template <int kBytes>
struct VectorOf;
template <>
struct VectorOf<2> { using Type = unsigned short; };
template <>
struct VectorOf<4> { using Type = uint32_t; };
template <>
struct VectorOf<8> { using Type = uint2; };
template <>
struct VectorOf<16> { using Type = uint4; };

// One warpgroup: MB blocks of 64 rows by N pixels.
template <typename Operand, int N, int MB>
struct Consumer {
  using Element = typename Operand::Element;
  // Staging of the epilogue, in elements. Contiguous: rows of 512 bytes, padded so that the 8 rows
  // fall into different banks. channels_last: 16 channels a pixel, padded likewise.
  static constexpr int kChunk = 512 / sizeof(Element);
  static constexpr int kPitch = kChunk + 8;
  static constexpr int kPixels = 32, kPixelPitch = 16 + 16 / sizeof(Element);
  static_assert(8 * kPitch * sizeof(Element) <= kStagingBytes, "rows overrun the staging slice");
  static_assert(kPixels * kPixelPitch * sizeof(Element) <= kStagingBytes, "pixels overrun");
  const Sm90Params& p;
  const Shared& shared;
  const int c;
  const uint32_t weights, weights_full, spent;
  const bool issuer;  // the one thread of the warpgroup that arrives on barriers
  float d[MB][N / 2];
  int stage = 0, slot = 0;
  uint32_t stage_parity = 0, slot_parity = 0;
  struct Step {
    int stage = -1, slot = -1;
  };
  Step older, newer;  // steps in flight

  __device__ __forceinline__ Consumer(const Sm90Params& p, const Shared& shared, int c)
      : p(p),
        shared(shared),
        c(c),
        weights(shared.weights + ring(p, c) * p.stages * kStageBytes),
        weights_full(shared.weights_full + ring(p, c) * 8 * kMaxStages),
        spent(shared.spent + ring(p, c) * 8 * kMaxStages),
        issuer(threadIdx.x % 128 == 0) {}

  __device__ static __forceinline__ int ring(const Sm90Params& p, int c) {
    return p.split_pixels ? 0 : c;
  }

  // Gives back what one retired step has read: its weight stage, and its slot if it was the last
  // step to read it.
  __device__ __forceinline__ void retire(const Step& step) {
    if (issuer) {
      if (step.stage >= 0) ptx::barrier_arrive(spent + 8 * step.stage);
      if (step.slot >= 0) {
        const bool hand_on = c == 0 && !p.split_pixels;
        ptx::barrier_arrive((hand_on ? shared.passed : shared.emptied) + 8 * step.slot);
      }
    }
    __syncwarp();
  }

  // Waits for everything in flight and gives it back.
  __device__ __forceinline__ void drain() {
    ptx::wgmma_wait<0>();
    retire(older);
    retire(newer);
    older = newer = Step();
  }

  __device__ static __forceinline__ void load_offsets(uint32_t (&to)[4], const int* from) {
    const int4 v = *reinterpret_cast<const int4*>(from);
    to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
  }
  __device__ static __forceinline__ void load_offsets(uint32_t (&to)[2], const int* from) {
    to[0] = from[0], to[1] = from[1];
  }
  __device__ static __forceinline__ void load_offsets(uint32_t (&to)[1], const int* from) {
    to[0] = from[0];
  }

  // One weight block: kPairs instructions, each two channel blocks deep at its own place in the
  // tile. Two steps stay in flight behind it.
  template <int kPairs>
  __device__ __forceinline__ void multiply(float (&accumulator)[N / 2], uint32_t tile,
                                           const int* offsets) {
    uint32_t b[kPairs];
    load_offsets(b, offsets);
    ptx::barrier_wait(weights_full + 8 * stage, stage_parity);
    const uint32_t a = descriptor_low(weights + stage * kStageBytes, kRowsPerBlock);
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < kPairs; ++k) {
      Wgmma<Operand, N>::run(accumulator, descriptor(a + k * 2 * kRowsPerBlock),
                             descriptor(tile + b[k]));
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<2>();
    retire(older);
    older = newer;
    newer = Step{stage, -1};
    if (++stage == p.stages) stage = 0, stage_parity ^= 1;
  }

  __device__ __forceinline__ void accumulate(const Sm90Job& job, int slices) {
#pragma unroll
    for (int j = 0; j < MB; ++j)
#pragma unroll
      for (int i = 0; i < N / 2; ++i) d[j][i] = 0.f;
    const uint32_t ready = c == 0 || p.split_pixels ? shared.filled : shared.passed;
    const int first = c * p.split_pixels * 16;
    for (int slice = 0; slice < slices; ++slice) {
      // Nothing is held back while waiting: the slot waited for may depend on it.
      if (!ptx::barrier_test(ready + 8 * slot, slot_parity)) {
        drain();
        ptx::barrier_wait(ready + 8 * slot, slot_parity);
      }
      const uint32_t tile = descriptor_low(shared.slots + slot * slot_bytes(p) + first, p.plane);
#pragma unroll
      for (int j = 0; j < MB; ++j) {
        const Sm90Kind& kind = p.kind[job.kind[j]];
        // Whole steps, then what is left in a step of 2 and a step of 1. Lists start on whole steps.
        const int* pair = shared.pairs + kind.begin;
        int left = kind.end - kind.begin;
        for (; left >= 4; left -= 4, pair += 4) multiply<4>(d[j], tile, pair);
        for (; left >= 2; left -= 2) multiply<2>(d[j], tile, pair);
        for (; left >= 1; --left) multiply<1>(d[j], tile, pair + (kind.end - kind.begin) % 4 / 2 * 2);
      }
      if (job.steps == 0) retire(Step{-1, slot});
      newer.slot = job.steps == 0 ? -1 : slot;
      if (++slot == p.slots) slot = 0, slot_parity ^= 1;
    }
    drain();
#pragma unroll
    for (int j = 0; j < MB; ++j)
#pragma unroll
      for (int i = 0; i < N / 2; ++i) asm volatile("" : "+f"(d[j][i])::"memory");
  }

  // --- Consumers: epilogue ---------------------------------------------------------------------
  // Each warp regroups its 16 rows through its own staging slice; no other warp is waited for.

  // Writes down, once, where each accumulator column of this consumer lies in the tile: image, row
  // and column in a byte each, -1 for margins. Saves four divisions a column and unit.
  __device__ __forceinline__ void list_columns() const {
    for (int n = threadIdx.x % 128; n < N; n += 128) {
      const int index = c * p.split_pixels + n;
      const int column = index % p.pitch, row = index / p.pitch % p.rows;
      const int image = index / p.pitch / p.rows;
      const bool inside = (p.split_pixels == 0 || n < p.split_pixels) && column < p.tile_w &&
                          row < p.tile_h && image < p.tile_o;
      shared.columns[c * 256 + n] = inside ? image << 16 | row << 8 | column : -1;
    }
    ptx::warpgroup_sync(1 + c);
  }

  // Offset in y of channel 0 of column `n`, output column `extra_x` of its lattice point; -1 when
  // nothing is to be stored.
  __device__ __forceinline__ int64_t output_offset(const Unit& where, int first_y, int n,
                                                   int extra_x) const {
    const int entry = n < N ? shared.columns[c * 256 + n] : -1;
    const int image = where.o + (entry >> 16);
    const int oy = (where.y + (entry >> 8 & 255)) * p.out_step_y + first_y;
    const int ox = (where.x + (entry & 255)) * p.out_step_x + extra_x;
    if (entry < 0 || image >= p.batch || oy >= p.out_h || ox >= p.out_w) return -1;
    const int64_t area = static_cast<int64_t>(p.out_h) * p.out_w;
    const int64_t pixel = static_cast<int64_t>(oy) * p.out_w + ox;
    return image * area * p.out_channels + (p.channels_last ? pixel * p.out_channels : pixel);
  }

  // Bias of an output channel; 0 past the end.
  __device__ __forceinline__ float row_bias(int channel) const {
    if (!p.bias || channel >= p.out_channels) return 0.f;
    return Operand::to_float(static_cast<const Element*>(p.bias)[channel]);
  }

  template <int V>
  __device__ static __forceinline__ void copy_vector(Element* target, const Element* source) {
    using Vector = typename VectorOf<V * sizeof(Element)>::Type;
    __stcs(reinterpret_cast<Vector*>(target), *reinterpret_cast<const Vector*>(source));
  }

  // Writes `channels` staged rows of `width` outputs, V elements a lane, to their places.
  template <int V, int kSpan>
  __device__ __forceinline__ void sweep(const Element* staging, const Unit& where, const Sm90Job& job,
                                        const Sm90Kind& kind, int first_y, int channel, int chunk,
                                        int width) const {
    const int span = kSpan ? kSpan : p.out_step_x;
    const int64_t channel_step = static_cast<int64_t>(p.out_h) * p.out_w;
    const int channels = p.out_channels - channel;
#pragma unroll 1
    for (int position = threadIdx.x % 32 * V; position < width; position += 32 * V) {
      const int q = position / span, residue = position - q * span;
      if (kSpan != 1 && !(job.columns >> residue & 1)) continue;
      const int64_t offset =
          output_offset(where, first_y, chunk + q, kSpan == 1 ? kind.first_x : residue);
      if (offset < 0) continue;
      Element* target = static_cast<Element*>(p.y) + offset + channel * channel_step;
      const Element* source = staging + position;
      if (channels >= 8) {
#pragma unroll
        for (int q = 0; q < 8; ++q) {
          copy_vector<V>(target, source + q * kPitch);
          target += channel_step;
        }
      } else {
        for (int q = 0; q < channels; ++q) {
          copy_vector<V>(target, source + q * kPitch);
          target += channel_step;
        }
      }
    }
  }

  // Blocks [kFirst, kFirst + kCount) of the job, kColumns accumulator columns at a time. kSpan 1:
  // one block by itself. Otherwise the blocks are width phases that go to neighbouring output
  // columns, kSpan of them for a lattice point (0: the plan says how many).
  template <int kFirst, int kCount, int kColumns, int kSpan>
  __device__ __forceinline__ void store_contiguous(const Sm90Job& job, const Unit& where) const {
    const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
    Element* staging = reinterpret_cast<Element*>(shared.staging + (c * 4 + warp) * kStagingBytes);
    Element* row = staging + lane / 4 * kPitch;
    const int span = kSpan ? kSpan : p.out_step_x;
    const Sm90Kind& first = p.kind[job.kind[kFirst]];
    const int first_y = first.first_y[warp * 16 / p.fold_rows];
    const int channel = job.channel[kFirst] + warp * 16 % p.fold_rows;
    if (channel >= p.out_channels || first_y < 0) return;
    const bool holes = kSpan == 0 && __popc(job.columns) > kCount;
    const float bias0 = row_bias(channel + lane / 4), bias8 = row_bias(channel + 8 + lane / 4);
    // Not unrolled, or the code grows tenfold; only the choice of registers is.
#pragma unroll 1
    for (int part = 0; part < 2 * ((N + kColumns - 1) / kColumns); ++part) {
      const int chunk = part / 2 * kColumns, h = part % 2;
      if (channel + 8 * h >= p.out_channels) continue;
      const int width = min(kColumns, N - chunk) * span;
      const float bias = h ? bias8 : bias0;
      __syncwarp();
      if (holes) {  // columns of phases without taps: the bias alone
        for (int i = lane % 4; i < width; i += 4) row[i] = Operand::from_float(bias);
        __syncwarp();
      }
      stage_columns<kFirst, kCount, kColumns, kSpan>(job, row, part, bias);
      __syncwarp();
      constexpr int kMost = 16 / sizeof(Element);
      if (p.vector == kMost) {
        sweep<kMost, kSpan>(staging, where, job, first, first_y, channel + 8 * h, chunk, width);
      } else if (p.vector == 2) {
        sweep<2, kSpan>(staging, where, job, first, first_y, channel + 8 * h, chunk, width);
      } else {
        sweep<1, kSpan>(staging, where, job, first, first_y, channel + 8 * h, chunk, width);
      }
    }
  }

  // Puts this lane's accumulators of one part (columns of a chunk, 8 of 16 rows) into its row.
  template <int kFirst, int kCount, int kColumns, int kSpan>
  __device__ __forceinline__ void stage_columns(const Sm90Job& job, Element* row, int part,
                                                float bias) const {
#pragma unroll
    for (int each = 0; each < 2 * ((N + kColumns - 1) / kColumns); ++each) {
      if (each == part) {
#pragma unroll
        for (int g = 0; g < kColumns / 8; ++g) {
          const int n = each / 2 * kColumns + g * 8, i = n / 2 + 2 * (each % 2);
          if (n < N) {
            const int q = g * 8 + threadIdx.x % 4 * 2;
            if constexpr (kSpan == 1) {
              put_vector<2>(row + q, d[kFirst][i] + bias, d[kFirst][i + 1] + bias);
            } else if constexpr (kSpan == 2) {
              put_vector<4>(row + 2 * q, d[0][i] + bias, d[1][i] + bias, d[0][i + 1] + bias,
                            d[1][i + 1] + bias);
            } else {
#pragma unroll
              for (int j = 0; j < kCount; ++j) {
                Element* place = row + q * p.out_step_x + p.kind[job.kind[j]].first_x;
                place[0] = Operand::from_float(d[j][i] + bias);
                place[p.out_step_x] = Operand::from_float(d[j][i + 1] + bias);
              }
            }
          }
        }
      }
    }
  }

  template <int V, typename... Values>
  __device__ static __forceinline__ void put_vector(Element* target, Values... values) {
    alignas(16) const Element packed[V] = {Operand::from_float(values)...};
    using Vector = typename VectorOf<V * sizeof(Element)>::Type;
    *reinterpret_cast<Vector*>(target) = *reinterpret_cast<const Vector*>(packed);
  }

  // channels_last: a warp's 16 channels of a pixel are contiguous, 64 (32) bytes.
  template <int j>
  __device__ __forceinline__ void store_channels_last(const Sm90Job& job, const Unit& where) const {
    constexpr int kE = Operand::kBlockChannels, kLanes = 16 / kE;
    const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
    Element* staging = reinterpret_cast<Element*>(shared.staging + (c * 4 + warp) * kStagingBytes);
    const Sm90Kind& kind = p.kind[job.kind[j]];
    const int first_y = kind.first_y[warp * 16 / p.fold_rows];
    const int channel = job.channel[j] + warp * 16 % p.fold_rows;
    if (channel >= p.out_channels || first_y < 0) return;
    const int lane_channel = channel + lane % kLanes * kE;
    const float bias0 = row_bias(channel + lane / 4), bias8 = row_bias(channel + 8 + lane / 4);
#pragma unroll 1
    for (int chunk = 0; chunk < N; chunk += kPixels) {
      __syncwarp();
      stage_pixels<j>(staging + lane % 4 * 2 * kPixelPitch + lane / 4, chunk, bias0, bias8);
      __syncwarp();
#pragma unroll
      for (int i = 0; i < kPixels; i += 32 / kLanes) {
        const int n = i + lane / kLanes;
        const int64_t offset = output_offset(where, first_y, chunk + n, kind.first_x);
        if (offset >= 0 && lane_channel < p.out_channels) {
          copy_vector<kE>(static_cast<Element*>(p.y) + offset + lane_channel,
                          staging + n * kPixelPitch + lane % kLanes * kE);
        }
      }
    }
  }

  template <int j>
  __device__ __forceinline__ void stage_pixels(Element* place, int chunk, float bias0,
                                               float bias8) const {
#pragma unroll
    for (int each = 0; each < N; each += kPixels) {
      if (each == chunk) {
#pragma unroll
        for (int g = 0; g < kPixels / 8 && each + g * 8 < N; ++g) {
          const int i = (each / 8 + g) * 4;
          Element* pixel = place + g * 8 * kPixelPitch;
          pixel[0] = Operand::from_float(d[j][i] + bias0);
          pixel[kPixelPitch] = Operand::from_float(d[j][i + 1] + bias0);
          pixel[8] = Operand::from_float(d[j][i + 2] + bias8);
          pixel[kPixelPitch + 8] = Operand::from_float(d[j][i + 3] + bias8);
        }
      }
    }
  }

  template <int j = 0>
  __device__ __forceinline__ void store_each(const Sm90Job& job, const Unit& where) const {
    if constexpr (j < MB) {
      if (p.channels_last) {
        store_channels_last<j>(job, where);
      } else if constexpr (MB <= 2) {
        store_contiguous<j, 1, kChunk, 1>(job, where);
      }
      store_each<j + 1>(job, where);
    }
  }

  __device__ __forceinline__ void store(const Sm90Job& job, const Unit& where) const {
    if (job.interleave) {
      store_contiguous<0, MB, MB == 2 ? kChunk / 2 : 16, MB == 2 ? 2 : 0>(job, where);
    } else {
      store_each(job, where);
    }
  }

  __device__ __forceinline__ void run() {
    list_columns();
    for (int unit = blockIdx.x; unit < unit_count(p); unit += gridDim.x) {
      const Unit where(p, unit);
      const Sm90Job& job = p.job[job_of(p, where.group, c)];
      accumulate(job, slices_of(p, where.group));
      store(job, where);
    }
  }
};

// --- The kernel ------------------------------------------------------------------------------

template <typename Operand, int N, int MB>
__global__ void __launch_bounds__(kThreads, 1)
    sm90_wgmma_fprop(const __grid_constant__ Sm90Params p) {
  static_assert(N % 8 == 0 && N <= 256, "WGMMA takes N in steps of 8 up to 256");
  static_assert(MB * N <= 256, "more than 128 accumulators a thread would spill");
  static_assert(MB <= kMaxBlocks, "a job lists at most kMaxBlocks blocks");
  extern __shared__ __align__(1024) unsigned char memory[];
  const Shared shared(p, memory);
  if (threadIdx.x == 0) {
    for (int i = 0; i < p.slots; ++i) {
      ptx::barrier_init(shared.filled + 8 * i, kLoaders);
      ptx::barrier_init(shared.passed + 8 * i, 1);
      ptx::barrier_init(shared.emptied + 8 * i, p.split_pixels ? 2 : 1);
    }
    for (int i = 0; i < 2 * kMaxStages; ++i) ptx::barrier_init(shared.weights_full + 8 * i, 1);
    for (int i = 0; i < 2 * kMaxStages; ++i) {
      ptx::barrier_init(shared.spent + 8 * i, p.split_pixels ? 2 : 1);
    }
    ptx::barrier_init_fence();
  }
  for (int i = threadIdx.x; i < p.pairs; i += kThreads) shared.pairs[i] = p.pair[i].offset;
  __syncthreads();
  // The block starts with 168 registers for each of 384 threads, and setmaxnreg may only hand round
  // those (3 x 168 = 120 + 2 x 192); asking for more hangs. 512 threads would start with 128 each,
  // and ptxas then refuses WGMMA with N over 200.
  if (threadIdx.x < 128) {
    ptx::give_registers<120>();
    if (threadIdx.x < kLoaders) {
      load_tiles<Operand>(p, shared);
    } else {
      stream_weights(p, shared);
    }
  } else {
    ptx::take_registers<192>();
    Consumer<Operand, N, MB>(p, shared, threadIdx.x / 128 - 1).run();
  }
}

// --- Weight packing --------------------------------------------------------------------------

// Steps of a tap list: whole ones, then what is left in a step of 2 pairs and a step of 1.
__device__ __forceinline__ int steps_of(const Sm90Kind& kind) {
  const int pairs = kind.end - kind.begin;
  return pairs / kStepPairs + __popc(pairs % kStepPairs);
}

// Pair `k` of a step, -1 where the step is not full.
__device__ __forceinline__ int pair_of(const Sm90Kind& kind, int step, int k) {
  const int whole = (kind.end - kind.begin) / kStepPairs, left = (kind.end - kind.begin) % kStepPairs;
  if (step < whole) return kind.begin + step * kStepPairs + k;
  const int first = kind.begin + whole * kStepPairs;
  if (step == whole && left >= 2) return k < 2 ? first + k : -1;
  return k == 0 ? kind.end - 1 : -1;
}

// (Cin, Cout, taps) -> [job][slice][step][channel block][64 rows][16 bytes], rounded for the tensor
// core, zero where a fold has no such tap or a channel does not exist. One thread, 16 bytes.
template <typename Operand>
__global__ void sm90_pack_weights(const __grid_constant__ Sm90Params p,
                                  const typename Operand::Element* weight, uint4* packed) {
  constexpr int kE = Operand::kBlockChannels, kStepItems = kStageBytes / 16;
  const Sm90Job& job = p.job[blockIdx.y];
  const int total = p.slices * job.steps * kStepItems;
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < total; i += gridDim.x * blockDim.x) {
    const int row = i % kRowsPerBlock;
    const int half = i / kRowsPerBlock % 2;
    const int slice = i / (job.steps * kStepItems);
    const int k = i / (2 * kRowsPerBlock) % kStepPairs;
    int step = i / kStepItems % job.steps, j = 0;
    while (step >= steps_of(p.kind[job.kind[j]])) step -= steps_of(p.kind[job.kind[j++]]);
    const Sm90Kind& kind = p.kind[job.kind[j]];
    const int index = pair_of(kind, step, k);
    const Sm90Pair& source = p.pair[max(index, 0)];
    const int tap = index < 0 ? -1 : source.tap[row / p.fold_rows];
    const int out = job.channel[j] + row % p.fold_rows;
    const int in = (slice * p.slice_blocks + source.block + half) * kE;
    alignas(16) typename Operand::Element values[kE];
#pragma unroll
    for (int e = 0; e < kE; ++e) {
      const bool on = tap >= 0 && out < p.out_channels && in + e < p.in_channels;
      const int64_t at = static_cast<int64_t>(in + e) * p.weight_in +
                         static_cast<int64_t>(out) * p.weight_out + tap;
      values[e] = on ? weight[at] : Operand::from_float(0.f);
    }
    const uint4 v = *reinterpret_cast<uint4*>(values);
    packed[static_cast<int64_t>(job.weights) * kStepItems + i] =
        make_uint4(Operand::prepare(v.x), Operand::prepare(v.y), Operand::prepare(v.z),
                   Operand::prepare(v.w));
  }
}

}  // namespace upconv
