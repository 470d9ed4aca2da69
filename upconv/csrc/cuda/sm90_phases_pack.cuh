// Hopper kernel for both phases of a row: the weight as its feeder copies it,
// [group of columns][phase of the rows][stage][tap of the rows][step][product][half][column][16
// bytes]. What a phase does not have of the taps of the rows nobody reads, and nobody writes.
//
// A thread block has some columns and the channels of one step of K, with all taps or some rows of
// them. In the weight these are runs of 512 bytes or more (4 x 4 taps), and in the packed one, too;
// in between they lie in shared memory. Taken from the weight straight away, a row of taps at a
// time, every 8 bytes were read with 24 others that another block wanted.
#pragma once

#include "sm90_phases_layout.cuh"

namespace upconv::phases {

constexpr int kPackThreads = 256, kPackColumns = 32;

template <typename Element>
struct ThreeTaps {
  Element taps[3];
};
// The taps of a row, copied at once where there are four.
template <typename Element, int kTaps>
using TapRow = std::conditional_t<kTaps == 4, VectorOf<4 * sizeof(Element)>, ThreeTaps<Element>>;

template <typename Way>
struct Packer {
  using Element = typename Way::Element;
  using Row = TapRow<Element, Way::kTaps>;
  // Channels of the weight's two dimensions.
  static constexpr int kIns = Way::kInColumns ? kPackColumns : Way::kStepChannels;
  static constexpr int kOuts = Way::kInColumns ? Way::kStepChannels : kPackColumns;
  static constexpr int kBatch = kIns * kOuts * 4 / kPackThreads;  // of a thread, for 4 rows

  const PhasesParams& p;
  Row* const tile;
  int group, stage, step;  // of the packed weights
  int column, row;         // the first one of the group, and of the taps

  __device__ __forceinline__ Packer(const PhasesParams& p, unsigned char* memory)
      : p(p), tile(reinterpret_cast<Row*>(memory)) {
    const PhasesShape& s = p.shape;
    const int rest = s.by_groups(blockIdx.x), number = s.by_pack_parts(rest);
    group = blockIdx.x - rest * s.groups;
    stage = number / Way::kSteps;
    step = number % Way::kSteps;
    column = blockIdx.y * kPackColumns;
    row = (rest - number * s.pack_parts) * s.pack_rows;
  }

  // In shared memory, neighbouring columns are an odd number of rows apart: on different banks.
  __host__ __device__ static int out_pitch(const PhasesParams& p) { return p.shape.pack_rows | 1; }
  __host__ __device__ static int in_pitch(const PhasesParams& p) {
    return kOuts * out_pitch(p) | 1;
  }
  static int bytes(const PhasesParams& p) {
    return kIns * in_pitch(p) * static_cast<int>(sizeof(Row));
  }

  // What there is no channel for is zero.
  __device__ __forceinline__ void load(const Row* weight) const {
    const PhasesShape& s = p.shape;
    const int columns = group * p.tile_n + column;
    const int channels = (stage * Way::kSteps + step) * Way::kStepChannels;
    const int first_in = Way::kInColumns ? columns : channels;
    const int first_out = Way::kInColumns ? channels : columns;
    const int tap_rows = p.kernel_z * p.kernel_y, all = kIns * kOuts * s.pack_rows;
    for (int first = threadIdx.x; first < all; first += kBatch * kPackThreads) {
      Row batch[kBatch];
      int to[kBatch];
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        // What is beyond the last is the last once more.
        const int i = min(first + k * kPackThreads, all - 1), pair = s.by_pack_rows(i);
        const int in = pair / kOuts, out = pair % kOuts, tap = i - pair * s.pack_rows;
        const bool there = first_in + in < p.in_channels && first_out + out < p.out_channels &&
                           row + tap < tap_rows;
        const int line = (first_in + in) * p.out_channels + first_out + out;
        batch[k] = there ? weight[line * tap_rows + row + tap] : Row{};
        to[k] = in * in_pitch(p) + out * out_pitch(p) + tap;
      }
#pragma unroll
      for (int k = 0; k < kBatch; ++k) tile[to[k]] = batch[k];
    }
  }

  // A thread has 16 bytes of K of a column, for all taps of a row.
  __device__ __forceinline__ void store(uint4* packed) const {
    constexpr int kEach = 16 / static_cast<int>(sizeof(Element));
    const PhasesShape& s = p.shape;
    const int channel_pitch = Way::kInColumns ? out_pitch(p) : in_pitch(p);
    const int column_pitch = Way::kInColumns ? in_pitch(p) : out_pitch(p);
    const int rows = min(s.pack_rows, p.kernel_z * p.kernel_y - row);
    for (int i = threadIdx.x; i < 2 * kPackColumns * rows; i += kPackThreads) {
      const int own = i % kPackColumns, half = i / kPackColumns % 2, tap = i / (2 * kPackColumns);
      alignas(16) Element piece[Way::kTaps][kEach];
#pragma unroll
      for (int k = 0; k < kEach; ++k) {
        const Row from =
            tile[channel_of<Element>(p, half, k) * channel_pitch + own * column_pitch + tap];
        const Element* taps = reinterpret_cast<const Element*>(&from);
#pragma unroll
        for (int product = 0; product < Way::kTaps; ++product)
          piece[product][k] = prepared(taps[Way::tap_of(product)]);
      }
      const PackedRow at = Way::packed_row(p, row + tap);
      const int64_t before = static_cast<int64_t>(group) * s.row_phases + at.phase;
      const int64_t number =
          ((before * s.depth + stage) * (s.most_z * s.most_y) + at.tap) * Way::kSteps + step;
      uint4* to = packed + (number * Way::kTaps * 2 + half) * p.tile_n + column + own;
#pragma unroll
      for (int product = 0; product < Way::kTaps; ++product)
        to[product * 2 * p.tile_n] = *reinterpret_cast<const uint4*>(piece[product]);
    }
  }

  __device__ static __forceinline__ Element prepared(Element value) {
    if constexpr (Way::kWide)
      return __uint_as_float(Way::Operand::prepare(__float_as_uint(value)));
    else
      return value;
  }
};

// Four blocks on a multiprocessor: registers enough for a batch to be on its way at once.
template <typename Way>
__global__ void __launch_bounds__(kPackThreads, 4)
    sm90_phases_pack(const __grid_constant__ PhasesParams p,
                     const typename Way::Element* __restrict__ weight, uint4* __restrict__ packed) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const Packer<Way> packer(p, memory);
  packer.load(reinterpret_cast<const typename Packer<Way>::Row*>(weight));
  __syncthreads();
  packer.store(packed);
}

}  // namespace upconv::phases
