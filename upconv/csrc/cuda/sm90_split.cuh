// Hopper kernel: float32 that must not be rounded, as sums of two FP16 numbers (`Split`).
//
// FP16 has TF32's 11 bits at twice its speed, but numbers from 2^-24 to 2^15 only. So everything is
// scaled (halves.cuh): the input by the largest number of the tensor, of which an error of 2^-52
// remains; the weights by the largest of each output channel.
// Where the input spans more than 2^40, the unit goes through it in several passes, each with the
// numbers of its band, 2^28 wide, and zeros for the others.
#pragma once

#include "halves.cuh"
#include "sm90_layout.cuh"

namespace upconv {

// --- The input -------------------------------------------------------------------------------

constexpr int kBandWidth = 28, kOneBand = 40;  // powers of two
constexpr int kRangeThreads = 512;
constexpr int kSumScale = 80;  // sums are so many powers of two larger than the products

// The numbers that a pass over the input takes, and their scale.
struct Band {
  float scale = 1;
  uint32_t least = 0, span = ~0u;  // sizes, as bits: from `least` on, so many

  // The number, or 0 where it is of another band.
  __device__ __forceinline__ uint32_t own(uint32_t bits) const {
    return (bits & 0x7fffffffu) - least < span ? bits : 0;
  }
};

// The bands of the input: one, and nothing to scale, for operands that are not split.
template <bool kSplit>
struct Bands {
  int largest = 0, passes = 1;  // exponent of the largest number, as its bits hold it

  __device__ __forceinline__ explicit Bands(const Shared& shared) {
    if constexpr (kSplit) {
      largest = static_cast<int>(shared.range[0] >> 23);
      const int spanned = largest - static_cast<int>(shared.range[1] + 1 >> 23);
      passes = spanned > kOneBand ? 1 + spanned / kBandWidth : 1;
    }
  }
  __device__ __forceinline__ int count() const { return kSplit ? passes : 1; }

  // First exponent above band `i`.
  __device__ __forceinline__ uint32_t end(int i) const {
    return static_cast<uint32_t>(largest - kBandWidth * i + 1) << 23;
  }
  __device__ __forceinline__ int scale(int i) const {
    return scale_of(static_cast<uint32_t>(largest - kBandWidth * i) << 23);
  }
  __device__ __forceinline__ Band band(int i) const {
    if (!kSplit) return {};
    const uint32_t least = i + 1 < passes ? end(i + 1) : 0;
    return {power_of_two(scale(i)), least, (i ? end(i) : ~0u) - least};
  }
  // What products of band `i` are multiplied with in the sums: 2^80 for the first band, so that
  // what is 2^200 smaller still counts.
  __device__ __forceinline__ float unit(int i) const {
    return power_of_two(scale(0) - scale(i) + 120) * power_of_two(kSumScale - 120);
  }
};

// The largest and the least size of a part of the input, without zeros and what is not finite: one
// less for the least, so that zeros become the largest number of all. From the end of the input on,
// so that the kernel that comes next finds its begin in L2.
struct SizeRange {
  uint32_t most = 0, least = ~0u;

