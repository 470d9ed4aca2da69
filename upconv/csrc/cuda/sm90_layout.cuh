// Hopper kernel: operand types, sizes, shared memory, and the units of work. Roles and pipelines
// are told in sm90_wgmma_fprop.cuh.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "ptx.cuh"
#include "sm90_params.h"

namespace upconv {

// --- Configuration ---------------------------------------------------------------------------

struct Tf32 {
  using Element = float;
  static constexpr int kBlockChannels = 4;
  static __device__ __forceinline__ uint32_t prepare(uint32_t bits) {
    return ptx::round_to_tf32(bits);
  }
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
constexpr int kMaxChunks = 16;
constexpr int kLoaderWarps = kLoaders / 32;
constexpr int kCopyBoxes = 3;            // Sm90Params::copy
constexpr int kStagingBytes = 16 * 288;  // of one warp: 16 rows of 256 bytes and padding
constexpr int kBarrierBytes = 1024;
constexpr int kColumnBytes = 2 * 256 * 4;  // where each accumulator column lies

constexpr int kInFlight = 6;    // items that each loader thread has on their way
constexpr int kItemPixels = 4;  // an item is 4 neighbouring pixels of one channel block
constexpr int kItemBytes = 64;
constexpr int kRawBytes = kInFlight * kItemBytes * kLoaders;
constexpr int kMaxItems = 8;  // items of one thread in a pass over the tile
constexpr int kOffsetBytes = 2 * kMaxItems * kLoaders * 4;
constexpr int kPairBytes = kMaxPairs * 4;

// Shared memory: barriers, tables, 8 staging slices (one a consumer warp), what the loaders have on
// its way, the ring of weights, the ring of input slices.
__host__ __device__ inline int slot_bytes(const Sm90Params& p) {
  return p.slice_blocks * p.plane * 16;
}
__host__ __device__ inline int raw_ring_bytes(const Sm90Params& p) {
  return p.copy == kCopyBoxes ? p.raw_chunks * p.raw_bytes : kOffsetBytes + kRawBytes;
}
__host__ __device__ inline int shared_bytes(const Sm90Params& p) {
  // 4 KB of slack: operands of columns that are not stored may reach past the last plane.
  return kBarrierBytes + kColumnBytes + kPairBytes + 8 * kStagingBytes + raw_ring_bytes(p) +
         p.stages * kStageBytes + p.slots * slot_bytes(p) + 4096;
}

struct Shared {
  // Barriers, 8 bytes each; the first four are arrays.
  uint32_t filled, emptied, weights_full, spent, raw_full, raw_free, turn;
  int* columns;
  int* places;
  int* pairs;
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
    columns = reinterpret_cast<int*>(memory + kBarrierBytes);
    places = columns + 256;
    pairs = columns + kColumnBytes / 4;
    const int fixed = kBarrierBytes + kColumnBytes + kPairBytes + 8 * kStagingBytes;
    staging = base + fixed - 8 * kStagingBytes;
    raw = base + fixed;
    offsets = reinterpret_cast<int*>(memory + fixed + kRawBytes);
    weights = raw + raw_ring_bytes(p);
    slots = weights + p.stages * kStageBytes;
  }
};
static_assert(2 * 8 * (kMaxSlots + kMaxStages + kMaxChunks) + 16 <= kBarrierBytes,
              "barriers overrun");
static_assert((kBarrierBytes + kColumnBytes + kPairBytes + 8 * kStagingBytes) % 128 == 0,
              "TMA writes to multiples of 128 bytes");

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

// Index of the job of consumer `c`: the unit's own when the consumers take units in turn.
__device__ __forceinline__ int job_of(const Sm90Params& p, int group, int c) {
  return p.alternate ? group : 2 * group + c;
}

// Slices that the unit needs: none when no phase of it has a tap.
__device__ __forceinline__ int slices_of(const Sm90Params& p, int group) {
  const int steps = p.job[job_of(p, group, 0)].steps + p.job[job_of(p, group, 1)].steps;
  return steps ? p.slices : 0;
}

}  // namespace upconv
