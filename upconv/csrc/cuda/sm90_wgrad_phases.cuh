// The weight's gradient on Hopper for both phases of a row: stride 2, padding 1, 3 or 4 taps in it:
// gw[ci, co, k] = sum over images and pixels i of x[ci, i] * gy[co, i * stride + k - padding].
//
// The idea. Pixels are the reduced dimension K, in parts of 128 bytes of x: some of a row, or whole
// rows. N channels of x are the columns of a product (operand B, straight from TMA's box); its 64
// rows are two taps each of 32 channels of gy (operand A, from registers). Of pixel i the taps 1
// and 2 want gy at 2 i and 2 i + 1, the taps 0 and 3 at 2 i - 1 and 2 i + 2: two products, inner
// and outer, and a thread that loads four words has its rows of both. A register may be loaded from
// anywhere, so that shifts and phases cost nothing. Of a kernel of 3 the fourth tap is computed in
// vain.
//
// A part of gy has 32 bytes below 16 bytes of x (a "group"); loaders copy it in pieces of 16 bytes,
// which fits rows of any length (TMA takes as long for a short row as for a long one). Beside a row
// lie 16 bytes, of which the neighbours' word is used: zeros, or what is there where a row has
// several parts. Copies do not round to TF32; the consumers do.
//
// Thread blocks share the pixels ("workers"); each writes its sums to the workspace, and a second
// kernel adds them in a fixed order. Where the bias's gradient is wanted, those rows of taps that
// meet each row of gy once add it up on the way, in float64, and blocks of x's channels, which all
// read the same gy, take turns.
//
// Roles: consumers  warps 0-7: two warpgroups, 32 channels of gy each
//        loaders    warps 8-11: gy; one thread of them starts TMA for x
// Pipelines: full[stage]   the copies of 128 loaders, and x
//            empty[stage]  the 8 warps of the consumers
#pragma once

#include "sm90_rings.cuh"
#include "sm90_wgrad_phases_params.h"
#include "sm90_wgrad_pixels.cuh"
#include "wgmma_registers.cuh"

namespace upconv::wgrad_phases {

using namespace wgrad_pixels;
using rings::kConsumers, rings::kConsumerWarps, rings::kMaxStages, rings::kThreads, rings::Slot;

// --- Configuration ---------------------------------------------------------------------------

constexpr int kLoaders = 128;
constexpr int kInputBytes = 128;                  // of one channel of x in a part
constexpr int kPiece = 16;                        // bytes that a loader copies
constexpr int kGroups = kInputBytes / kPiece;     // 32 bytes of gy each
constexpr int kPieces = 2 * kGroups;              // of one channel of gy in a part
constexpr int kSteps = kGroups / 2;               // products of a part, for each tap
constexpr int kTurnSteps = 2;                     // between two waits for the products
constexpr int kChannelStep = kLoaders / kPieces;  // from one of a loader's channels to the next
constexpr int kTaps = 4, kPairs = 2;              // of a row; a product has two of them,
constexpr int kInner = 0, kOuter = 1;             // those in the middle, or the others
constexpr int kSumThreads = 128 * kConsumers;     // that add up the bias's gradient
constexpr int kHeader = 1024;                     // barriers

template <typename Operand>
constexpr int kPartPixels = kInputBytes / static_cast<int>(sizeof(typename Operand::Element));

__host__ __device__ inline int input_bytes(const PhasesWgradParams& p) {
  return p.tile_n * kInputBytes;
}
// A channel of gy, with so many rows: 16 bytes before each of them; an odd number of pieces, so
// that 8 channels lie on different banks. What lies behind the last row is what lies before the
// next channel's first.
__host__ __device__ constexpr int channel_bytes(int rows) {
  return ((kPieces + rows) | 1) * kPiece;
}
__host__ __device__ constexpr int gradient_bytes(int rows) {
  return kGradRows * channel_bytes(rows) + kPiece;
}
__host__ __device__ inline int shared_bytes(const PhasesWgradParams& p) {
  return kHeader + p.stages * (input_bytes(p) + gradient_bytes(p.rows));
}

// The thread's channel of gy: rows r and r + 8 of a product are two taps of it. Of 8 channels those
// with even numbers come first: what half a warp loads then lies on different banks.
__device__ __forceinline__ int own_channel() {
  return threadIdx.x / 32 * 8 + even_first(threadIdx.x % 32 / 4);
}
// The first of the four threads that have a channel.
__host__ __device__ inline int thread_of(int channel) {
  return channel / 8 * 32 + row_of(channel % 8) * 4;
}

// --- Units of work ---------------------------------------------------------------------------

__host__ __device__ inline int tap_rows(const PhasesWgradParams& p) {
  return p.kernel_z * p.kernel_y;
}
__host__ __device__ inline int gradient_blocks(const PhasesWgradParams& p) {
  return (p.out_channels + kGradRows - 1) / kGradRows;
}
__host__ __device__ inline int input_blocks(const PhasesWgradParams& p) {
  return (p.in_channels + p.tile_n - 1) / p.tile_n;
}
__host__ __device__ inline int job_count(const PhasesWgradParams& p) {
  return tap_rows(p) * gradient_blocks(p) * input_blocks(p);
}
__host__ __device__ inline int unit_count(const PhasesWgradParams& p) {
  return job_count(p) * p.workers;
}
template <typename Operand>
__host__ __device__ int row_parts(const PhasesWgradParams& p) {
  return (p.in_w + kPartPixels<Operand> - 1) / kPartPixels<Operand>;
}

// One thread block's share: some parts of all, for a row of taps and a block of channels each of x
// and of gy.
template <typename Operand>
struct Unit {
  int row_z, row_y, out, in, first, end;  // the row of taps, blocks of channels, parts