  __device__ __forceinline__ void add(uint32_t bits) {
    const uint32_t counted = finite_size(bits);
    most = max(most, counted);
    least = min(least, counted - 1);
  }
  // All threads of a warp, to what others have found.
  __device__ __forceinline__ void join(uint32_t* found) const {
    const uint32_t warp_most = __reduce_max_sync(~0u, most);
    const uint32_t warp_least = __reduce_min_sync(~0u, least);
    if (threadIdx.x % 32 == 0) atomicMax(found, warp_most), atomicMin(found + 1, warp_least);
  }
};

template <typename Operand>
__global__ void __launch_bounds__(kRangeThreads)
    sm90_find_range(const uint32_t* x, int64_t count, uint2* ranges) {
  constexpr int kTogether = 4;
  SizeRange range;
  const uint4* vectors = reinterpret_cast<const uint4*>(x);
  const int64_t step = static_cast<int64_t>(kRangeBlocks) * kRangeThreads;
  int64_t i = count / 4 - 1 - (static_cast<int64_t>(blockIdx.x) * kRangeThreads + threadIdx.x);
  for (; i >= 0; i -= kTogether * step) {
    uint4 v[kTogether];
#pragma unroll
    for (int k = 0; k < kTogether; ++k) {
      v[k] = i >= k * step ? __ldg(vectors + i - k * step) : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int k = 0; k < kTogether; ++k) {
      range.add(v[k].x), range.add(v[k].y), range.add(v[k].z), range.add(v[k].w);
    }
  }
  if (blockIdx.x == 0 && threadIdx.x < count % 4) range.add(x[count - 1 - threadIdx.x]);
  __shared__ uint32_t found[2];
  if (threadIdx.x == 0) found[0] = 0, found[1] = ~0u;
  __syncthreads();
  range.join(found);
  __syncthreads();
  if (threadIdx.x == 0) ranges[blockIdx.x] = {found[0], found[1]};
}

// The range of the whole input, from its parts, for every block of threads of the main kernel.
__device__ __forceinline__ void join_ranges(const Sm90Params& p, const Shared& shared) {
  if (threadIdx.x == 0) shared.range[0] = 0, shared.range[1] = ~0u;
  __syncthreads();
  if (threadIdx.x < kRangeBlocks) {
    const uint2 part = p.ranges[threadIdx.x];
    SizeRange{part.x, part.y}.join(shared.range);
  }
}
static_assert(kRangeBlocks <= kThreads && kRangeBlocks % 32 == 0, "a thread for each part");

// --- The weights -----------------------------------------------------------------------------

// Behind the packed weights: the scale of each row, for each group, job and row block; then that of
// each output channel. All as powers of two.
__device__ __forceinline__ int* row_scales(const Sm90Params& p, const void* packed) {
  return reinterpret_cast<int*>(const_cast<char*>(static_cast<const char*>(packed)) +
                                packed_blocks(p) * kStageBytes);
}
__device__ __forceinline__ int row_place(const Sm90Params& p, int group, int job, int row) {
  return (group * p.jobs + job) * p.job_blocks * kRowsPerBlock + row;
}
__device__ __forceinline__ int* channel_scales(const Sm90Params& p, const void* packed) {
  return row_scales(p, packed) + row_place(p, p.conv_groups, 0, 0);
}

// Finds the scale of each output channel.
template <typename Operand>
__global__ void sm90_scale_channels(const __grid_constant__ Sm90Params p, const uint32_t* weight,
                                    void* packed) {
  const int channel = blockIdx.x, group = blockIdx.y;
  const int taps = p.axis[0].kernel * p.axis[1].kernel * p.axis[2].kernel;
  weight +=
      static_cast<int64_t>(group) * p.weight_group + static_cast<int64_t>(channel) * p.weight_out;
  SizeRange range;
  for (int i = threadIdx.x; i < p.in_channels * taps; i += blockDim.x) {
    range.add(weight[static_cast<int64_t>(i / taps) * p.weight_in + i % taps]);
  }
  __shared__ uint32_t found;
  if (threadIdx.x == 0) found = 0;
  __syncthreads();
  const uint32_t most = __reduce_max_sync(~0u, range.most);
  if (threadIdx.x % 32 == 0) atomicMax(&found, most);
  __syncthreads();
  if (threadIdx.x == 0) {
    channel_scales(p, packed)[group * p.out_channels + channel] = scale_of(found);
  }
}

// A sum as a number that is not scaled. In two steps: in one, either the power of two or what comes
// between could be too large or too small for a float.
__device__ __forceinline__ float unscaled(float sum, int scale) {
  const int exponent = -min(scale + kSumScale, 252), half = exponent / 2;
  return sum * power_of_two(half) * power_of_two(exponent - half);
}

}  // namespace upconv
