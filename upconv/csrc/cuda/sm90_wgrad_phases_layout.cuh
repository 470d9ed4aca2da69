// The weight's gradient of all phases of a row: sizes, units of work, shared memory. The idea,
// roles and pipelines are told in sm90_wgrad_phases.cuh.
#pragma once

#include "sm90_rings.cuh"
#include "sm90_wgrad_phases_params.h"
#include "sm90_wgrad_pixels.cuh"

namespace upconv::wgrad_phases {

using namespace wgrad_pixels;
using rings::kConsumers, rings::kConsumerWarps, rings::kMaxStages, rings::kThreads, rings::Slot;

// --- Configuration ---------------------------------------------------------------------------

constexpr int kInputBytes = 128;               // of one channel of x in a part
constexpr int kPiece = 16;                     // bytes
constexpr int kGroups = kInputBytes / kPiece;  // 16 bytes of x, and what of gy lies below them
constexpr int kTurnSteps = 2;                  // steps of K between two waits for the products
constexpr int kTurnGroups = 2 * kTurnSteps;
constexpr int kTaps = 4, kPairs = 2;           // of a quad; a product has two of them,
constexpr int kInner = 0, kOuter = 1;          // those in the middle, or the others
constexpr int kSumThreads = 128 * kConsumers;  // that add up the bias's gradient
constexpr int kHeader = 1024;                  // barriers

using Registers = uint32_t[kTurnSteps][kPairs][4];  // operand A of a turn

template <typename Operand>
constexpr int kPartPixels = kInputBytes / static_cast<int>(sizeof(typename Operand::Element));

__host__ __device__ inline int number_bytes(const PhasesWgradParams& p) {
  return p.operand == 0 ? 4 : 2;
}
__host__ __device__ inline int input_bytes(const PhasesWgradParams& p) {
  return p.tile_n * kInputBytes;
}

// Of a group, the registers that two rows of both products have: those of its quad's taps.
__device__ __forceinline__ void put_group(Registers& to, int i, const uint32_t (&taps)[kTaps]) {
  to[i / 2][kOuter][2 * (i % 2)] = ptx::computed_here(taps[0]);
  to[i / 2][kInner][2 * (i % 2)] = ptx::computed_here(taps[1]);
  to[i / 2][kInner][2 * (i % 2) + 1] = ptx::computed_here(taps[2]);
  to[i / 2][kOuter][2 * (i % 2) + 1] = ptx::computed_here(taps[3]);
}

// --- Units of work ---------------------------------------------------------------------------

inline int tap_rows(const PhasesWgradParams& p) { return p.kernel_z * p.kernel_y; }
// A job has some quads (four taps side by side) of as many channels of gy as make 64 of them.
inline int windows(const PhasesWgradParams& p) {
  return (p.kernel_x + kTaps - 1) / kTaps / p.job_quads;
}
inline int block_channels(const PhasesWgradParams& p) { return kGradRows / p.job_quads; }
inline int gradient_blocks(const PhasesWgradParams& p) {
  return (p.out_channels + block_channels(p) - 1) / block_channels(p);
}
inline int input_blocks(const PhasesWgradParams& p) {
  return (p.in_channels + p.tile_n - 1) / p.tile_n;
}
inline int job_count(const PhasesWgradParams& p) {
  return tap_rows(p) * windows(p) * gradient_blocks(p) * input_blocks(p);
}
__host__ __device__ inline int unit_count(const PhasesWgradParams& p) {
  return p.shape.jobs * p.workers;
}
inline PhasesWgradShape shape_of(const PhasesWgradParams& p) {
  PhasesWgradShape s;
  s.row_parts = (p.in_w * number_bytes(p) + kInputBytes - 1) / kInputBytes;
  s.high = (p.in_h + p.rows - 1) / p.rows;
  // All that a job has: parts of rows, blocks of rows of an image, or runs of any images.
  int64_t parts = static_cast<int64_t>(s.high) * s.row_parts * p.batch * p.in_d;
  if (p.runs) parts = (parts + p.runs - 1) / p.runs;
  s.share = static_cast<int>(parts / p.workers);
  s.longer = static_cast<int>(parts % p.workers);
  s.rows = tap_rows(p);
  s.windows = windows(p);
  s.quads = s.windows * p.job_quads;
  s.block_channels = block_channels(p);
  s.gradient_blocks = gradient_blocks(p);
  s.input_blocks = input_blocks(p);
  s.jobs = job_count(p);
  s.bias_rows = p.stride_z * p.stride_y;
  s.worker_step = static_cast<int64_t>(s.jobs) * p.tile_n * kGradRows;
  s.by_rows = Divider(s.rows);
  s.by_quads = Divider(s.quads);
  s.by_job_quads = Divider(p.job_quads);
  s.by_out_channels = Divider(p.out_channels);
  s.by_block_channels = Divider(s.block_channels);
  s.by_tile_n = Divider(p.tile_n);
  s.by_bias_rows = Divider(s.bias_rows);
  s.by_stride_y = Divider(p.stride_y);
  s.by_input_blocks = Divider(s.input_blocks);
  s.by_jobs = Divider(s.jobs);
  s.by_windows = Divider(s.windows);
  s.by_gradient_blocks = Divider(s.gradient_blocks);
  s.by_kernel_y = Divider(p.kernel_y);
  s.by_row_parts = Divider(s.row_parts);
  s.by_high = Divider(s.high);
  s.by_in_d = Divider(p.in_d);
  return s;
}

// One thread block's share: some parts of all, for quads of a row of taps and a block of channels
// each of x and of gy.
template <typename Operand>
struct Unit {
  int row_z, row_y, window;  // the row of taps, and which of its quads
  int out, in, first, end;   // blocks of channels, parts

