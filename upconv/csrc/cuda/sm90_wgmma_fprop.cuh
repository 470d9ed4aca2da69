// Dense transposed convolution on Hopper, straight on NCHW (or channels_last), no scratch memory.
//
// The idea. A tile of the input lies in shared memory as [16-byte channel block][pixel][16 bytes].
// WGMMA reads it as a K-major operand; moving the descriptor's start by 16 bytes moves the operand
// by one pixel, so every tap of every phase is the same tile at another start address. Rows of the
// tile follow each other with their margins, so that one instruction spans several rows, or several
// small images; the columns that fall on margins are computed and not stored. Or rows lie in
// strips: WGMMA reads its columns in groups of 8, and these may lie any distance apart, so that
// each group has margins of its own. Then no column is computed for nothing, and the tile has more
// pixels.
//
// Few output channels would leave most of a block's 64 rows empty: these then hold several depths,
// row phases and width phases besides (folds), which share one list of taps, with zeros for weights
// that a fold does not have. Rows of the output that no tap reaches are no units of work
// (sm90_fill.cuh).
//
// The K loop of a unit runs over planes, and in each over slices of the input channels. A plane is
// what taps of one depth read, and where the input has a step (the gradient of the input) of one
// residue of rows and columns; the 2-D forward pass has one. Taps of a plane differ by whole pixels
// of the tile. Each job has a tap list for each plane, possibly empty (Sm90Visit).
//
// Roles, 12 warps:
//   loaders    warps 0-2   turn boxes of channel blocks, as TMA brings them, into the layout of
//                          the tile, or gather the input themselves where TMA cannot
//   feeder     warp 3      one thread starts every copy: weight blocks and boxes
//   consumer 0 warps 4-7   64 x N accumulators (times MB), then its own stores
//   consumer 1 warps 8-11  the same
// The consumers issue their WGMMAs in turns, 0 and 1 alternately, so that one of them stores while
// the other has the tensor cores. A turn is a whole unit of work when units alternate between them
// (few output channels), or some slices when both work on the same tile with different weights.
// There each may have a ring of weights of its own instead, and no turns: with many slices a unit
// turns cost more than the stores that they hide. (In one ring without turns, a consumer could take
// the other's block for its own.) All weights of a small layer stay in the ring from the first unit
// on. With split operands they take no turns: both work on the same unit, half of its columns each.
// Pipelines (mbarriers, in order of travel of a box, of an input slot and of a weight stage):
//   raw_full[chunk]      TMA completes               -> loaders may read the box
//   raw_free[chunk]      3 loader warps arrive       -> the feeder may load another
//   filled[slot]         3 loader warps arrive       -> consumers may read
//   emptied[slot]        each reading consumer       -> loaders may fill again
//   weights_full[stage]  bulk copy completes         -> the consumer that it is for may read
//   spent[stage]         that consumer arrives       -> the feeder may load another
//   turn[consumer]       the other consumer has issued everything of its turn
#pragma once

#include "sm90_consumer.cuh"
#include "sm90_producers.cuh"