  __device__ __forceinline__ Unit(const PhasesWgradParams& p, int number) {
    const int jobs = job_count(p), worker = number / jobs, job = number - worker * jobs;
    const int blocks = job / tap_rows(p), row = job - blocks * tap_rows(p);
    const int64_t columns = static_cast<int64_t>(p.batch) * p.in_d * row_parts<Operand>(p);
    const int64_t parts = columns * ((p.in_h + p.rows - 1) / p.rows);
    row_z = row / p.kernel_y;
    row_y = row - row_z * p.kernel_y;
    in = blocks / gradient_blocks(p);
    out = blocks - in * gradient_blocks(p);
    first = static_cast<int>(parts * worker / p.workers);
    end = static_cast<int>(parts * (worker + 1) / p.workers);
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
    const int row = number / row_parts<Operand>(p), high = (p.in_h + p.rows - 1) / p.rows;
    const int slice = row / high;
    image = slice / p.in_d;
    z = slice - image * p.in_d;
    y = (row - slice * high) * p.rows;
    x = (number - row * row_parts<Operand>(p)) * kPartPixels<Operand>;
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

// Sums in the workspace: [unit][channel of x][channel of gy][tap], and behind all of them the
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
  // By all threads of a block. What lies beside the rows is zero unless somebody copies.
  __device__ __forceinline__ void begin(const PhasesWgradParams& p) const {
    if (threadIdx.x == 0) {
      for (int i = 0; i < p.stages; ++i) {
        ptx::barrier_init(full + 8 * i, kLoaders + 1);
        ptx::barrier_init(empty + 8 * i, kConsumerWarps);
      }
      ptx::barrier_init_fence();
    }
    for (int i = threadIdx.x; i < p.stages * gradient_bytes(p.rows) / kPiece; i += kThreads)
      ptx::store_shared(gradient + i * kPiece, uint4{0, 0, 0, 0});
    __syncthreads();
  }
};

// --- Loaders ---------------------------------------------------------------------------------

template <typename Operand, int kRows>
struct Loader {
  using Element = typename Operand::Element;
  static constexpr int kNumbers = kPiece / sizeof(Element);  // of a piece
  static constexpr int kWord = 4 / sizeof(Element);
  static constexpr int kChannelBytes = channel_bytes(kRows);
  static constexpr int kRowPieces = kPieces / kRows;