  __device__ __forceinline__ Unit(const PhasesWgradParams& p, int number) {
    const PhasesWgradShape& s = p.shape;
    const int worker = s.by_jobs(number), job = number - worker * s.jobs;
    const int wide = s.by_rows(job), row = job - wide * s.rows, blocks = s.by_windows(wide);
    row_z = s.by_kernel_y(row);
    row_y = row - row_z * p.kernel_y;
    window = wide - blocks * s.windows;
    in = s.by_gradient_blocks(blocks);
    out = blocks - in * s.gradient_blocks;
    first = worker * s.share + min(worker, s.longer);
    end = first + s.share + (worker < s.longer ? 1 : 0);
  }
  // Do the two inner taps of this row and its like meet each number of gy once?
  __device__ __forceinline__ bool adds(const PhasesWgradParams& p) const {
    const int z = row_z - p.pad_z, y = row_y - p.pad_y;
    return p.sums && z >= 0 && z < p.stride_z && y >= 0 && y < p.stride_y;
  }
};

// Where a part begins.
template <typename Operand>
struct Part {
  int image, z, y, x;

  __device__ __forceinline__ Part(const PhasesWgradParams& p, int number) {
    const PhasesWgradShape& s = p.shape;
    const int row = s.by_row_parts(number), slice = s.by_high(row);
    image = s.by_in_d(slice);
    z = slice - image * p.in_d;
    y = (row - slice * s.high) * p.rows;
    x = (number - row * s.row_parts) * kPartPixels<Operand>;
  }
  __device__ __forceinline__ void advance(const PhasesWgradParams& p) {
    if ((x += kPartPixels<Operand>) < p.in_w) return;
    x = 0;
    if ((y += p.rows) < p.in_h) return;
    y = 0;
    if (++z < p.in_d) return;
    z = 0;
    ++image;
  }
};

// Sums in the workspace: [unit][channel of x][channel of gy][quad][tap], and behind all of them the
// bias's, as float64: [unit][consumers' thread].
__host__ __device__ inline int64_t unit_sums(const PhasesWgradParams& p) {
  return static_cast<int64_t>(p.tile_n) * kGradRows * kTaps;
}
__host__ __device__ inline int64_t bias_sums(const PhasesWgradParams& p) {
  return p.sums ? static_cast<int64_t>(unit_count(p)) * kSumThreads : 0;
}
__host__ __device__ inline int64_t workspace_bytes(const PhasesWgradParams& p) {
  return unit_count(p) * unit_sums(p) * 4 + bias_sums(p) * 8;
}
__device__ __forceinline__ double* bias_at(const PhasesWgradParams& p) {
  return reinterpret_cast<double*>(p.workspace + unit_count(p) * unit_sums(p));
}

struct Shared {
  uint32_t full, empty, input, gradient;

