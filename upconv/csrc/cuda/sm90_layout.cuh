// Hopper kernel: operand types, sizes, shared memory, and the units of work. Roles and pipelines
// are told in sm90_wgmma_fprop.cuh.
#pragma once

#include <cstdint>
#include <type_traits>

#include "ptx.cuh"
#include "sm90_params.h"

namespace upconv {

// --- Configuration ---------------------------------------------------------------------------

struct Tf32 {
  using Element = float;
  static constexpr int kBlockChannels = 4, kShares = 1;
  static constexpr bool kSplit = false;
  static __device__ __forceinline__ uint32_t prepare(uint32_t bits) {
    return ptx::round_to_tf32(bits);
  }
  // What TMA has brought: it rounds on the way, to nearest with ties to even (seen on an H200).
  static __device__ __forceinline__ uint32_t prepare_box(uint32_t bits) { return bits; }
  static __device__ __forceinline__ float to_float(Element v) { return v; }
  static __device__ __forceinline__ Element from_float(float v) { return v; }
};
struct Bf16 {
  using Element = ptx::BFloat16;
  static constexpr int kBlockChannels = 8, kShares = 1;
  static constexpr bool kSplit = false;
  static __device__ __forceinline__ uint32_t prepare(uint32_t bits) { return bits; }
  static __device__ __forceinline__ float to_float(Element v) { return ptx::widened(v); }
  static __device__ __forceinline__ Element from_float(float v) { return ptx::to_bfloat16(v); }
};
struct Fp16 {
  using Element = ptx::Float16;
  static constexpr int kBlockChannels = 8, kShares = 1;
  static constexpr bool kSplit = false;
  static __device__ __forceinline__ uint32_t prepare(uint32_t bits) { return bits; }
  static __device__ __forceinline__ float to_float(Element v) { return ptx::widened(v); }
  static __device__ __forceinline__ Element from_float(float v) { return ptx::to_float16(v); }
};

// float32 as the sum of two FP16 numbers, 22 bits together: a slot holds the heads of a slice and
// then its tails, and each tap list is gone through three times for the three of the four products
// of two such sums that count (sm90_split.cuh). What is small is added while the sum is small:
// heads of the input with tails of the weights, tails with heads, heads with heads. The tensor core
// adds with truncation, whose errors all have the same sign: some products are summed by themselves
// and then added to the rest with rounding. That takes two registers for every output, so the two
// consumers take half of the tile's columns each, with the same weights and without turns.
struct Split {
  using Element = float;
  static constexpr int kBlockChannels = 8, kShares = 2;
  static constexpr bool kSplit = true;
  static __device__ __forceinline__ float to_float(Element v) { return v; }
  static __device__ __forceinline__ Element from_float(float v) { return v; }
};

// Elements in 16 bytes: what a store, a gathering loader or an aligned box begins with.
template <typename Operand>
constexpr int kWhole = 16 / sizeof(typename Operand::Element);

constexpr int kLoaders = 96;
constexpr int kThreads = 128 + 256;
constexpr int kRowsPerBlock = 64;  // output rows of one WGMMA: channels, or folds x channels
constexpr int kGroup = 8;          // columns, or rows, that WGMMA reads from 128 bytes in a row
constexpr int kStageBytes = kStepBytes;
constexpr int kMaxSlots = 16;
constexpr int kMaxStages = 24;  // of all rings
constexpr int kMaxChunks = 16;
constexpr int kLoaderWarps = kLoaders / 32;
constexpr int kConsumerWarps = 4;  // of each consumer
constexpr int kCopyBoxes = 3;      // Sm90Params::copy: from here on by TMA
constexpr int kCopyRows = 4;
constexpr int kStagingBytes = 16 * 288;  // of one warp: 16 rows of 256 bytes and padding
constexpr int kBarrierBytes = 1024;
constexpr int kPairBarrier = 3;            // first of four named barriers, of two warps each
constexpr int kColumnBytes = 2 * 256 * 4;  // where each accumulator column lies

constexpr int kInFlight = 6;    // items that each loader thread has on their way
constexpr int kItemPixels = 4;  // an item is 4 neighbouring pixels of one channel block
constexpr int kItemBytes = 64;
constexpr int kRawBytes = kInFlight * kItemBytes * kLoaders;
constexpr int kMaxItems = 8;  // items of one thread in a pass over the tile
constexpr int kOffsetBytes = 2 * kMaxItems * kLoaders * 4;
constexpr int kVisitWords = sizeof(Sm90Visit) / 4;
constexpr int kVisitSteps = 2 * kMaxBlocks, kVisitPlane = kVisitSteps + 1;  // words of a visit

// Shared memory: barriers, where columns lie, 8 staging slices (one a consumer warp), tables of
// visits and pairs, what the loaders have on its way, the ring of weights, the ring of input
// slices.
__host__ __device__ inline int slot_bytes(const Sm90Params& p) {
  return p.parts * p.slice_blocks * p.block_pitch * 16;
}
__host__ __device__ inline int table_bytes(const Sm90Params& p) {
  const int bytes = p.pairs * 4 + p.visits * kVisitWords * 4;
  return (bytes + 127) / 128 * 128;  // TMA writes to multiples of 128 bytes
}
__host__ __device__ inline int raw_ring_bytes(const Sm90Params& p) {
  return p.copy >= kCopyBoxes ? p.raw_chunks * p.raw_bytes : kOffsetBytes + kRawBytes;
}
__host__ __device__ inline int shared_bytes(const Sm90Params& p) {
  // 4 KB of slack: operands of columns that are not stored may reach past the last channel block.
  return kBarrierBytes + kColumnBytes + 8 * kStagingBytes + table_bytes(p) + raw_ring_bytes(p) +
         p.rings * p.stages * kStageBytes + p.slots * slot_bytes(p) + 4096;
}

struct Shared {
  // Barriers, 8 bytes each; each name is an array of them.
  uint32_t filled, emptied, weights_full, spent, raw_full, raw_free, turn;
  uint32_t* range;  // split operands: the largest and the least size of the input, as bits
  int* columns;
  int* places;
  int* pairs;
  int* visits;  // kVisitWords each
  uint32_t staging, raw, weights, slots;
  int* offsets;  // of the loaders that copy without TMA

