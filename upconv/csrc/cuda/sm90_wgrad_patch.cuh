// The weight's gradient on Hopper where the kernel is the stride and patches are 2 wide:
// gw[ci, co, k] = sum over images and pixels i of x[ci, i] * gy[co, i * stride + k].
//
// The idea. Pixels are the reduced dimension K, in parts: 64 bytes of a row of x, and the 128 bytes
// of a row of gy that their patches have there. 64 channels of gy, of one row of the patch, are the
// rows of a product (operand A, from registers), N channels of x its columns (operand B, straight
// from the box as it lies in memory). Two taps that lie side by side are two products: one load of
// 8 bytes brings the same pixel for both (16-bit types: two pixels, whose halves change places).
// What is beyond a row or an image TMA makes zero, for gy, and for x unless its rows begin
// anywhere.
//
// Accumulators: two taps x 64 x N of each consumer. Thread blocks share the pixels ("workers");
// each writes its sums to the workspace, and a second kernel adds them in a fixed order. Where the
// bias's gradient is wanted, blocks of x's channels, which all read the same parts of gy, take
// turns to add them up on the way, in float64: these parts TMA does not round to TF32, the
// consumers do.
//
// Roles: consumers  warps 0-7: two warpgroups, each with a row of the patch and 64 channels of gy
//        feeders    one thread each of warps 8 and 9 for the consumers' boxes of gy, of 10 for x
// Pipelines: box_full, box_empty[consumer][stage]  as in sm90_patch.cuh
//            full, empty[stage]                    the same for x, which both consumers read
#pragma once

#include "sm90_patch_layout.cuh"
#include "sm90_wgrad_patch_params.h"
#include "sm90_wgrad_pixels.cuh"
#include "wgmma_registers.cuh"

namespace upconv::patch {

using namespace wgrad_pixels;

// --- Configuration ---------------------------------------------------------------------------

constexpr int kInputBytes = 64;    // of a row of x in a part
constexpr int kPartSteps = 2;      // products of a part, for each tap
constexpr int kRowTaps = 2;        // of a patch
constexpr int kGradHeader = 1024;  // barriers

template <typename Operand>
constexpr int kPartPixels = kInputBytes / static_cast<int>(sizeof(typename Operand::Element));

__host__ __device__ inline int input_bytes(const PatchWgradParams& p) {
  return p.tile_n * kInputBytes;
}
__host__ __device__ inline int shared_bytes(const PatchWgradParams& p) {
  return kGradHeader + kConsumers * p.box_stages * kBoxBytes + p.input_stages * input_bytes(p);
}

// --- Units of work ---------------------------------------------------------------------------

__host__ __device__ inline int patch_rows(const PatchWgradParams& p) { return p.step_z * p.step_y; }
// Rows of the patch and blocks of gy's channels; two make a job.
__host__ __device__ inline int row_blocks(const PatchWgradParams& p) {
  return (p.out_channels + kGradRows - 1) / kGradRows * patch_rows(p);
}
__host__ __device__ inline int job_pairs(const PatchWgradParams& p) {
  return (row_blocks(p) + kConsumers - 1) / kConsumers;
}
__host__ __device__ inline int job_count(const PatchWgradParams& p) {
  return job_pairs(p) * ((p.in_channels + p.tile_n - 1) / p.tile_n);
}
__host__ __device__ inline int unit_count(const PatchWgradParams& p) {
  return job_count(p) * p.workers;
}
// One thread block's share: some parts of all, for one block of x's channels and two of gy's rows.
template <typename Operand>
struct GradUnit {
  int pair, block, first, end;  // the block of x's channels

  __device__ __forceinline__ GradUnit(const PatchWgradParams& p, int number) {
    const PatchWgradShape& s = p.shape;
    const int worker = s.by_jobs(number), job = number - worker * s.jobs;
    block = s.by_pairs(job);
    pair = job - block * s.pairs;
    first = worker * s.share + min(worker, s.longer);
    end = first + s.share + (worker < s.longer);
  }
};

template <typename Operand>
__device__ __forceinline__ Turns turns_of(const PatchWgradParams& p,
                                          const GradUnit<Operand>& unit) {
  return {unit.first, unit.end, unit.block, p.shape.blocks, p.sums != 0};
}

// Where a part lies. A box begins on 16 bytes. Where every other row of x does not, but 8 bytes
// later, such a row's first part begins 8 bytes earlier, in the row before. What a part has of
// other rows meets zeros, since beyond a row of gy, whose rows do begin on 16 bytes, TMA finds
// nothing.
template <typename Operand>
struct GradPart {
  int image, z, y, x;
  int first;  // of all pixels of the image

