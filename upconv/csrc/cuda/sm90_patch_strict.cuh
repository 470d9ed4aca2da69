// Hopper kernel for patches: float32 that must not be rounded, as sums of two FP16 numbers
// (halves.cuh).
//
// Pixels pass through registers anyway: there they are cut into heads and tails. Each pixel has a
// scale of its own in each stage, 32 numbers of K, so that it is as exact as if it were alone. (Of
// the kernel for all layers a whole tensor has one, which takes a pass over the input to find, and
// several through the kernel where sizes are far apart.) Three products count: heads with tails,
// tails with heads, heads with heads; what is small is added while the sum is small. The tensor
// cores add with truncation, whose errors all have the same sign: the 6 products of a stage are
// summed by themselves and then added to the rest with rounding. That takes two registers for every
// output, and so half of the columns.
#pragma once

#include "halves.cuh"
#include "sm90_patch_layout.cuh"
#include "wgmma_registers.cuh"

namespace upconv::patch {

// --- Configuration ---------------------------------------------------------------------------

constexpr int kHalfSteps = kSplitSteps / 3;  // of 16 numbers of K
constexpr int kMeetsTails = 1;               // of the weights: tails, heads that meet tails, heads
constexpr int kFar = 64;  // powers of two by which numbers may outgrow the unit of their sums

// Behind the packed weights, for each column.
__host__ __device__ inline float* column_factors(const PatchParams& p, const void* packed,
                                                 int depth) {
  const int64_t bytes = static_cast<int64_t>(column_groups(p)) * depth * weight_bytes(p);
  return reinterpret_cast<float*>(const_cast<char*>(static_cast<const char*>(packed)) + bytes);
}

// --- Consumers -------------------------------------------------------------------------------

template <typename Way, int N>
struct StrictConsumer {
  // Operand A of a stage.
  struct Numbers {
    uint32_t head[kHalfSteps][4], tail[kHalfSteps][4];
  };

  const PatchParams& p;
  const Shared& shared;
  const Way way;
  const int c, warp, lane;
  Slot box, weights;
  typename Way::Places places;
  float d[N / 2], sum[N / 2];
  // Powers of two, of a thread's two rows: the scale of the stage that has been cut, of that which
  // is multiplied, and of the sums (which are scaled as the weights are, besides).
  int scale[2], multiplied[2], unit[2];
  Numbers numbers[2];

  __device__ __forceinline__ StrictConsumer(const PatchParams& p, const Shared& shared)
      : p(p),
        shared(shared),
        way{p},
        c(threadIdx.x / 128),
        warp(threadIdx.x / 32 % 4),
        lane(threadIdx.x % 32) {}

  // Loads a stage, and gives its box back. Numbers of TF32's order, of which register 0 and 2 are
  // of one row: two of its steps are one here.
  __device__ __forceinline__ void prepare(Numbers& to) {
    ptx::barrier_wait(shared.box_full_at(c, box.index), box.parity);
    uint32_t raw[kSteps][4];
    way.load(raw, shared.boxes + (c * p.box_stages + box.index) * Way::kBytes, places);
    float by[2];
    bool finite = true;
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const uint32_t size = ptx::most_of_four(size_of_row(raw, row));
      finite = finite && size < kInfinity;
      scale[row] = scale_of(size);
      by[row] = power_of_two(scale[row]);
    }
    if (lane == 0) ptx::barrier_arrive(shared.box_empty_at(c, box.index));  // all have loaded
    box.advance(p.box_stages);
    if (finite) {
      cut<true>(to, raw, by);
    } else {
      cut<false>(to, raw, by);
    }
  }