  __device__ __forceinline__ Shared(const PhasesWgradParams& p, unsigned char* memory) {
    full = ptx::shared_address(memory);
    empty = full + 8 * kMaxStages;
    input = full + kHeader;
    gradient = input + p.stages * input_bytes(p);
  }
  // By all threads of a block. So many bytes of each stage are zero where nobody copies to.
  __device__ __forceinline__ void begin(const PhasesWgradParams& p, int bytes, int arrivals) const {
    if (threadIdx.x == 0) {
      for (int i = 0; i < p.stages; ++i) {
        ptx::barrier_init(full + 8 * i, arrivals);
        ptx::barrier_init(empty + 8 * i, kConsumerWarps);
      }
      ptx::barrier_init_fence();
    }
    for (int i = threadIdx.x; i < p.stages * bytes / kPiece; i += kThreads)
      ptx::store_shared(gradient + i * kPiece, uint4{0, 0, 0, 0});
    __syncthreads();
  }
};

// Starts TMA for x. Whole rows follow each other.
template <typename Operand>
__device__ __forceinline__ void start_input(const PhasesWgradParams& p, const Shared& shared,
                                            const Slot& slot, const CUtensorMap& x,
                                            const Part<Operand>& part, int block, uint32_t full) {
  const bool whole = p.rows > 1;
  ptx::box_copy(shared.input + slot.index * input_bytes(p), x, whole ? part.y * p.in_w : part.x,
                whole ? 0 : part.y, part.z, block * p.tile_n, part.image, full);
}

// One thread feeds all stages by TMA: `fetch` starts the boxes of gy, `bytes` of them.
template <typename Operand, typename Fetch>
__device__ __forceinline__ void feed_parts(const PhasesWgradParams& p, const Shared& shared,
                                           const CUtensorMap& x, int bytes, const Fetch& fetch) {
  if (threadIdx.x / 32 != kConsumerWarps || !ptx::elected()) return;
  Slot slot;
  for (int number = blockIdx.x; number < unit_count(p); number += gridDim.x) {
    const Unit<Operand> unit(p, number);
    Part<Operand> part(p, unit.first);
#pragma unroll 1
    for (int i = unit.first; i < unit.end; ++i) {
      const uint32_t full = shared.full + 8 * slot.index;
      ptx::barrier_wait(shared.empty + 8 * slot.index, slot.parity ^ 1);
      ptx::barrier_arrive_expect(full, input_bytes(p) + bytes);
      start_input(p, shared, slot, x, part, unit.in, full);
      fetch(unit, part, slot.index, full);
      part.advance(p);
      slot.advance(p.stages);
    }
  }
}

// A box of gy: from a word of the row below `row` of the part on, some channels from `channel` on.
// Where there is no such row, there is no such image.
template <typename Operand>
__device__ __forceinline__ void fetch_below(const PhasesWgradParams& p, const Unit<Operand>& unit,
                                            const Part<Operand>& part, int row, int word,
                                            int channel, uint32_t to, const CUtensorMap& gy,
                                            uint32_t full) {
  const int z = part.z * p.stride_z + unit.row_z - p.pad_z;
  const int y = (part.y + row) * p.stride_y + unit.row_y - p.pad_y;
  ptx::box_copy(to, gy, word, y, z, channel, part.y + row < p.in_h ? part.image : p.batch, full);
}

}  // namespace upconv::wgrad_phases