  __device__ __forceinline__ Shared(const Sm90Params& p, unsigned char* memory) {
    const uint32_t base = ptx::shared_address(memory);
    filled = base;
    emptied = filled + 8 * kMaxSlots;
    weights_full = emptied + 8 * kMaxSlots;
    spent = weights_full + 8 * kMaxStages;
    raw_full = spent + 8 * kMaxStages;
    raw_free = raw_full + 8 * kMaxChunks;
    turn = raw_free + 8 * kMaxChunks;
    range = reinterpret_cast<uint32_t*>(memory + (turn - base) + 16);
    columns = reinterpret_cast<int*>(memory + kBarrierBytes);
    places = columns + 256;
    const int fixed = kBarrierBytes + kColumnBytes + 8 * kStagingBytes;
    staging = base + fixed - 8 * kStagingBytes;
    pairs = reinterpret_cast<int*>(memory + fixed);
    visits = pairs + p.pairs;
    raw = base + fixed + table_bytes(p);
    offsets = reinterpret_cast<int*>(memory + fixed + table_bytes(p) + kRawBytes);
    weights = raw + raw_ring_bytes(p);
    slots = weights + p.rings * p.stages * kStageBytes;
  }
};
static_assert(2 * 8 * (kMaxSlots + kMaxStages + kMaxChunks) + 24 <= kBarrierBytes,
              "barriers overrun");
static_assert((kBarrierBytes + kColumnBytes + 8 * kStagingBytes) % 128 == 0,
              "TMA writes to multiples of 128 bytes");

// Writes down, once, where each accumulator column lies: image, row and column of the tile in a
// byte each, and the offset of its output from the unit's first; -1 for margins. Saves the
// divisions and most of the arithmetic in every unit.
template <int N>
__device__ __forceinline__ void list_columns(const Sm90Params& p, const Shared& shared) {
  for (int n = threadIdx.x; n < N; n += kThreads) {
    const int column = n % p.row_columns, line = n / p.row_columns;
    const int row = line % p.rows, image = line / p.rows;
    const bool inside = column < p.tile_w && row < p.tile_h && image < p.tile_o;
    shared.columns[n] = inside ? image << 16 | row << 8 | column : -1;
    const int pixel = row * p.out_step_y * p.out_w + column * p.out_step_x;
    const int channels = p.conv_groups * p.out_channels;
    const int images = image * channels * p.out_d * p.out_h * p.out_w;
    shared.places[n] = inside ? images + (p.channels_last ? pixel * channels : pixel) : -1;
  }
}

// A unit of work: one tile, one group of the convolution, one job group. Units of the same tile
// follow each other, so that their input comes from L2.
struct Unit {
  int o, z, y, x;  // first image, q depth, q row, q column
  int conv_group;