  // The largest number of a row, as bits. (NaN is left out: it needs no scale.)
  __device__ static __forceinline__ uint32_t size_of_row(const uint32_t (&raw)[kSteps][4],
                                                         int row) {
    float size = 0.f;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const float a = __uint_as_float(raw[step][row]), b = __uint_as_float(raw[step][row + 2]);
      size = fmaxf(size, fmaxf(fabsf(a), fabsf(b)));
    }
    return __float_as_uint(size);
  }

  template <bool kFinite>
  __device__ static __forceinline__ void cut(Numbers& to, const uint32_t (&raw)[kSteps][4],
                                             const float (&by)[2]) {
#pragma unroll
    for (int i = 0; i < kHalfSteps * 4; ++i) {
      const int row = i % 2;
      cut_inputs<kFinite>(raw[i / 2][row], raw[i / 2][row + 2], by[row], to.head[i / 4][i % 4],
                          to.tail[i / 4][i % 4]);
    }
  }

  __device__ __forceinline__ void multiply(const Numbers& by) {
    multiplied[0] = scale[0], multiplied[1] = scale[1];
    ptx::barrier_wait(shared.full + 8 * weights.index, weights.parity);
    const uint64_t high = static_cast<uint64_t>(128 >> 4) << 32;
    uint32_t low = (shared.weights + weights.index * weight_bytes(p)) >> 4 | N << 16;
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < kSplitSteps; ++i) {
      const int part = i / kHalfSteps, step = i % kHalfSteps;
      WgmmaRegisters<Split, N>::run(d, part == kMeetsTails ? by.tail[step] : by.head[step],
                                    high | low, i > 0);
      low += N * 32 >> 4;
    }
    ptx::wgmma_commit();
  }

  // When the products of a stage are over.
  template <bool kFirst>
  __device__ __forceinline__ void add() {
    ptx::wgmma_wait<0>();
#pragma unroll
    for (int i = 0; i < N / 2; ++i) ptx::keep_after_wait(d[i]);
    if (lane == 0 && !p.resident) ptx::barrier_arrive(shared.empty + 8 * weights.index);
    weights.advance(p.weight_stages);
    if (p.resident) weights.parity = 0;  // full once and for all
    float factor[2];
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      if (kFirst) unit[row] = 0;
      if (multiplied[row] + kFar < unit[row]) outgrow<kFirst>(row);
      factor[row] = power_of_two(max(unit[row] - multiplied[row], -126));
    }
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      sum[i] = kFirst ? d[i] * factor[i / 2 % 2] : fmaf(d[i], factor[i / 2 % 2], sum[i]);
    }
  }

  // Numbers from 2^79 on: what was added before is scaled like them.
  template <bool kFirst>
  __device__ __forceinline__ void outgrow(int row) {
    const float factor = power_of_two(max(multiplied[row] - unit[row], -126));
    unit[row] = multiplied[row];
#pragma unroll
    for (int i = 0; !kFirst && i < N / 4; ++i) sum[i / 2 * 4 + row * 2 + i % 2] *= factor;
  }

  // Sums of such numbers as what they are. The weights' scale first: the product of both may be too
  // small or too large for a float.
  __device__ __forceinline__ void unscale(uint32_t table) {
#pragma unroll
    for (int j = 0; j < N / 8; ++j) {
      uint2 factor;
      ptx::load_shared(factor, table + kFactorsAt + (j * 8 + lane % 4 * 2) * 4);
#pragma unroll
      for (int i = 0; i < 4; ++i) sum[4 * j + i] *= __uint_as_float(i % 2 ? factor.y : factor.x);
    }
    const float rows[] = {power_of_two(-unit[0]), power_of_two(-unit[1])};
#pragma unroll
    for (int i = 0; i < N / 2; ++i) sum[i] *= rows[i / 2 % 2];
  }

  __device__ __forceinline__ void begin_group(uint32_t table, int group) {
    ptx::warpgroup_sync(1 + c);
    way.begin_group(table, group);
    const int i = threadIdx.x % 128;
    if (i < N) {
      const float* factors = column_factors(p, p.w, Way::depth(p)) + group * N;
      ptx::store_shared(table + kFactorsAt + i * 4, __float_as_uint(__ldg(factors + i)));
    }
    ptx::warpgroup_sync(1 + c);
  }

  __device__ __forceinline__ void run() {
    const int units = unit_count<Way>(p);
    const int blocks = Way::block_count(p), depth = Way::depth(p);
    const uint32_t table = shared.tables + c * kTableBytes;
    int group_before = -1;
    for (int number = blockIdx.x; number < units; number += gridDim.x) {
      const int pair = p.shape.by_groups(number), group = number - pair * p.shape.groups;
      const int own = pair * kConsumers + c;
      const auto block = way.block(min(own, blocks - 1));
      places = way.places(block, warp, lane);
      if (group != group_before) begin_group(table, group);
      group_before = group;
      prepare(numbers[0]);
      multiply(numbers[0]);
      const auto target = way.target(block, group, warp, lane);
      // While the products of a stage run, the next one is cut.
      if (depth == 1) {
        add<true>();
      } else {
        prepare(numbers[1]);
        add<true>();
        multiply(numbers[1]);
#pragma unroll 1
        for (int k = 2; k < depth; k += 2) {
          prepare(numbers[0]);
          add<false>();
          multiply(numbers[0]);
          if (k + 1 == depth) break;
          prepare(numbers[1]);
          add<false>();
          multiply(numbers[1]);
        }
        add<false>();
      }
      if (own >= blocks) continue;
      if (unit[0] == 0 && unit[1] == 0) {
        way.template store<true>(sum, target, group, lane, table);
      } else {
        unscale(table);
        way.store(sum, target, group, lane, table);
      }
    }
  }
};

