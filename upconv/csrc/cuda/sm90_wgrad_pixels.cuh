// What the Hopper kernels for the weight's gradient share whose operand A, grad_output, goes
// through registers: 64 channels of it, a pair of taps at a time.
#pragma once

#include "ordered_sum.cuh"
#include "ptx.cuh"
#include "sm90_layout.cuh"

namespace upconv::wgrad_pixels {

constexpr int kGradRows = 64;     // channels of gy in a block
constexpr int kAddThreads = 256;  // of a block that adds up, in one team,
constexpr int kMostTeams = 4;     // or in several that share the workers,
constexpr int kManyWorkers = 16;  // if there are so many of these
template <int kTeams>
constexpr int kBiasThreads = 64 * kTeams;  // of them, for a channel's bias
template <int kTeams>
constexpr int kBatch = kTeams > 1 ? 8 : 4;  // workers that a thread reads from at a time,
template <int kTeams>
constexpr int kAddBlocks = kTeams > 1 ? 4 : 6;  // of a multiprocessor: registers for so many

// Of 8 rows of a product, the channel of gy that one has, and the row that a channel has: those
// with even numbers come first. What half a warp loads then lies on different banks.
__host__ __device__ inline int even_first(int row) { return row < 4 ? 2 * row : 2 * row - 7; }
__host__ __device__ inline int row_of(int channel) {
  return channel % 2 ? channel / 2 + 4 : channel / 2;
}

template <typename Operand>
__device__ __forceinline__ float number(uint32_t bits) {
  const unsigned short half = static_cast<unsigned short>(bits);
  return Operand::to_float(*reinterpret_cast<const typename Operand::Element*>(&half));
}
// The sum of the numbers in 8 bytes.
template <typename Operand>
__device__ __forceinline__ float total(uint2 both) {
  if constexpr (sizeof(typename Operand::Element) == 4)
    return __uint_as_float(both.x) + __uint_as_float(both.y);
  else
    return (number<Operand>(both.x) + number<Operand>(both.x >> 16)) +
           (number<Operand>(both.y) + number<Operand>(both.y >> 16));
}

// Whose turn is it to add up a part of gy? That of every block of x's channels, which all read it,
// one after the other.
struct Turns {
  int next, step;

  __device__ __forceinline__ Turns(int first, int end, int block, int blocks, bool wanted) {
    step = blocks;
    const int late = (first + step - block) % step;
    next = wanted ? first + (late ? step - late : 0) : end;
  }
  // Asked for each part in turn.
  __device__ __forceinline__ bool mine(int part) {
    if (part != next) return false;
    next += step;
    return true;
  }
};

// --- Adding up -------------------------------------------------------------------------------

inline int teams_of(int workers) { return workers >= kManyWorkers ? kMostTeams : 1; }

// Blocks that so many threads' taps take.
inline int add_blocks(int taps, int teams) {
  const int each = kAddThreads / teams;
  return (taps + each - 1) / each;
}
// The number of a thread's taps.
template <int kTeams>
__device__ __forceinline__ int own_taps(int block) {
  constexpr int kEach = kAddThreads / kTeams;
  return block * kEach + threadIdx.x % kEach;
}

// Some taps of all workers, which the teams of a block share: the first team has the sums. `from`
// is the first worker's, `step` the way to the next.
template <int kTeams, typename Taps>
__device__ __forceinline__ Taps add_workers(const Taps* from, int64_t step, int workers,
                                            Taps* shared) {
  constexpr int kEach = kAddThreads / kTeams;
  const int team = threadIdx.x / kEach;
  Taps sum = ordered_sum<kBatch<kTeams>, Taps>(team, workers, kTeams,
                                               [&](int worker) { return from[worker * step]; });
  if constexpr (kTeams > 1) {
    shared[threadIdx.x] = sum;
    __syncthreads();
    if (team > 0) return sum;
#pragma unroll
    for (int k = 1; k < kTeams; ++k) add(sum, shared[k * kEach + threadIdx.x]);
  }
  return sum;
}

// The sum of what the first threads of a block have, in the first of them.
template <int kThreads>
__device__ __forceinline__ double add_block(double sum, double* shared) {
  shared[threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.x == 0) {
#pragma unroll 8
    for (int i = 1; i < kThreads; ++i) sum += shared[i];
  }
  return sum;
}

}  // namespace upconv::wgrad_pixels