  __device__ __forceinline__ GradPart(const PatchWgradParams& p, int number) {
    const PatchWgradShape& s = p.shape;
    const int row = s.by_row_parts(number), slice = s.by_in_h(row);
    image = s.by_in_d(slice);
    z = slice - image * p.in_d;
    y = row - slice * p.in_h;
    const int row_inside = z * p.in_h + y;
    x = (number - row * s.row_parts) * kPartPixels<Operand> - row_inside % 2 * s.lead;
    first = row_inside * p.in_w + x;
  }
};

// A consumer's channels of gy, and its row of the patch. Where there is none left: the last once
// more.
struct GradRows {
  int channel, z, y;

  __device__ __forceinline__ GradRows(const PatchWgradParams& p, int pair, int consumer) {
    const int block = min(pair * kConsumers + consumer, row_blocks(p) - 1);
    const int row = block % patch_rows(p);
    channel = block / patch_rows(p) * kGradRows;
    z = row / p.step_y;
    y = row - z * p.step_y;
  }
};

// Sums in the workspace: [unit][consumer][channel of x][channel of gy][tap], and behind all of them
// the bias's, as float64: [unit][thread of both consumers][2].
__host__ __device__ inline int64_t unit_sums(const PatchWgradParams& p) {
  return static_cast<int64_t>(kConsumers) * p.tile_n * kGradRows * kRowTaps;
}
__host__ __device__ inline int64_t bias_sums(const PatchWgradParams& p) {
  return p.sums ? static_cast<int64_t>(unit_count(p)) * kConsumers * 128 * 2 : 0;
}
__host__ __device__ inline int64_t workspace_bytes(const PatchWgradParams& p) {
  return unit_count(p) * unit_sums(p) * 4 + bias_sums(p) * 8;
}
__device__ __forceinline__ double* bias_at(const PatchWgradParams& p) {
  return reinterpret_cast<double*>(p.workspace + p.shape.units * unit_sums(p));
}

inline PatchWgradShape shape_of(const PatchWgradParams& p) {
  PatchWgradShape s;
  const int element = p.operand == 0 ? 4 : 2, part = kInputBytes / element;
  s.lead = p.in_w * element % 16 / element;
  s.row_parts = (p.in_w + s.lead + part - 1) / part;
  const int parts = p.batch * p.in_d * p.in_h * s.row_parts;
  s.share = parts / p.workers;
  s.longer = parts % p.workers;
  s.rows = patch_rows(p);
  s.pairs = job_pairs(p);
  s.jobs = job_count(p);
  s.units = unit_count(p);
  s.blocks = s.jobs / s.pairs;
  s.worker_step = s.jobs * (unit_sums(p) / kRowTaps);
  s.by_rows = Divider(s.rows);
  s.by_out_channels = Divider(p.out_channels);
  s.by_tile_n = Divider(p.tile_n);
  s.by_row_parts = Divider(s.row_parts);
  s.by_in_h = Divider(p.in_h);
  s.by_in_d = Divider(p.in_d);
  s.by_jobs = Divider(s.jobs);
  s.by_pairs = Divider(s.pairs);
  return s;
}

struct GradShared : Rings {
  uint32_t boxes, input;