  const PhasesWgradParams& p;
  const int thread, row, column, channel;  // in the part: of a loader's first piece
  const uint32_t place;
  const int64_t plane;  // numbers of a channel of gy

  __device__ __forceinline__ explicit Loader(const PhasesWgradParams& p)
      : p(p),
        thread(threadIdx.x - 128 * kConsumers),
        row(thread % kPieces / kRowPieces),
        column(thread % kRowPieces * kNumbers),
        channel(thread / kPieces),
        place(channel * kChannelBytes + (thread % kPieces + row + 1) * kPiece),
        plane(static_cast<int64_t>(p.out_d) * p.out_h * p.out_w) {}

  // Is there a row of gy below `row` of the part?
  __device__ __forceinline__ bool below(const Unit<Operand>& unit, const Part<Operand>& part,
                                        int row) const {
    const int z = part.z * p.stride_z + unit.row_z - p.pad_z;
    const int y = (part.y + row) * p.stride_y + unit.row_y - p.pad_y;
    return part.y + row < p.in_h && static_cast<unsigned>(z) < p.out_d &&
           static_cast<unsigned>(y) < p.out_h;
  }
  // Where its first number below the part is, or would be, of the unit's first channel.
  __device__ __forceinline__ int64_t start(const Unit<Operand>& unit,
                                           const Part<Operand>& part) const {
    const int64_t channels = static_cast<int64_t>(part.image) * p.out_channels;
    const int z = part.z * p.stride_z + unit.row_z - p.pad_z;
    const int y = part.y * p.stride_y + unit.row_y - p.pad_y;
    return (channels + unit.out * kGradRows) * plane +
           (static_cast<int64_t>(z) * p.out_h + y) * p.out_w + 2 * part.x;
  }

  // The loader's pieces from `from` on, one for each of its channels.
  template <bool kAll>
  __device__ __forceinline__ void copy(const Element* from, int channels, int bytes,
                                       uint32_t to) const {
    const int64_t step = bytes ? kChannelStep * plane : 0;
#pragma unroll
    for (int i = 0; i < kGradRows / kChannelStep; ++i) {
      const bool on = kAll || i < channels;
      ptx::copy_async<kPiece>(to + place + i * kChannelStep * kChannelBytes,
                              on ? from + i * step : p.gy, on ? bytes : 0);
    }
  }

  // The words before and behind a row, of one channel for two threads.
  __device__ __forceinline__ void copy_beside(int64_t start, int x, bool there, uint32_t to) const {
    const bool behind = thread % 2 != 0;
    const int own = thread / 2, at = behind ? 2 * kPartPixels<Operand> : -kWord;
    const bool on = there && 2 * x + at >= 0 && 2 * x + at < p.out_w;
    const uint32_t place = own * kChannelBytes + kPiece + (behind ? kPieces * kPiece : -4);
    ptx::copy_async<4>(to + place,
                       static_cast<const Element*>(p.gy) + (on ? start + own * plane + at : 0),
                       on ? 4 : 0);
  }