namespace upconv {

// --- The kernel ------------------------------------------------------------------------------

// kRows: the input comes in boxes of every few rows and channels (kCopyRows). A kernel of its own:
// as one more branch of the loaders it made ptxas spill what the consumers keep of a unit, and a
// local load waits for L2 (kb57 in BF16 1.23 -> 1.36 ms).
template <typename Operand, int N, int MB, bool kRows>
__global__ void __launch_bounds__(kThreads, 1)
    sm90_wgmma_fprop(const __grid_constant__ Sm90Params p,
                     const __grid_constant__ CUtensorMap map) {
  static_assert(N % 8 == 0 && N <= 256, "WGMMA takes N in steps of 8 up to 256");
  static_assert(Operand::kShares * MB * N <= 256, "more than 128 sums a thread would spill");
  static_assert(MB <= kMaxBlocks, "a job lists at most kMaxBlocks blocks");
  extern __shared__ __align__(1024) unsigned char memory[];
  const Shared shared(p, memory);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kMaxSlots; ++i) {
      ptx::barrier_init(shared.filled + 8 * i, kLoaderWarps);
      ptx::barrier_init(shared.emptied + 8 * i,
                        kConsumerWarps * (p.alternate && !Operand::kSplit ? 1 : 2));
    }
    for (int i = 0; i < kMaxStages; ++i) {
      ptx::barrier_init(shared.weights_full + 8 * i, 1);
      ptx::barrier_init(shared.spent + 8 * i, kConsumerWarps * Operand::kShares);
    }
    for (int i = 0; i < kMaxChunks; ++i) {
      ptx::barrier_init(shared.raw_full + 8 * i, 1);
      ptx::barrier_init(shared.raw_free + 8 * i, kLoaderWarps);
    }
    ptx::barrier_init(shared.turn, kConsumerWarps);
    ptx::barrier_init(shared.turn + 8, kConsumerWarps);
    ptx::barrier_init_fence();
  }
  for (int i = threadIdx.x; i < p.pairs; i += kThreads) shared.pairs[i] = p.pair[i].offset;
  for (int i = threadIdx.x; i < p.visits * kVisitWords; i += kThreads) {
    shared.visits[i] = reinterpret_cast<const int*>(p.visit)[i];
  }
  list_columns<Operand::kShares * N>(p, shared);
  if constexpr (Operand::kSplit) join_ranges(p, shared);
  __syncthreads();
  // The block starts with 168 registers for each of 384 threads, and setmaxnreg may only hand round
  // those (3 x 168 = 120 + 2 x 192); asking for more hangs. 512 threads would start with 128 each,
  // and ptxas then refuses WGMMA with N over 200.
  if (threadIdx.x < 128) {
    ptx::give_registers<120>();
    if (threadIdx.x >= kLoaders) {
      if (ptx::elected()) feed<Operand, kRows>(p, shared, map);
    } else if (kRows || p.copy == kCopyBoxes) {
      load_boxes<Operand, kRows>(p, shared);
    } else {
      gather_tiles<Operand>(p, shared);
    }
  } else {
    ptx::take_registers<192>();
    Consumer<Operand, N, MB>(p, shared, threadIdx.x / 128 - 1).run();
  }
}

// --- Weight packing --------------------------------------------------------------------------

// Steps of a tap list. Split operands: for each of the parts that are summed by themselves, the
// tails of its weights, then the heads for tails of the input, then those for heads.
constexpr int kSplitTimes = 3;
template <typename Operand>
__device__ __forceinline__ int steps_of(const Sm90Params& p, const Sm90List& list) {
  if (!Operand::kSplit) return steps_in_list(list.count);
  return kSplitTimes * (list.count / p.sum_pairs * (p.sum_pairs / kStepPairs) +
                        steps_in_list(list.count % p.sum_pairs));
}

// The part of a list that a step of split operands belongs to, and the number of its first step.
__device__ __forceinline__ Sm90List part_of(const Sm90Params& p, const Sm90List& list, int step,
                                            int* first) {
  const int each = kSplitTimes * (p.sum_pairs / kStepPairs);
  const int part = min(step / each, list.count / p.sum_pairs), begin = part * p.sum_pairs;
  *first = part * each;
  return {static_cast<uint16_t>(list.begin + begin),
          static_cast<uint16_t>(min(list.count - begin, p.sum_pairs))};
}

// Pair `k` of a step, -1 where the step is not full.
__device__ __forceinline__ int pair_of(const Sm90List& list, int step, int k) {
  const int whole = list.count / kStepPairs, left = list.count % kStepPairs;
  if (step < whole) return list.begin + step * kStepPairs + k;
  const int first = list.begin + whole * kStepPairs;
  if (step == whole && left >= 2) return k < 2 ? first + k : -1;
  return k == 0 ? list.begin + list.count - 1 : -1;
}

// The tap of a dimension that reads the input at `shift` for a phase, -1 for none.
__device__ __forceinline__ int tap_of(const Sm90Axis& axis, int first, int shift) {
  const int reach = first * axis.of_first + axis.base - shift * axis.of_shift;
  const int k = reach / axis.step;
  return reach >= 0 && k * axis.step == reach && k < axis.kernel ? k : -1;
}