// --- Packing ---------------------------------------------------------------------------------

// Numbers of K in TF32's order, which `weight_at` speaks of: two of its steps are one of FP16, and
// 4 numbers of it, with 4 of the other half between them, are 8.
template <typename Way>
__device__ __forceinline__ uint32_t weight_bits(const PatchParams& p, const float* weight,
                                                int stage, int step, int half, int column, int i) {
  const int64_t at = Way::weight_at(p, stage, 2 * step + half, i % 2, column, i / 2);
  return at < 0 ? 0 : __float_as_uint(weight[at]);
}

// The scale of each column, a warp each, as what its sums are to be multiplied with.
template <typename Way>
__global__ void sm90_patch_scale(const __grid_constant__ PatchParams p,
                                 const float* __restrict__ weight, float* factors) {
  constexpr int kStageNumbers = kHalfSteps * 16;
  const int column = (blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32;
  if (column >= column_groups(p) * p.tile_n) return;
  uint32_t most = 0;
  for (int k = lane; k < Way::depth(p) * kStageNumbers; k += 32) {
    const int inside = k % kStageNumbers;
    most = max(most, finite_size(weight_bits<Way>(p, weight, k / kStageNumbers, inside / 16,
                                                  inside / 8 % 2, column, inside % 8)));
  }
  most = __reduce_max_sync(~0u, most);
  if (lane == 0) factors[column] = power_of_two(-scale_of(most));
}

// [group of columns][stage][part][step][half][column][8 numbers of K]
template <typename Way>
__global__ void sm90_patch_pack_strict(const __grid_constant__ PatchParams p,
                                       const float* __restrict__ weight, uint4* __restrict__ packed,
                                       const float* __restrict__ factors) {
  const int column = threadIdx.x + blockIdx.x * blockDim.x;
  const int half = blockIdx.y % 2, i = blockIdx.y / 2 % kSplitSteps;
  const int stage = blockIdx.y / (2 * kSplitSteps);
  if (column >= column_groups(p) * p.tile_n) return;
  const float scale = 1.f / factors[column];
  alignas(16) uint32_t piece[4];
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    float two[2];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      two[n] = scale * __uint_as_float(weight_bits<Way>(p, weight, stage, i % kHalfSteps, half,
                                                        column, 2 * k + n));
    }
    piece[k] = cut_weights(two[0], two[1], i / kHalfSteps);
  }
  const int group = column / p.tile_n;
  const int64_t steps = static_cast<int64_t>(Way::depth(p)) * kSplitSteps;
  packed[((group * steps + stage * kSplitSteps + i) * 2 + half) * p.tile_n + column -
         group * p.tile_n] = *reinterpret_cast<const uint4*>(piece);
}

}  // namespace upconv::patch
