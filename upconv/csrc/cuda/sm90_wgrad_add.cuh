// Hopper kernel for the weight's gradient: the sums of all blocks that share the pixels of a job
// are added up, in an order that is always the same.
//
// Two ways. Where few weights have many sums, each block has one accumulator of 128 threads, and
// four teams share the workers where there are many. Where many weights have few sums, single
// weights all over the tensor would take most of the time (35 us for two million of them): there a
// block has all taps of 8 input and 64 output channels, and writes rows that follow each other.
// What counts in either is the latency of a block, above all that of reading the plan: it is far
// larger than the cache for parameters.
#pragma once

#include "ordered_sum.cuh"
#include "sm90_wgrad_sums.cuh"

namespace upconv::wgrad {

// --- Configuration ---------------------------------------------------------------------------

constexpr int kTeam = 128, kTeams = 4, kAddThreads = kTeam * kTeams;
constexpr int kRowInputs = 8;     // input channels of a block that writes rows
constexpr int kFewWorkers = 3;    // with more, a row takes too long
constexpr int kManyWorkers = 32;  // with fewer, teams cost more than they gain
constexpr int kBatch = 16;        // workers that a thread reads from at a time
constexpr int kMostRowTaps = 20;  // of a weight written in rows: 43 KB of shared memory

// In shared memory, taps of neighbouring channels are on different banks.
__host__ __device__ inline int tap_pitch(const WgradParams& p) { return p.taps | 1; }
__host__ __device__ inline int input_pitch(const WgradParams& p) {
  return kRows * tap_pitch(p) + 4;
}
__host__ __device__ inline int row_blocks(const WgradParams& p) {
  return p.channel_blocks * (p.tile_n / kRowInputs) * ((p.out_channels + kRows - 1) / kRows);
}
// As many blocks as there are multiprocessors, or nearly.
__host__ __device__ inline bool writes_rows(const WgradParams& p) {
  return p.in_group == p.in_channels && p.taps <= kMostRowTaps && row_blocks(p) >= 96 &&
         p.workers <= kFewWorkers && p.out_channels <= kRows * kWgradBlocks;
}
inline int add_threads(const WgradParams& p) {
  return writes_rows(p) || p.workers >= kManyWorkers ? kAddThreads : kTeam;
}
__host__ __device__ inline int weight_blocks(const WgradParams& p) {
  if (writes_rows(p)) return row_blocks(p);
  return p.jobs * p.channel_blocks * p.consumers * p.groups * p.run * (p.tile_n / 2);
}
// A block for each row of the planes: channels may be spread over all of them.
inline int add_blocks(const WgradParams& p) {
  return weight_blocks(p) + (p.sums ? (p.out_channels + p.rows - 1) / p.rows * p.rows : 0);
}
inline int add_bytes(const WgradParams& p) {
  const int rows = writes_rows(p) ? kRowInputs * input_pitch(p) : 0;
  return max(4 * rows, 8 * kAddThreads);
}

// --- Sums of workers -------------------------------------------------------------------------

// One accumulator of a thread of every `step`-th worker of a job.
template <int kMany>
__device__ __forceinline__ float worker_sum(const WgradParams& p, int number, int channels, int at,
                                            int worker, int step) {
  const int64_t block_sums =
      static_cast<int64_t>(p.consumers) * p.groups * p.run * (p.tile_n / 2) * kTeam;
  const float* source = p.workspace + static_cast<int64_t>(at) * kTeam + threadIdx.x % kTeam;
  return ordered_sum<kMany, float>(worker, p.job[number].workers, step, [&](int each) {
    return source[block_of(p, each, number, channels) * block_sums];
  });
}

// The channels of accumulator `r` of this thread's share of a run.
__device__ __forceinline__ int out_channel(const WgradParams& p, const WgradRun& run, int r) {
  return channel_of_row(p, run.channel + threadIdx.x % 32 / 4 + r / 2 % 2 * 8);
}
__device__ __forceinline__ int in_channel(int r) { return r / 4 * 8 + threadIdx.x % 4 * 2 + r % 2; }

// --- One accumulator a block -----------------------------------------------------------------

template <typename Operand>
__device__ __forceinline__ void add_accumulator(const WgradParams& p, float* shared) {
  const int half = p.tile_n / 2, sums = p.groups * p.run * half;
  int rest = blockIdx.x;
  const int i = rest % sums;
  rest /= sums;
  const int c = rest % p.consumers;
  rest /= p.consumers;
  const int number = rest % p.jobs, channels = rest / p.jobs;
  const int team = threadIdx.x / kTeam, teams = blockDim.x / kTeam;
  const WgradJob& job = p.job[number];
  const WgradRun& run = job.run[c * p.groups + i / half / p.run][threadIdx.x % kTeam / 32];
  const int tap = i / half % p.run;
  const bool there = c < job.consumers && tap < run.count;
  shared[threadIdx.x] =
      there ? worker_sum<kBatch>(p, number, channels, c * sums + i, team, teams) : 0.f;
  __syncthreads();
  if (team > 0 || !there) return;
  float sum = shared[threadIdx.x];
  for (int k = 1; k < teams; ++k) sum += shared[k * kTeam + threadIdx.x];
  const int out = out_channel(p, run, i % half), in = channels * p.tile_n + in_channel(i % half);
  if (out >= p.out_channels || in >= p.in_channels) return;
  // What pairs channels of different groups is not stored.
  const int group = out / p.out_group;
  if (group != in / p.in_group) return;
  static_cast<typename Operand::Element*>(
      p.gw)[(static_cast<int64_t>(in - group) * p.out_group + out) * p.taps + run.tap +
            tap * p.tap_step] = Operand::from_float(sum);
}

// --- Rows ------------------------------------------------------------------------------------

template <typename Operand>
__device__ __forceinline__ void add_rows(const WgradParams& p, float* shared) {
  const int half = p.tile_n / 2, sums = p.groups * p.run * half;
  const int outs = (p.out_channels + kRows - 1) / kRows, eights = p.tile_n / kRowInputs;
  const int first_out = blockIdx.x % outs * kRows;
  const int eight = blockIdx.x / outs % eights, channels = blockIdx.x / outs / eights;
  const int team = threadIdx.x / kTeam, warp = threadIdx.x % kTeam / 32;
  const int slots = p.consumers * p.groups, items = slots * p.run;
  const int first = p.first_job[first_out / kRows], end = p.end_job[first_out / kRows];
  for (int item = team; item < (end - first) * items; item += kTeams) {
    const int number = first + item / items, tap = item % p.run, slot = item % items / p.run;
    const WgradRun& run = p.job[number].run[slot][warp];
    if (tap >= run.count || run.channel / kRows * kRows != first_out) continue;
    const int at = slot / p.groups * sums + (slot % p.groups * p.run + tap) * half + eight * 4;
    float sum[4];
#pragma unroll
    for (int r = 0; r < 4; ++r) sum[r] = worker_sum<kFewWorkers>(p, number, channels, at + r, 0, 1);
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const int place = out_channel(p, run, r) - first_out;
      shared[in_channel(r) * input_pitch(p) + place * tap_pitch(p) + run.tap + tap * p.tap_step] =
          sum[r];
    }
  }
  __syncthreads();
  const int row = min(kRows, p.out_channels - first_out) * p.taps;
  for (int i = threadIdx.x; i < row; i += kAddThreads) {
    const int out = i / p.taps, from = out * tap_pitch(p) + i - out * p.taps;
    for (int k = 0; k < kRowInputs; ++k) {
      const int in = channels * p.tile_n + eight * kRowInputs + k;
      if (in >= p.in_channels) break;
      static_cast<typename Operand::Element*>(
          p.gw)[(static_cast<int64_t>(in) * p.out_channels + first_out) * p.taps + i] =
          Operand::from_float(shared[k * input_pitch(p) + from]);
    }
  }
}

