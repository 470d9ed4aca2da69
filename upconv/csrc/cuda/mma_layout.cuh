// mma.sync kernel: operand types, shared memory, and the units of work. The idea and the pipeline
// are told in mma_fprop.cuh.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "mma_params.h"
#include "mma_ptx.cuh"

namespace upconv {

// --- Configuration ---------------------------------------------------------------------------

// A warp has 4 or 2 fragments of 16 pixels (kFragments below). With 2, for layers that mostly wait
// for memory, twice as many warps share a multiprocessor; their registers hold no input on its way,
// so that all channels are one slice.
constexpr int kMmaMaxThreads = 256;

// An operand type: what a slot holds, how many column tiles of 8 a warp has, and how a fragment of
// pixels meets a fragment of weights.
struct MmaTf32 {
  using Element = float;
  static constexpr int kChannels = 4, kTiles = 8, kWords = 2;
  static constexpr bool kSplit = false;
  static __device__ __forceinline__ uint32_t prepare(uint32_t bits) {
    return mma_ptx::round_to_tf32(bits);
  }
  // Rounded as above: the tensor core drops the low 13 bits, so that adding half of their range is
  // enough (9 instructions for 4 numbers instead of 16), unless that would make a NaN a number.
  static __device__ __forceinline__ uint4 prepare(uint4 v) {
    const float sum = fabsf(__uint_as_float(v.x)) + fabsf(__uint_as_float(v.y)) +
                      fabsf(__uint_as_float(v.z)) + fabsf(__uint_as_float(v.w));
    if (sum < __int_as_float(0x7f800000)) {
      return make_uint4(v.x + 0x1000, v.y + 0x1000, v.z + 0x1000, v.w + 0x1000);
    }
    return make_uint4(prepare(v.x), prepare(v.y), prepare(v.z), prepare(v.w));
  }
  static __device__ __forceinline__ void multiply(float (&d)[4], const uint32_t (&a)[4],
                                                  const uint32_t (&b)[2]) {
    mma_ptx::mma_tf32(d, a, b[0], b[1]);
  }
  static __device__ __forceinline__ float to_float(Element v) { return v; }
  static __device__ __forceinline__ Element from_float(float v) { return v; }
  static __device__ __forceinline__ void store_two(uint32_t to, uint32_t other, float v, float w) {
    mma_ptx::store_shared(to, __float_as_uint(v));
    mma_ptx::store_shared(other, __float_as_uint(w));
  }
};

struct MmaBf16 {
  using Element = __nv_bfloat16;
  static constexpr int kChannels = 8, kTiles = 8, kWords = 2;
  static constexpr bool kSplit = false;
  static __device__ __forceinline__ uint32_t prepare(uint32_t bits) { return bits; }
  static __device__ __forceinline__ uint4 prepare(uint4 v) { return v; }
  static __device__ __forceinline__ void multiply(float (&d)[4], const uint32_t (&a)[4],
                                                  const uint32_t (&b)[2]) {
    mma_ptx::mma_bf16(d, a, b[0], b[1]);
  }
  static __device__ __forceinline__ float to_float(Element v) { return __bfloat162float(v); }
  static __device__ __forceinline__ Element from_float(float v) { return __float2bfloat16(v); }
  static __device__ __forceinline__ void store_two(uint32_t to, uint32_t other, float v, float w) {
    const __nv_bfloat162 both = __floats2bfloat162_rn(v, w);
    const uint32_t word = reinterpret_cast<const uint32_t&>(both);
    mma_ptx::store_shared(to, static_cast<uint16_t>(word));
    mma_ptx::store_shared(other, static_cast<uint16_t>(word >> 16));
  }
};

struct MmaFp16 {
  using Element = __half;
  static constexpr int kChannels = 8, kTiles = 8, kWords = 2;
  static constexpr bool kSplit = false;
  static __device__ __forceinline__ uint32_t prepare(uint32_t bits) { return bits; }
  static __device__ __forceinline__ uint4 prepare(uint4 v) { return v; }
  static __device__ __forceinline__ void multiply(float (&d)[4], const uint32_t (&a)[4],
                                                  const uint32_t (&b)[2]) {
    mma_ptx::mma_fp16(d, a, b[0], b[1]);
  }
  static __device__ __forceinline__ float to_float(Element v) { return __half2float(v); }
  static __device__ __forceinline__ Element from_float(float v) { return __float2half_rn(v); }
  static __device__ __forceinline__ void store_two(uint32_t to, uint32_t other, float v, float w) {
    const __half2 both = __floats2half2_rn(v, w);
    const uint32_t word = reinterpret_cast<const uint32_t&>(both);
    mma_ptx::store_shared(to, static_cast<uint16_t>(word));
    mma_ptx::store_shared(other, static_cast<uint16_t>(word >> 16));
  }
};

// float32 as the sum of two TF32 numbers; of the four products of two such sums
// three count. Weights are split when they are packed, pixels in registers.
struct MmaSplit {
  using Element = float;
  static constexpr int kChannels = 4, kTiles = 4, kWords = 4;
  static constexpr bool kSplit = true;
  static __device__ __forceinline__ uint32_t prepare(uint32_t bits) { return bits; }
  static __device__ __forceinline__ uint4 prepare(uint4 v) { return v; }
  // A truncated head and the rounded rest: 3 instructions, 21 bits.
  static __device__ __forceinline__ void split(uint32_t bits, uint32_t& head, uint32_t& tail) {
    head = bits & 0xffffe000u;
    tail = __float_as_uint(__uint_as_float(bits) - __uint_as_float(head)) + 0x1000;
  }
  // The same with a rounded head, where time does not count: the weights'. Of two truncated numbers
  // both tails have the sign of the number, so that their product, which is left out, always takes
  // from the sum; of a truncated and a rounded one it is as often too much as too little. Numbers
  // that rounding might turn into infinity, and NaN into a number, are truncated.
  static __device__ __forceinline__ void split_rounded(uint32_t bits, uint32_t& head,
                                                       uint32_t& tail) {
    const bool safe = (bits & 0x7fffffffu) < 0x7f000000u;
    head = (bits + (safe ? 0x1000u : 0u)) & 0xffffe000u;
    tail = __float_as_uint(__uint_as_float(bits) - __uint_as_float(head)) + 0x1000;
  }
  // The tensor core adds with truncation, whose errors pile up over a long sum: each step is summed
  // by itself and added with rounding. Four sums at a time, in this order, hide each other's
  // latency; left to itself the compiler starts so many that registers spill.
  static __device__ __forceinline__ void multiply(float (&d)[4], float (&sum)[4],
                                                  const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                                                  bool last) {
    mma_ptx::mma_tf32_ordered(sum, a, b0, b1);
    if (last) {
#pragma unroll
      for (int i = 0; i < 4; ++i) d[i] += sum[i];
    }
  }
  static __device__ __forceinline__ float to_float(Element v) { return v; }
  static __device__ __forceinline__ Element from_float(float v) { return v; }
  static __device__ __forceinline__ void store_two(uint32_t to, uint32_t other, float v, float w) {
    mma_ptx::store_shared(to, __float_as_uint(v));
    mma_ptx::store_shared(other, __float_as_uint(w));
  }
};

template <typename Operand>
constexpr int kMmaTileBytes = 32 * 4 * Operand::kWords;  // weights of 8 columns in one step

// --- Shared memory ---------------------------------------------------------------------------

// Main loop: [tile, twice where there are several slices][weight ring][tables]. Epilogue, over the
// same bytes: [staging][table of output rows]. Behind both: [phases][bias].
struct MmaShared {
  unsigned char* memory;
  uint32_t tile, ring, steps, stages, barriers;
  int* offsets;
  uint16_t* positions;
  float* bias;  // of the chunk's channels
  int* phases;  // phase_base of the kind
  int* rows;    // [3][rows of the tile]: image or -1, output plane and row of phase 0