// Weight position of a pair for row `row` of block `j` of a job, -1 where that row has no such tap,
// and the output channel of the row.
__device__ __forceinline__ int tap_of_row(const Sm90Params& p, const Sm90Job& job, int j, int row,
                                          const Sm90Pair& pair, int* channel) {
  const int within = row % 16 / p.width_folds, width_fold = row % 16 % p.width_folds;
  const int line = row / 16 * p.warp_lines + within, fold = line / p.fold_rows;
  const int depth_fold = fold / p.row_folds, row_fold = fold % p.row_folds;
  const Sm90Kind& kind = p.kind[job.kind[j]];
  const int phase = j * p.width_folds + width_fold;
  *channel = job.channel[j] + line % p.fold_rows;
  if (within >= p.warp_lines || fold >= p.folds || kind.row + row_fold >= p.row_phases) return -1;
  if (p.width_phases && phase >= p.width_phases) return -1;
  const int z = tap_of(p.axis[0], kind.first_z + depth_fold * p.depth_apart, pair.z);
  const int y = tap_of(p.axis[1], p.row_first[kind.row + row_fold], pair.y);
  const int x = tap_of(p.axis[2], p.width_phases ? p.column_first[phase] : kind.first_x, pair.x);
  return z < 0 || y < 0 || x < 0 ? -1 : (z * p.axis[1].kernel + y) * p.axis[2].kernel + x;
}

// A weight of any strides -> [group][job][plane][slice][step][channel block][64 rows][16 bytes],
// rounded for the tensor core, zero where a fold has no such tap or a channel does not exist. One
// thread, 16 bytes.
template <typename Operand>
__global__ void sm90_pack_weights(const __grid_constant__ Sm90Params p,
                                  const typename Operand::Element* weight, uint4* packed) {
  constexpr int kE = Operand::kBlockChannels, kStepItems = kStageBytes / 16;
  const Sm90Job& job = p.job[blockIdx.y];
  const int group = blockIdx.z, c = p.alternate ? 0 : blockIdx.y % 2;
  const int total = job.steps * kStepItems;
  weight += static_cast<int64_t>(group) * p.weight_group;
  const int* scales = nullptr;  // of the group's output channels
  if constexpr (Operand::kSplit) {
    scales = channel_scales(p, packed) + group * p.out_channels;
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < p.job_blocks * kRowsPerBlock;
         i += gridDim.x * blockDim.x) {
      int out;
      tap_of_row(p, job, i / kRowsPerBlock, i % kRowsPerBlock, p.pair[0], &out);
      row_scales(p, packed)[row_place(p, group, blockIdx.y, i)] =
          scales[min(out, p.out_channels - 1)];
    }
  }
  packed += (static_cast<int64_t>(group) * p.weight_blocks + job.weights) * kStepItems;
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < total; i += gridDim.x * blockDim.x) {
    const int row = i % kRowsPerBlock;
    const int half = i / kRowsPerBlock % 2;
    const int k = i / (2 * kRowsPerBlock) % kStepPairs;
    int step = i / kStepItems, at = job.visit, j = 0;
    while (step >= p.slices * p.visit[at].steps[c]) step -= p.slices * p.visit[at++].steps[c];
    const Sm90Visit& visit = p.visit[at];
    const int slice = step / visit.steps[c];
    step %= visit.steps[c];
    while (step >= steps_of<Operand>(p, visit.list[c][j])) {
      step -= steps_of<Operand>(p, visit.list[c][j++]);
    }
    Sm90List list = visit.list[c][j];
    int time = 0;  // that the part is gone through, split operands
    if constexpr (Operand::kSplit) {
      int first;
      list = part_of(p, list, step, &first);
      step -= first;
      time = step / steps_in_list(list.count);
      step %= steps_in_list(list.count);
    }
    const int index = pair_of(list, step, k);
    const Sm90Pair& source = p.pair[max(index, 0)];
    int out;
    const int found = tap_of_row(p, job, j, row, source, &out);
    const int tap = index < 0 ? -1 : found;
    const int in = (slice * p.slice_blocks + source.block + half) * kE;
    alignas(16) typename Operand::Element values[kE];
#pragma unroll
    for (int e = 0; e < kE; ++e) {
      const bool on = tap >= 0 && out < p.out_channels && in + e < p.in_channels;
      const int64_t from = static_cast<int64_t>(in + e) * p.weight_in +
                           static_cast<int64_t>(out) * p.weight_out + tap;
      values[e] = on ? weight[from] : Operand::from_float(0.f);
    }
    if constexpr (Operand::kSplit) {
      const float scale = power_of_two(scales[min(out, p.out_channels - 1)]);
      uint32_t words[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        words[k] = cut_weights(values[2 * k] * scale, values[2 * k + 1] * scale, time);
      }
      packed[i] = make_uint4(words[0], words[1], words[2], words[3]);
    } else {
      const uint4 v = *reinterpret_cast<uint4*>(values);
      packed[i] = make_uint4(Operand::prepare(v.x), Operand::prepare(v.y), Operand::prepare(v.z),
                             Operand::prepare(v.w));
    }
  }
}

}  // namespace upconv
