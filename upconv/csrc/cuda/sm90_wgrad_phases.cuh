// The weight's gradient on Hopper for all phases of a row: stride 2, padding 1, 3 or 4 taps in it,
// stride 4 or 8 with multiples of 4, or kernel and stride 2 x 2:
// gw[ci, co, k] = sum over images and pixels i of x[ci, i] * gy[co, i * stride + k - padding].
//
// The idea. Pixels are the reduced dimension K, in parts of 128 bytes of x: some of a row, or whole
// rows. N channels of x are the columns of a product (operand B, straight from TMA's box); its 64
// rows are two taps each of 32 channels of gy (operand A, from registers). Four taps side by side,
// a quad, are two products, inner and outer, and a thread that loads four words has its rows of
// both. A register may be loaded from anywhere, so that shifts and phases cost nothing. Of a kernel
// of 3 the fourth tap is computed in vain. How gy comes to shared memory and to registers is the
// work of a Way: Two (stride 2), Wide, or Square.
//
// Thread blocks share the pixels ("workers"); each writes its sums to the workspace, and a second
// kernel adds them in a fixed order. Where the bias's gradient is wanted, those rows of taps that
// meet each row of gy once add it up on the way, in float64, and blocks of x's channels, which all
// read the same gy, take turns.
//
// Roles: consumers  warps 0-7: two warpgroups, 32 channels of gy each
//        loaders    warps 8-11, or one thread of them: gy and x, by TMA or copies
// Pipelines: full[stage]   the copies of all loaders, and x
//            empty[stage]  the 8 warps of the consumers
#pragma once

#include "sm90_wgrad_phases_square.cuh"
#include "sm90_wgrad_phases_two.cuh"
#include "sm90_wgrad_phases_wide.cuh"
#include "wgmma_registers.cuh"

namespace upconv::wgrad_phases {

// --- Consumers -------------------------------------------------------------------------------

template <typename Way, int N>
struct Consumer {
  using Operand = typename Way::Operand;

  const PhasesWgradParams& p;
  const Shared& shared;
  const Way way;
  const uint32_t input;  // the first stage of x, as WGMMA wants it
  double sum;            // of the bias's gradient
  float d[kPairs][N / 2];
  Registers a[2];

  __device__ __forceinline__ Consumer(const PhasesWgradParams& p, const Shared& shared)
      : p(p), shared(shared), way(p), input(ptx::pinned(shared.input >> 4 | 1u << 16)) {}