  __device__ __forceinline__ MmaShared(const MmaParams& p, unsigned char* memory)
      : memory(memory),
        tile(mma_ptx::shared_address(memory)),
        ring(tile + p.ring_at),
        steps(tile + p.steps_at),
        stages(tile + p.stages_at),
        barriers(tile + p.barriers_at),
        offsets(reinterpret_cast<int*>(memory + p.offsets_at)),
        positions(reinterpret_cast<uint16_t*>(memory + p.positions_at)),
        bias(reinterpret_cast<float*>(memory + p.bias_at)),
        phases(reinterpret_cast<int*>(memory + p.phases_at)),
        rows(reinterpret_cast<int*>(memory + p.rows_at)) {}
};

__device__ __forceinline__ int quotient(int n, MmaDivisor by) {
  const uint64_t product = uint64_t{static_cast<uint32_t>(n) * 2} * by.multiplier;
  return static_cast<int>(static_cast<uint32_t>(product >> 32) >> by.shift);
}

// --- Columns ---------------------------------------------------------------------------------

// Which phase of the kind, and which channel of the chunk, a column of the product is.
struct MmaColumn {
  int phase, channel;

  // The same column of the warp's next tile; `end` is past the channels that the warp has.
  __device__ __forceinline__ void next(const MmaParams& p, int end) {
    channel += 8;
#pragma unroll
    for (int i = 0; i < 2; ++i) {  // a phase has at least 4 channels
      if (channel >= end) channel -= p.phase_columns, ++phase;
    }
  }
  static __device__ __forceinline__ int end(const MmaParams& p, int warp_n) {
    return (p.spread ? warp_n + 1 : 1) * p.phase_columns;
  }

  template <typename Operand>
  static __device__ __forceinline__ MmaColumn of(const MmaParams& p, int column) {
    const int warp = p.spread ? column / (8 * Operand::kTiles) : 0;
    const int rest = column - warp * (8 * Operand::kTiles);
    const int phase = quotient(rest, p.by_phase_columns);
    return {phase, warp * p.phase_columns + rest - phase * p.phase_columns};
  }
};

// --- Units of work ---------------------------------------------------------------------------

// One block: a tile of lattice points, a group, a chunk of its channels, a kind. Kinds and chunks
// of the same tile follow each other, so that their input comes from L2.
struct MmaUnit {
  int o, z, y, x;  // first image, q plane, row and column
  int group, chunk, kind;

  __device__ __forceinline__ explicit MmaUnit(const MmaParams& p) {
    int index = blockIdx.x;
    const auto part = [&](int count, MmaDivisor by) {
      const int rest = quotient(index, by), digit = index - rest * count;
      index = rest;
      return digit;
    };
    kind = part(p.kinds, p.by_kinds);
    chunk = part(p.chunks, p.by_chunks);
    group = part(p.groups, p.by_groups);
    x = part(p.tiles_x, p.by_tiles_x) * p.tile_x;
    y = part(p.tiles_y, p.by_tiles_y) * p.tile_y;
    z = part(p.tiles_z, p.by_tiles_z) * p.tile_z;
    o = index * p.tile_o;
  }
};

}  // namespace upconv