  __device__ __forceinline__ void run(const Shared& shared, const CUtensorMap& x) const {
    const bool starts = threadIdx.x / 32 == kConsumerWarps && ptx::elected();
    const bool several = row_parts<Operand>(p) > 1;
    const int64_t own = channel * plane + row * p.stride_y * p.out_w + column;
    Slot slot;
    for (int number = blockIdx.x; number < unit_count(p); number += gridDim.x) {
      const Unit<Operand> unit(p, number);
      const int left = p.out_channels - unit.out * kGradRows;
      const int channels = (left - channel + kChannelStep - 1) / kChannelStep;
      Part<Operand> part(p, unit.first);
#pragma unroll 1
      for (int i = unit.first; i < unit.end; ++i) {
        const uint32_t full = shared.full + 8 * slot.index;
        const uint32_t to = shared.gradient + slot.index * gradient_bytes(kRows);
        const int64_t first = start(unit, part);
        const bool there = below(unit, part, row) && 2 * part.x + column < p.out_w;
        ptx::barrier_wait(shared.empty + 8 * slot.index, slot.parity ^ 1);
        if (starts) {
          ptx::barrier_arrive_expect(full, input_bytes(p));
          ptx::box_copy(shared.input + slot.index * input_bytes(p), x,
                        kRows > 1 ? part.y * p.in_w : part.x, kRows > 1 ? 0 : part.y, part.z,
                        unit.in * p.tile_n, part.image, full);
        }
        const Element* from = static_cast<const Element*>(p.gy) + (there ? first + own : 0);
        if (left >= kGradRows) {
          copy<true>(from, channels, there ? kPiece : 0, to);
        } else {
          copy<false>(from, channels, there ? kPiece : 0, to);
        }
        if (kRows == 1 && several) {
          copy_beside(first, part.x, thread / 2 < left && below(unit, part, 0), to);
        }
        ptx::copy_async_arrive(full);
        part.advance(p);
        slot.advance(p.stages);
      }
    }
    ptx::copy_async_wait<0>();
  }
};

// --- Consumers -------------------------------------------------------------------------------

template <typename Operand, int N, int kRows>
struct Consumer {
  using Element = typename Operand::Element;
  static constexpr bool kWide = sizeof(Element) == 4;
  using Registers = uint32_t[kTurnSteps][kPairs][4];

  const PhasesWgradParams& p;
  const Shared& shared;
  // What a part begins with, in registers: computed anew it would take a fifth of the time.
  const uint32_t place,
      input;             // the thread's in the first stage's gy; that of x, as WGMMA wants it
  const int first_rows;  // of the warp's: one or zero
  double sum;            // of the bias's gradient
  float d[kPairs][N / 2];
  Registers a[2];

  __device__ __forceinline__ Consumer(const PhasesWgradParams& p, const Shared& shared)
      : p(p),
        shared(shared),
        place(ptx::pinned(shared.gradient + own_channel() * channel_bytes(kRows) + kPiece +
                          threadIdx.x % 4 * 8)),
        input(ptx::pinned(shared.input >> 4 | 1u << 16)),
        first_rows(ptx::pinned(threadIdx.x % 32 < 16 ? 1 : 0)) {}

  // Two registers of operand A for each pair of taps, from the thread's two words of a group and
  // those beside them. Lanes of the first rows read the one before first, the others the one
  // behind: 32 banks instead of 16. (16-bit types: a word has two numbers, a register two pixels.)
  __device__ __forceinline__ uint2 load_group(uint32_t at, uint32_t (&to)[kPairs][2]) const {
    uint2 both;
    uint32_t one, other;
    ptx::load_shared(both, at);
    ptx::load_shared(one, at + 8 - 12 * first_rows);
    ptx::load_shared(other, at - 4 + 12 * first_rows);
    const uint32_t before = first_rows ? one : other, behind = first_rows ? other : one;
    if constexpr (kWide) {
      to[kInner][0] = ptx::nearly_tf32(both.x);
      to[kInner][1] = ptx::nearly_tf32(both.y);
      to[kOuter][0] = ptx::nearly_tf32(before);
      to[kOuter][1] = ptx::nearly_tf32(behind);
    } else {
      to[kInner][0] = __byte_perm(both.x, both.y, 0x5410);
      to[kInner][1] = __byte_perm(both.x, both.y, 0x7632);
      to[kOuter][0] = __byte_perm(before, both.x, 0x7632);
      to[kOuter][1] = __byte_perm(both.y, behind, 0x5410);
    }
    return both;
  }

  // The steps of a turn.
  template <bool kAdds>
  __device__ __forceinline__ void load(Registers& to, uint32_t from, int turn) {
    float part = 0.f;
#pragma unroll
    for (int i = 0; i < 2 * kTurnSteps; ++i) {
      const int group = 2 * kTurnSteps * turn + i;
      uint32_t taps[kPairs][2];
      const uint2 both = load_group(from + group * 32 + group * kRows / kGroups * kPiece, taps);
      if constexpr (kAdds) part += total<Operand>(both);
#pragma unroll
      for (int k = 0; k < 2 * kPairs; ++k)
        to[i / 2][k / 2][2 * (i % 2) + k % 2] = ptx::computed_here(taps[k / 2][k % 2]);
    }
    if constexpr (kAdds) sum += part;
  }
  __device__ __forceinline__ void load(Registers& to, uint32_t from, int turn, bool adds) {
    if (adds) {
      load<true>(to, from, turn);
    } else {
      load<false>(to, from, turn);
    }
  }