  __device__ __forceinline__ GradShared(const PatchWgradParams& p, unsigned char* memory)
      : Rings(memory) {
    boxes = full + kGradHeader;
    input = boxes + kConsumers * p.box_stages * kBoxBytes;
  }
};

// --- Feeders ---------------------------------------------------------------------------------

template <typename Operand>
__device__ __forceinline__ void feed_gradient(const PatchWgradParams& p, const GradShared& shared,
                                              int c, const CUtensorMap& rounded,
                                              const CUtensorMap& exact) {
  Slot slot;
  for (int number = blockIdx.x; number < p.shape.units; number += gridDim.x) {
    const GradUnit<Operand> unit(p, number);
    const GradRows rows(p, unit.pair, c);
    Turns turns = turns_of(p, unit);
    for (int i = unit.first; i < unit.end; ++i) {
      const GradPart<Operand> part(p, i);
      const uint32_t full = shared.box_full_at(c, slot.index);
      ptx::barrier_wait(shared.box_empty_at(c, slot.index), slot.parity ^ 1);
      ptx::barrier_arrive_expect(full, kBoxBytes);
      const CUtensorMap& map = turns.mine(i) ? exact : rounded;
      ptx::box_copy(shared.boxes + (c * p.box_stages + slot.index) * kBoxBytes, map,
                    part.x * kRowTaps, part.y * p.step_y + rows.y, part.z * p.step_z + rows.z,
                    rows.channel, part.image, full);
      slot.advance(p.box_stages);
    }
  }
}

template <typename Operand>
__device__ __forceinline__ void feed_input(const PatchWgradParams& p, const GradShared& shared,
                                           const CUtensorMap& map) {
  Slot slot;
  for (int number = blockIdx.x; number < p.shape.units; number += gridDim.x) {
    const GradUnit<Operand> unit(p, number);
    for (int i = unit.first; i < unit.end; ++i) {
      const GradPart<Operand> part(p, i);
      const uint32_t full = shared.full + 8 * slot.index;
      ptx::barrier_wait(shared.empty + 8 * slot.index, slot.parity ^ 1);
      ptx::barrier_arrive_expect(full, input_bytes(p));
      const bool rows = p.shape.lead == 0;  // does the map know of them?
      ptx::box_copy(shared.input + slot.index * input_bytes(p), map, rows ? part.x : part.first,
                    rows ? part.y : 0, rows ? part.z : 0, unit.block * p.tile_n, part.image, full);
      slot.advance(p.input_stages);
    }
  }
}

// --- Consumers -------------------------------------------------------------------------------

template <typename Operand, int N>
struct GradConsumer {
  using Element = typename Operand::Element;
  static constexpr bool kWide = sizeof(Element) == 4;

  const PatchWgradParams& p;
  const GradShared& shared;
  const int c, warp, lane;
  Slot box, input;
  int box_before, input_before;  // the stage before; negative for none
  uint32_t place;                // the thread's in a box
  double sum[2];                 // of the bias's gradient
  float d[kRowTaps][N / 2];
  uint32_t a[2][kPartSteps][kRowTaps][4];

  __device__ __forceinline__ GradConsumer(const PatchWgradParams& p, const GradShared& shared)
      : p(p),
        shared(shared),
        c(threadIdx.x / 128),
        warp(threadIdx.x / 32 % 4),
        lane(threadIdx.x % 32) {
    const int channel = own_channel(), t = lane % 4;
    place = channel * kRowBytes + ((t / 2 ^ channel % 8) << 4) + t % 2 * 8;
  }

  // Rows r and r + 8 of a product are channels 8 apart.
  __device__ __forceinline__ int own_channel() const { return 16 * warp + even_first(lane / 4); }