// --- The bias's gradient ---------------------------------------------------------------------

// One block for each row of the planes, that is, for each channel.
template <typename Operand>
__device__ __forceinline__ void add_bias(const WgradParams& p, double* shared, int row) {
  const int out = channel_of_row(p, row);
  const int parts = SummedRow(p, 0).parts, rows = kProducers / parts;
  if (out >= p.out_channels) return;
  double sum = 0.;
  for (int number = 0; number < p.jobs; ++number) {
    const WgradJob& job = p.job[number];
    if (job.sums == 0 || job.sum_channel != row / kRows * kRows) continue;
    const int each = p.channel_blocks * parts;
    for (int i = threadIdx.x; i < job.workers * each; i += blockDim.x) {
      const int worker = i / each, rest = i - worker * each, channels = rest / parts;
      const int64_t block = block_of(p, worker, number, channels);
      sum += p.workspace[p.bias_at + block * kProducers + (rest - channels * parts) * rows +
                         row % kRows];
    }
  }
  shared[threadIdx.x] = sum;
  __syncthreads();
#pragma unroll 1
  for (int half = blockDim.x / 2; half > 0; half /= 2) {
    if (threadIdx.x < half) shared[threadIdx.x] += shared[threadIdx.x + half];
    __syncthreads();
  }
  if (threadIdx.x == 0)
    static_cast<typename Operand::Element*>(p.gb)[out] =
        Operand::from_float(static_cast<float>(shared[0]));
}

// --- The kernel ------------------------------------------------------------------------------

template <typename Operand>
__global__ void __launch_bounds__(kAddThreads)
    sm90_wgrad_add(const __grid_constant__ WgradParams p) {
  extern __shared__ __align__(1024) unsigned char memory[];
  float* shared = reinterpret_cast<float*>(memory);
  const int weights = weight_blocks(p);
  if (blockIdx.x >= weights) {
    return add_bias<Operand>(p, reinterpret_cast<double*>(memory), blockIdx.x - weights);
  }
  if (writes_rows(p)) return add_rows<Operand>(p, shared);
  add_accumulator<Operand>(p, shared);
}

}  // namespace upconv::wgrad