  __device__ __forceinline__ void multiply(const Registers& from, int stage, int turn) {
    // Rows of 128 bytes, swizzled (mode 1); 8 of them are 1024 bytes.
    const uint64_t high = static_cast<uint64_t>(1u << 30 | 8 * kInputBytes >> 4) << 32;
    const uint32_t low = input + stage * (N * kInputBytes >> 4);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kTurnSteps; ++step) {
#pragma unroll
      for (int k = 0; k < kPairs; ++k) {
        WgmmaRegisters<Operand, N>::run(d[k], from[step][k],
                                        high | (low + (turn * kTurnSteps + step) * 2));
      }
    }
    ptx::wgmma_commit();
  }

  // The parts of a unit, in two turns each: while products of one run, the other is loaded. A stage
  // is given back when the products after it have begun.
  __device__ __forceinline__ void reduce(const Unit<Operand>& unit, Slot& slot) {
    Turns turns(unit.first, unit.end, unit.in, input_blocks(p), unit.adds(p));
    int before = -1;
#pragma unroll 1
    for (int i = unit.first; i < unit.end; ++i) {
      const uint32_t from = place + slot.index * gradient_bytes(kRows);
      const bool adds = turns.mine(i);
      ptx::barrier_wait(shared.full + 8 * slot.index, slot.parity);
      load(a[0], from, 0, adds);
      multiply(a[0], slot.index, 0);
      ptx::wgmma_wait<1>();
      if (before >= 0) give_back(before);
      load(a[1], from, 1, adds);
      multiply(a[1], slot.index, 1);
      ptx::wgmma_wait<1>();
      before = slot.index;
      slot.advance(p.stages);
    }
    ptx::wgmma_wait<0>();
    if (before >= 0) give_back(before);
  }
  __device__ __forceinline__ void give_back(int stage) const {
    if (threadIdx.x % 32 == 0) ptx::barrier_arrive(shared.empty + 8 * stage);
  }

  // [channel of x][channel of gy][tap]: the lanes of 8 channels have 128 bytes in a row.
  __device__ __forceinline__ void store(int number) const {
    float4* to = reinterpret_cast<float4*>(p.workspace) + number * (unit_sums(p) / kTaps) +
                 threadIdx.x % 4 * 2 * kGradRows + own_channel();
#pragma unroll
    for (int i = 0; i < N / 4; ++i) {
      const int column = i / 2 * 8 + i % 2, at = i / 2 * 4 + i % 2;
      to[column * kGradRows] =
          float4{d[kOuter][at], d[kInner][at], d[kInner][at + 2], d[kOuter][at + 2]};
    }
  }

  __device__ __forceinline__ void run() {
    Slot slot;
    for (int number = blockIdx.x; number < unit_count(p); number += gridDim.x) {
      const Unit<Operand> unit(p, number);
      sum = 0.;
#pragma unroll
      for (int i = 0; i < kPairs * N / 2; ++i) d[i / (N / 2)][i % (N / 2)] = 0.f;
      reduce(unit, slot);
#pragma unroll
      for (int i = 0; i < kPairs * N / 2; ++i) ptx::keep_after_wait(d[i / (N / 2)][i % (N / 2)]);
      store(number);
      if (p.sums) bias_at(p)[static_cast<int64_t>(number) * kSumThreads + threadIdx.x] = sum;
    }
  }
};

// --- The kernel ------------------------------------------------------------------------------

template <typename Operand, int N, int kRows>
__global__ void __launch_bounds__(kThreads, 1)
    sm90_wgrad_phases(const __grid_constant__ PhasesWgradParams p,
                      const __grid_constant__ CUtensorMap x) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const Shared shared(p, memory);
  shared.begin(p);
  // 168 registers a thread, handed round: 2 x 208 + 88.
  if (threadIdx.x >= 128 * kConsumers) {
    ptx::give_registers<88>();
    Loader<Operand, kRows>(p).run(shared, x);
    return;
  }
  ptx::take_registers<208>();
  Consumer<Operand, N, kRows>(p, shared).run();
}