  // Two taps of `half` a step's pixels, t and t + 4 of 8 in TF32. (16-bit types: pairs of pixels.)
  template <bool kAdds>
  __device__ __forceinline__ void load(uint32_t (&to)[kPartSteps][kRowTaps][4], uint32_t from) {
    const uint32_t at = from + place;
    float part[2] = {};
#pragma unroll
    for (int step = 0; step < kPartSteps; ++step) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int further = 0; further < 2; ++further) {
          uint2 both;
          const uint32_t piece = (4 * step + 2 * half) << 4;
          ptx::load_shared(both, (at ^ piece) + further * 8 * kRowBytes);
          if constexpr (kAdds) part[further] += total<Operand>(both);
          unpack<kAdds>(both, to[step][0][2 * half + further], to[step][1][2 * half + further]);
        }
      }
    }
    if constexpr (kAdds) sum[0] += part[0], sum[1] += part[1];
  }

  template <bool kRounds>
  __device__ static __forceinline__ void unpack(uint2 both, uint32_t& first, uint32_t& second) {
    if constexpr (kWide) {
      first = kRounds ? Operand::prepare(both.x) : both.x;
      second = kRounds ? Operand::prepare(both.y) : both.y;
    } else {
      // Here, and not between two products.
      first = ptx::computed_here(__byte_perm(both.x, both.y, 0x5410));
      second = ptx::computed_here(__byte_perm(both.x, both.y, 0x7632));
    }
  }

  __device__ __forceinline__ void give_back() const {
    if (lane != 0) return;
    ptx::barrier_arrive(shared.box_empty_at(c, box_before));
    ptx::barrier_arrive(shared.empty + 8 * input_before);
  }

  // One part; then the one before is over, and its registers and memory are free.
  template <int kSet>
  __device__ __forceinline__ void multiply(bool adds) {
    const uint32_t from = shared.boxes + (c * p.box_stages + box.index) * kBoxBytes;
    ptx::barrier_wait(shared.box_full_at(c, box.index), box.parity);
    if (adds) {
      load<true>(a[kSet], from);
    } else {
      load<false>(a[kSet], from);
    }
    ptx::barrier_wait(shared.full + 8 * input.index, input.parity);
    // Rows of 64 bytes, swizzled (mode 2); 8 of them are 512 bytes.
    const uint64_t high = static_cast<uint64_t>(2u << 30 | 8 * kInputBytes >> 4) << 32;
    const uint32_t low = (shared.input + input.index * input_bytes(p)) >> 4 | 1u << 16;
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kPartSteps; ++step) {
#pragma unroll
      for (int tap = 0; tap < kRowTaps; ++tap) {
        WgmmaRegisters<Operand, N>::run(d[tap], a[kSet][step][tap], high | (low + step * 2));
      }
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<1>();
    if (box_before >= 0) give_back();
    box_before = box.index, input_before = input.index;
    box.advance(p.box_stages);
    input.advance(p.input_stages);
  }

  // [channel of x][channel of gy][tap]: 8 lanes have 64 bytes in a row.
  __device__ __forceinline__ void store(int number) const {
    const int64_t first = static_cast<int64_t>(number * kConsumers + c) * (N * kGradRows);
    float* to = p.workspace + (first + lane % 4 * 2 * kGradRows + own_channel()) * kRowTaps;
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      const int column = i / 4 * 8 + i % 2, further = i / 2 % 2 * 8;
      *reinterpret_cast<uint2*>(to + (column * kGradRows + further) * kRowTaps) =
          uint2{__float_as_uint(d[0][i]), __float_as_uint(d[1][i])};
    }
  }

  __device__ __forceinline__ void run() {
    for (int number = blockIdx.x; number < p.shape.units; number += gridDim.x) {
      const GradUnit<Operand> unit(p, number);
      Turns turns = turns_of(p, unit);
      sum[0] = sum[1] = 0.;
#pragma unroll
      for (int i = 0; i < N / 2; ++i) d[0][i] = d[1][i] = 0.f;
      box_before = -1;
#pragma unroll 1
      for (int i = unit.first; i < unit.end; i += 2) {
        multiply<0>(turns.mine(i));
        if (i + 1 == unit.end) break;  // with a branch round it, ptxas would serialize the products
        multiply<1>(turns.mine(i + 1));
      }
      ptx::wgmma_wait<0>();
#pragma unroll
      for (int i = 0; i < N / 2; ++i) {
        ptx::keep_after_wait(d[0][i]);
        ptx::keep_after_wait(d[1][i]);
      }
      if (box_before >= 0) give_back();
      if (p.sums) {
        double* to =
            bias_at(p) + (static_cast<int64_t>(number) * (kConsumers * 128) + threadIdx.x) * 2;
        to[0] = sum[0], to[1] = sum[1];
      }
      store(number);
    }
  }
};

// --- The kernel ------------------------------------------------------------------------------