  __device__ __forceinline__ void load(Registers& to, int stage, int turn, bool adds) {
    const uint32_t from = shared.gradient + stage * Way::kBytes;
    if (Way::kAddsBias && adds) {
      sum += way.template load<true>(to, from, turn);
    } else {
      way.template load<false>(to, from, turn);
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
    Turns turns(unit.first, unit.end, unit.in, p.shape.input_blocks,
                Way::kAddsBias && unit.adds(p));
    int before = -1;
#pragma unroll 1
    for (int i = unit.first; i < unit.end; ++i) {
      const bool adds = turns.mine(i);
      ptx::barrier_wait(shared.full + 8 * slot.index, slot.parity);
      load(a[0], slot.index, 0, adds);
      multiply(a[0], slot.index, 0);
      ptx::wgmma_wait<1>();
      if (before >= 0) give_back(before);
      load(a[1], slot.index, 1, adds);
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

  // [channel of x][channel of gy, quad][tap]: the lanes of 8 channels have 128 bytes in a row.
  __device__ __forceinline__ void store(int number) const {
    float4* to = reinterpret_cast<float4*>(p.workspace) + number * (unit_sums(p) / kTaps) +
                 threadIdx.x % 4 * 2 * kGradRows + Way::slot();
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

template <typename Way, int N>
__global__ void __launch_bounds__(kThreads, 1)
    sm90_wgrad_phases(const __grid_constant__ PhasesWgradParams p,
                      const __grid_constant__ CUtensorMap x,
                      const __grid_constant__ CUtensorMap gy) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const Shared shared(p, memory);
  shared.begin(p, Way::kZeroBytes, Way::kArrivals);
  // 168 registers a thread, handed round: 2 x 208 + 88.
  if (threadIdx.x >= 128 * kConsumers) {
    ptx::give_registers<88>();
    return Way::load_all(p, shared, x, gy);
  }
  ptx::take_registers<208>();
  Consumer<Way, N>(p, shared).run();
}

// --- Adding up -------------------------------------------------------------------------------

// A quad of a row of taps, of all workers. Threads go through the weight as it lies in memory: of
// the workspace, too, they read whole sectors, some channels of gy side by side.
template <typename Operand, int kTeams>
__device__ __forceinline__ void add_taps(const PhasesWgradParams& p, int block, float4* shared) {
  using Element = typename Operand::Element;
  const PhasesWgradShape& s = p.shape;
  const int number = own_taps<kTeams>(block);
  const int line = s.by_quads(number), quad = number - line * s.quads;
  const int pair = s.by_rows(line), row = line - pair * s.rows;
  const int in = s.by_out_channels(pair), out = pair - in * p.out_channels;
  const int in_block = s.by_tile_n(in), out_block = s.by_block_channels(out);
  const int window = s.by_job_quads(quad);
  const bool there = in < p.in_channels;
  const int blocks = in_block * s.gradient_blocks + out_block;
  const int job = (blocks * s.windows + window) * s.rows + row;
  const int slot = (out - out_block * s.block_channels) * p.job_quads + quad - window * p.job_quads;
  const int64_t column = static_cast<int64_t>(job) * p.tile_n + in - in_block * p.tile_n;
  const float4* from = reinterpret_cast<const float4*>(p.workspace) + column * kGradRows + slot;
  const float4 sum = add_workers<kTeams>(from, s.worker_step, there ? p.workers : 0, shared);
  if (threadIdx.x >= kAddThreads / kTeams || !there) return;
  alignas(16) const Element taps[] = {Operand::from_float(sum.x), Operand::from_float(sum.y),
                                      Operand::from_float(sum.z), Operand::from_float(sum.w)};
  if (p.kernel_x % kTaps == 0) {
    using Vector = VectorOf<sizeof(taps)>;
    static_cast<Vector*>(p.gw)[number] = *reinterpret_cast<const Vector*>(taps);
    return;
  }
  constexpr int kThree = kTaps - 1;
  Element* to = static_cast<Element*>(p.gw) + number * kThree;
#pragma unroll
  for (int k = 0; k < kThree; ++k) to[k] = taps[k];
}

// The bias's gradient of a channel: all workers, blocks of x's channels, rows of taps that add, and
// the four threads of a channel.
template <typename Operand, int kTeams>
__device__ __forceinline__ void add_bias(const PhasesWgradParams& p, int channel, double* shared) {
  constexpr int kThreads = kBiasThreads<kTeams>;
  const PhasesWgradShape& s = p.shape;
  const int thread = Two<Operand, 1>::thread_of(channel % kGradRows);
  const int all = threadIdx.x < kThreads ? p.workers * s.input_blocks * s.bias_rows * 4 : 0;
  double sum = 0.;
  for (int i = threadIdx.x; i < all; i += kThreads) {
    const int share = s.by_bias_rows(i / 4), row = i / 4 - share * s.bias_rows;
    const int worker = s.by_input_blocks(share), in = share - worker * s.input_blocks;
    const int z = s.by_stride_y(row), y = row - z * p.stride_y;
    const int tap_row = (p.pad_z + z) * p.kernel_y + p.pad_y + y;
    const int blocks = in * s.gradient_blocks + channel / kGradRows;
    const int64_t unit = static_cast<int64_t>(worker) * s.jobs + blocks * s.rows + tap_row;
    sum += bias_at(p)[unit * kSumThreads + thread + i % 4];
  }
  sum = add_block<kThreads>(sum, shared);
  if (threadIdx.x > 0) return;
  static_cast<typename Operand::Element*>(p.gb)[channel] =
      Operand::from_float(static_cast<float>(sum));
}

// The blocks of the bias first: theirs are the longer ways.
template <typename Operand, int kTeams>
__global__ void __launch_bounds__(kAddThreads, kAddBlocks<kTeams>)
    sm90_wgrad_phases_add(const __grid_constant__ PhasesWgradParams p) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const int block = blockIdx.x, channels = p.sums ? p.out_channels : 0;
  if (block < channels)
    return add_bias<Operand, kTeams>(p, block, reinterpret_cast<double*>(memory));
  add_taps<Operand, kTeams>(p, block - channels, reinterpret_cast<float4*>(memory));
}

}  // namespace upconv::wgrad_phases