  __device__ __forceinline__ Unit(const Sm90Params& p, int index) {
    int rest = p.by_job_groups(index);
    conv_group = p.conv_groups > 1 ? taken(rest, p.conv_groups, p.by_conv_groups) : 0;
    x = taken(rest, p.tiles_x, p.by_tiles_x) * p.tile_w;
    y = taken(rest, p.tiles_y, p.by_tiles_y) * p.tile_h;
    z = p.tiles_z > 1 ? taken(rest, p.tiles_z, p.by_tiles_z) : 0;
    o = rest * p.tile_o;
  }

  // The last digit of a number whose digits have so many values; it loses it.
  __device__ static __forceinline__ int taken(int& number, int values, const Divider& by) {
    const int before = number;
    number = by(before);
    return before - number * values;
  }
};

__host__ __device__ inline int unit_count(const Sm90Params& p) {
  return p.tiles_o * p.tiles_z * p.tiles_y * p.tiles_x * p.conv_groups * p.job_groups;
}

// The job group of a unit.
__device__ __forceinline__ int group_of(const Sm90Params& p, int unit) {
  return p.job_groups > 1 ? unit - p.by_job_groups(unit) * p.job_groups : 0;
}

// Index of the job of consumer `c`: the unit's own when the consumers take units in turn.
__device__ __forceinline__ int job_of(const Sm90Params& p, int group, int c) {
  return p.alternate ? group : 2 * group + c;
}

// Slices that the unit needs, of all its planes: none when no phase of it has a tap.
__device__ __forceinline__ int slices_of(const Sm90Params& p, int group) {
  return p.job[job_of(p, group, 0)].visits * p.slices;
}

// Weight blocks of consumer `c` in `count` slices, from slice `slice` of a visit on.
__device__ __forceinline__ int steps_in(const Sm90Params& p, const int* visit, int c, int slice,
                                        int count) {
  int total = 0;
  while (count > 0) {
    const int here = min(count, p.slices - slice);
    total += here * (static_cast<uint32_t>(visit[kVisitSteps]) >> (16 * c) & 0xffff);
    count -= here;
    slice = 0;
    visit += kVisitWords;
  }
  return total;
}

// --- What consumers read ---------------------------------------------------------------------

// Shared-memory operand without swizzle: 8 rows of 16 bytes make a core matrix; `k_step` is the
// distance of the two core matrices along K, `row_step` that of 8 rows and the next. All in 16
// bytes; moving the operand adds to the low word, which never carries.
__device__ __forceinline__ uint32_t descriptor_low(uint32_t address, uint32_t k_step) {
  return (address >> 4) | (k_step << 16);
}
__device__ __forceinline__ uint64_t descriptor(uint32_t low, uint32_t row_step) {
  return static_cast<uint64_t>(row_step) << 32 | low;
}

// What a lane loads or stores at a time.
template <int kBytes>
using VectorOf = std::conditional_t<
    kBytes == 2, unsigned short,
    std::conditional_t<kBytes == 4, uint32_t, std::conditional_t<kBytes == 8, uint2, uint4>>>;

// Steps of a tap list: whole ones, then what is left in a step of 2 pairs and a step of 1.
__device__ __forceinline__ int steps_in_list(int pairs) {
  return pairs / kStepPairs + __popc(pairs % kStepPairs);
}

// Places in the tile of the pairs of a step, from the table.
__device__ __forceinline__ void load_offsets(uint32_t (&to)[4], const int* from) {
  const int4 v = *reinterpret_cast<const int4*>(from);
  to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
}
__device__ __forceinline__ void load_offsets(uint32_t (&to)[2], const int* from) {
  to[0] = from[0], to[1] = from[1];
}
__device__ __forceinline__ void load_offsets(uint32_t (&to)[1], const int* from) {
  to[0] = from[0];
}

}  // namespace upconv