// --- Adding up -------------------------------------------------------------------------------

__host__ __device__ inline int64_t add_blocks(const PhasesWgradParams& p) {
  const int64_t rows = static_cast<int64_t>(p.in_channels) * p.out_channels * tap_rows(p);
  return (rows + kTeamThreads - 1) / kTeamThreads;
}

// A row of taps, of all workers.
template <typename Operand>
__device__ __forceinline__ void add_taps(const PhasesWgradParams& p, float4* shared) {
  const int64_t number =
      static_cast<int64_t>(blockIdx.x) * kTeamThreads + threadIdx.x % kTeamThreads;
  const int64_t pair = number / tap_rows(p);
  const int row = static_cast<int>(number - pair * tap_rows(p));
  const int in = static_cast<int>(pair / p.out_channels);
  const int out = static_cast<int>(pair - static_cast<int64_t>(in) * p.out_channels);
  const bool there = in < p.in_channels;
  const int64_t blocks = static_cast<int64_t>(in / p.tile_n) * gradient_blocks(p) + out / kGradRows;
  const int64_t unit = unit_sums(p) / kTaps;
  const float4* from = reinterpret_cast<const float4*>(p.workspace) +
                       (blocks * tap_rows(p) + row) * unit + in % p.tile_n * kGradRows +
                       out % kGradRows;
  const float4 sum = add_workers(from, job_count(p) * unit, there ? p.workers : 0, shared);
  if (threadIdx.x >= kTeamThreads || !there) return;
  const float taps[] = {sum.x, sum.y, sum.z, sum.w};
  auto* to = static_cast<typename Operand::Element*>(p.gw) + number * p.kernel_x;
  for (int k = 0; k < p.kernel_x; ++k) to[k] = Operand::from_float(taps[k]);
}

// The bias's gradient of a channel: all workers, blocks of x's channels, rows of taps that add, and
// the four threads of a channel.
template <typename Operand>
__device__ __forceinline__ void add_bias(const PhasesWgradParams& p, int channel, double* shared) {
  const int rows = p.stride_z * p.stride_y, thread = thread_of(channel % kGradRows);
  double sum = 0.;
  for (int i = threadIdx.x; i < p.workers * input_blocks(p) * rows * 4; i += blockDim.x) {
    const int row = i / 4 % rows, share = i / 4 / rows;
    const int worker = share / input_blocks(p), in = share - worker * input_blocks(p);
    const int tap_row = (p.pad_z + row / p.stride_y) * p.kernel_y + p.pad_y + row % p.stride_y;
    const int64_t blocks = static_cast<int64_t>(in) * gradient_blocks(p) + channel / kGradRows;
    const int64_t unit =
        static_cast<int64_t>(worker) * job_count(p) + blocks * tap_rows(p) + tap_row;
    sum += bias_at(p)[unit * kSumThreads + thread + i % 4];
  }
  sum = add_block(sum, shared);
  if (threadIdx.x > 0) return;
  static_cast<typename Operand::Element*>(p.gb)[channel] =
      Operand::from_float(static_cast<float>(sum));
}

template <typename Operand>
__global__ void __launch_bounds__(kTeamThreads* kMostTeams)
    sm90_wgrad_phases_add(const __grid_constant__ PhasesWgradParams p) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const int64_t weights = add_blocks(p);
  if (blockIdx.x >= weights) {
    const int channel = static_cast<int>(blockIdx.x - weights);
    return add_bias<Operand>(p, channel, reinterpret_cast<double*>(memory));
  }
  add_taps<Operand>(p, reinterpret_cast<float4*>(memory));
}

}  // namespace upconv::wgrad_phases