template <typename Operand, int N>
__global__ void __launch_bounds__(kThreads, 1)
    sm90_wgrad_patch(const __grid_constant__ PatchWgradParams p,
                     const __grid_constant__ CUtensorMap gy,
                     const __grid_constant__ CUtensorMap exact,
                     const __grid_constant__ CUtensorMap x) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const GradShared shared(p, memory);
  shared.begin();
  // 168 registers a thread, handed round: 2 x 232 + 40.
  if (threadIdx.x < 128 * kConsumers) {
    ptx::take_registers<232>();
    GradConsumer<Operand, N>(p, shared).run();
  } else {
    ptx::give_registers<40>();
    const int feeder = threadIdx.x / 32 - kConsumerWarps;
    if (feeder > kConsumers || !ptx::elected()) return;
    if (feeder == kConsumers) return feed_input<Operand>(p, shared, x);
    feed_gradient<Operand>(p, shared, feeder, gy, exact);
  }
}

// --- Adding up -------------------------------------------------------------------------------

// Two taps of a row of the patch, of all workers.
template <typename Operand, int kTeams>
__device__ __forceinline__ void add_taps(const PatchWgradParams& p, int share, float2* shared) {
  using Element = typename Operand::Element;
  const PatchWgradShape& s = p.shape;
  const int number = own_taps<kTeams>(share);
  const int pair = s.by_rows(number), row = number - pair * s.rows;
  const int in = s.by_out_channels(pair), out = pair - in * p.out_channels;
  const int in_block = s.by_tile_n(in), block = out / kGradRows * s.rows + row;
  const bool there = in < p.in_channels;
  const int64_t job = static_cast<int64_t>(in_block) * s.pairs + block / kConsumers;
  const int64_t column =
      (job * kConsumers + block % kConsumers) * p.tile_n + in - in_block * p.tile_n;
  const float2* from =
      reinterpret_cast<const float2*>(p.workspace) + column * kGradRows + out % kGradRows;
  const float2 sum = add_workers<kTeams>(from, s.worker_step, there ? p.workers : 0, shared);
  if (threadIdx.x >= kAddThreads / kTeams || !there) return;
  alignas(8) const Element two[] = {Operand::from_float(sum.x), Operand::from_float(sum.y)};
  using Vector = VectorOf<sizeof(two)>;
  static_cast<Vector*>(p.gw)[number] = *reinterpret_cast<const Vector*>(two);
}

// The bias's gradient of a channel: all rows of the patch, workers, blocks of x's channels, and the
// four threads of a row.
template <typename Operand, int kTeams>
__device__ __forceinline__ void add_bias(const PatchWgradParams& p, int channel, double* shared) {
  constexpr int kThreads = kBiasThreads<kTeams>;
  const PatchWgradShape& s = p.shape;
  const int inside = channel % kGradRows, thread = inside / 16 * 32 + row_of(inside % 8) * 4;
  const int all = threadIdx.x < kThreads ? s.rows * s.blocks * p.workers * 4 : 0;
  double sum = 0.;
  for (int i = threadIdx.x; i < all; i += kThreads) {
    const int share = s.by_rows(i / 4), row = i / 4 - share * s.rows;
    const int block = channel / kGradRows * s.rows + row;
    const int64_t unit = static_cast<int64_t>(share) * s.pairs + block / kConsumers;
    const int64_t at = (unit * kConsumers + block % kConsumers) * 128 + thread + i % 4;
    sum += bias_at(p)[at * 2 + inside / 8 % 2];
  }
  sum = add_block<kThreads>(sum, shared);
  if (threadIdx.x > 0) return;
  static_cast<typename Operand::Element*>(p.gb)[channel] =
      Operand::from_float(static_cast<float>(sum));
}

template <typename Operand, int kTeams>
__global__ void __launch_bounds__(kAddThreads, kAddBlocks<kTeams>)
    sm90_wgrad_patch_add(const __grid_constant__ PatchWgradParams p) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const int block = blockIdx.x, channels = p.sums ? p.out_channels : 0;
  if (block < channels)
    return add_bias<Operand, kTeams>(p, block, reinterpret_cast<double*>(memory));
  add_taps<Operand, kTeams>(p, block - channels, reinterpret_cast<float2*>(memory));
}

}  // namespace upconv::patch
