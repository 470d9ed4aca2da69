// The gradient of the weight on mma.sync, for groups of few channels, few channels on either side,
// depthwise layers, and for any layer whose float32 must not be rounded.
//
// gw[ci][co][tap] is a sum over pixels of x[ci][pixel] * gy[co][place of (pixel, tap)]: a matrix
// product with pixels as K. Its rows are output channels and taps of the width, each a row of
// grad_output at a shift of its own; its columns are input channels. The other taps, of depth and
// height, extend one of the two:
//   by rows of grad_output  a row of grad_output meets those rows of the input that the taps of its
//                           phase lead to: columns are input channels and taps; grad_output is read
//                           once
//   by rows of the input    a row of the input meets one row of grad_output for each tap: rows are
//                           output channels and taps; the input is read once
// Every product of such a tile is one of the gradient's, whatever stride and dilation are.
//
// Blocks that share a job leave their sums in the workspace; a second kernel adds them in a fixed
// order. No atomics: the same inputs give the same bits.
#pragma once

#include "gather_stage.cuh"
#include "ordered_sum.cuh"

namespace upconv::gather {

// The part of the launch that a block has.
struct WeightPart {
  int job, share, group;
  int channel_out, channel_in, tap;  // the first of each

  __device__ WeightPart(const GatherParams& p, int block) {
    for (job = 0; job + 1 < p.jobs && block >= p.job[job + 1].block;) ++job;
    block -= p.job[job].block;
    share = split_off(block, p.job[job].by_shares, p.job[job].shares);
    tap = split_off(block, p.by_tap_blocks, p.tap_blocks) * p.tap_block;
    channel_in = split_off(block, p.by_in_blocks, p.in_blocks) * p.in_block;
    channel_out = split_off(block, p.by_out_blocks, p.out_blocks) * p.out_block;
    group = block;
  }
};

// A row of the product: output channel and tap, counted from the block's first ones on.
struct ProductRow {
  int channel, z, y, x;

  __device__ ProductRow(const GatherParams& p, const GatherJob& job, int index) : z(0), y(0) {
    x = split_off(index, p.by_tap_block, p.tap_block);
    if (p.by_input) {
      y = split_off(index, job.by_taps_y, job.taps_y);
      z = split_off(index, job.by_taps_z, job.taps_z);
    }
    channel = index;
  }

  __device__ bool exists(const GatherParams& p, const WeightPart& part) const {
    return channel < min(p.out_block, p.out_channels - part.channel_out) &&
           x < min(p.tap_block, p.kernel_x - part.tap);
  }
};

struct ProductColumn {
  int channel, z, y;

  __device__ ProductColumn(const GatherParams& p, const GatherJob& job, int index) : z(0), y(0) {
    if (!p.by_input) {
      y = split_off(index, job.by_taps_y, job.taps_y);
      z = split_off(index, job.by_taps_z, job.taps_z);
    }
    channel = index;
  }

  __device__ bool exists(const GatherParams& p, const WeightPart& part) const {
    return channel < min(p.in_block, p.in_channels - part.channel_in);
  }
};

// --- Multiply --------------------------------------------------------------------------------

// The rows and columns that a lane reads, as places in the boxes. What does not exist is the first
// one once more; its sums are not stored.
template <typename Operand, int kM, int kN>
struct Places {
  int rows[kM][2], columns[kN];

  __device__ Places(const GatherParams& p, const GatherJob& job, const WeightPart& part, int warp_m,
                    int warp_n) {
    constexpr int kBytes = sizeof(typename Operand::Element);
    const int lane = threadIdx.x % 32;
    const int each = p.gy_vector / kBytes;
    const int skip = first_output(p, 0, part.tap) & (each - 1);
    const int planes = p.by_input ? job.taps_z : 1;
#pragma unroll
    for (int i = 0; i < 2 * kM; ++i) {
      ProductRow row(p, job, (warp_m * kM + i / 2) * 16 + i % 2 * 8 + lane / 4);
      if (!row.exists(p, part)) row.channel = row.z = row.y = row.x = 0;
      const int line = (row.channel * planes + row.z) * p.gy_rows + row.y * p.gy_tap_rows;
      const int column = row.x * p.dilation_x + skip + lane % 4 * Operand::kPixels * p.stride_x;
      rows[i / 2][i % 2] = (line * p.gy_pitch + column) * kBytes;
    }
    const int taps = p.by_input ? 1 : job.taps_y;
#pragma unroll
    for (int i = 0; i < kN; ++i) {
      ProductColumn column(p, job, (warp_n * kN + i) * 8 + lane / 4);
      if (!column.exists(p, part)) column.channel = column.z = column.y = 0;
      const int line = (column.channel * (p.by_input ? 1 : job.taps_z) + column.z) * p.x_rows +
                       (taps - 1 - column.y) * p.x_tap_rows;
      columns[i] = (line * p.x_pitch + lane % 4 * Operand::kPixels) * kBytes;
    }
  }
};

// The warp's share of a unit's pixels: rows are divided first, then columns.
template <typename Operand, int kM, int kN>
__device__ __forceinline__ void multiply_unit(const GatherParams& p,
                                              const Places<Operand, kM, kN>& places, uint32_t gy,
                                              uint32_t x, int warp_k, float (&sums)[kM][kN][4]) {
  constexpr int kBytes = sizeof(typename Operand::Element), kStep = Operand::kStep;
  const int stride = p.stride_x * kBytes, across = p.columns / kStep;
  const int column_warps = p.column_warps, first = p.by_row_warps(warp_k);
  for (int row = warp_k - first * p.row_warps; row < p.rows; row += p.row_warps) {
    uint32_t from = gy + row * p.gy_row_advance * p.gy_pitch * kBytes + first * kStep * stride;
    uint32_t with = x + row * p.x_pitch * kBytes + first * kStep * kBytes;
#pragma unroll 2
    for (int column = first; column < across; column += column_warps) {
      typename Operand::template Prepared<2> b[kN];
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        uint32_t read[2];
        mma_ptx::load_shared(with + places.columns[n], read);
        b[n] = Operand::prepared(read);
      }
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        uint32_t read[4];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const uint32_t at = from + places.rows[m][i], next = at + Operand::kPer * stride;
          read[i] = gathered<Operand>(at, at + stride);
          read[i + 2] = gathered<Operand>(next, next + stride);
        }
        const auto a = Operand::prepared(read);
#pragma unroll
        for (int n = 0; n < kN; ++n) Operand::multiply(sums[m][n], a, b[n]);
      }
      from += column_warps * kStep * stride;
      with += column_warps * kStep * kBytes;
    }
  }
}

// Split operands: a thread's sums of earlier units, in shared memory behind the boxes. One long sum
// of all units has up to 1.5 times the error of PyTorch's.
constexpr int kSumUnits = 4;

template <int kM, int kN>
struct EarlierSums {
  float* const first;

  __device__ EarlierSums(const GatherParams& p, unsigned char* memory)
      : first(reinterpret_cast<float*>(memory + p.table_bytes + 2 * (p.gy_bytes + p.x_bytes)) +
              threadIdx.x) {}

  // Adds the sums, which are zeros then, or puts them there.
  __device__ __forceinline__ void take(float (&sums)[kM][kN][4], bool begin) const {
#pragma unroll
    for (int i = 0; i < kM * kN * 4; ++i) {
      float& sum = sums[i / (4 * kN)][i / 4 % kN][i % 4];
      float* const at = first + i * blockDim.x;
      *at = begin ? sum : *at + sum;
      sum = 0.f;
    }
  }
  __device__ __forceinline__ void give(float (&sums)[kM][kN][4]) const {
#pragma unroll
    for (int i = 0; i < kM * kN * 4; ++i) {
      sums[i / (4 * kN)][i / 4 % kN][i % 4] += first[i * blockDim.x];
    }
  }
};

// --- The kernel ------------------------------------------------------------------------------

// Large tiles have 4 warps and 168 registers.
template <int kM, int kN>
constexpr bool kLargeTile = kM * kN > 16;

template <typename Operand, int kM, int kN>
__global__ void __launch_bounds__((kLargeTile<kM, kN> ? 128 : kGatherThreads),
                                  (kLargeTile<kM, kN> ? 3 : 2))
    gather_wgrad_kernel(const __grid_constant__ GatherParams p) {
  using Element = typename Operand::Element;
  constexpr int kBytes = sizeof(Element);
  unsigned char* const memory = shared_memory();
  const WeightPart part(p, blockIdx.x);
  const GatherJob& job = p.job[part.job];
  int warp_k = threadIdx.x / 32;
  const int warp_m = split_off(warp_k, p.by_warps_m, p.warps_m);
  const int warp_n = split_off(warp_k, p.by_warps_n, p.warps_n);

  const int out_count = min(p.out_block, p.out_channels - part.channel_out);
  const int in_count = min(p.in_block, p.in_channels - part.channel_in);
  const int gy_planes = p.by_input ? job.taps_z : 1, x_planes = p.by_input ? 1 : job.taps_z;
  const int gy_lines = out_count * gy_planes * p.gy_rows, x_lines = in_count * x_planes * p.x_rows;
  Row* const gy_list = reinterpret_cast<Row*>(memory);
  Row* const x_list = gy_list + gy_lines;
  const Divider one;
  list_rows(gy_list, out_count, gy_planes, p.by_input ? job.by_taps_z : one, p.gy_rows,
            p.by_gy_rows, p.gy_plane_step, p.gy_row_step, p.out_plane, p.out_h, p.out_w);
  list_rows(x_list, in_count, x_planes, p.by_input ? one : job.by_taps_z, p.x_rows, p.by_x_rows,
            p.x_plane_step, 1, p.in_plane, p.in_h, p.in_w);

  const int64_t all_out = static_cast<int64_t>(p.groups) * p.out_channels;
  const int64_t all_in = static_cast<int64_t>(p.groups) * p.in_channels;
  const Source<Element> outputs{
      static_cast<const Element*>(p.gy) +
          (static_cast<int64_t>(part.group) * p.out_channels + part.channel_out) * p.out_plane,
      all_out * p.out_plane, p.out_d, p.out_h, p.out_w};
  const Source<Element> inputs{
      static_cast<const Element*>(p.other) +
          (static_cast<int64_t>(part.group) * p.in_channels + part.channel_in) * p.in_plane,
      all_in * p.in_plane, p.in_d, p.in_h, p.in_w};
  const int taps = min(p.tap_block, p.kernel_x - part.tap);
  const int out_columns = (p.columns - 1) * p.stride_x + (taps - 1) * p.dilation_x + 1;

  const auto load = [&](const Unit& unit, int slot) {
    unsigned char* const box = memory + p.table_bytes + slot * (p.gy_bytes + p.x_bytes);
    stage(outputs, gy_list, gy_lines, unit.image, unit.z * p.stride_z + job.gy_z,
          unit.y * p.stride_y + job.gy_y, first_output(p, unit.x, part.tap), out_columns,
          p.gy_vector, box, p.gy_pitch * kBytes);
    stage(inputs, x_list, x_lines, unit.image, unit.z + job.x_z, unit.y + job.x_y, unit.x,
          p.columns, p.x_vector, box + p.gy_bytes, p.x_pitch * kBytes);
  };

  const Places<Operand, kM, kN> places(p, job, part, warp_m, warp_n);
  float sums[kM][kN][4];
#pragma unroll
  for (int i = 0; i < kM * kN * 4; ++i) sums[i / (4 * kN)][i / 4 % kN][i % 4] = 0.f;

  // While a unit is multiplied the next one is on its way; before the first there is only that.
  const int units = job.by_shares(job.units + job.shares - 1);
  const int begin = min(part.share * units, job.units), end = min(begin + units, job.units);
  Unit next(p, job, begin);
  for (int unit = begin - 1; unit < end; ++unit) {
    wait_for_unit();
    if (unit + 1 < end) load(next, (unit + 1) & 1);
    next.advance(p, job);
    mma_ptx::copy_async_commit();
    if (unit < begin) continue;
    const uint32_t box =
        mma_ptx::shared_address(memory) + p.table_bytes + (unit & 1) * (p.gy_bytes + p.x_bytes);
    multiply_unit<Operand, kM, kN>(p, places, box, box + p.gy_bytes, warp_k, sums);
    if constexpr (Operand::kSplit) {
      const int done = unit + 1 - begin;
      if (done % kSumUnits == 0) EarlierSums<kM, kN>(p, memory).take(sums, done == kSumUnits);
    }
  }
  if constexpr (Operand::kSplit) {
    if (end - begin >= kSumUnits) EarlierSums<kM, kN>(p, memory).give(sums);
  }

  // The warps that divided the pixels, one after the other, then the workspace.
  const int width = p.warps_n * kN * 8;
  const int at =
      (warp_m * kM * 16 + threadIdx.x % 32 / 4) * width + warp_n * kN * 8 + threadIdx.x % 4 * 2;
  float* const gathering = reinterpret_cast<float*>(memory);
  float* const target = p.workspace + static_cast<int64_t>(blockIdx.x) * p.sums;
  mma_ptx::copy_async_wait<0>();
  for (int turn = p.warps_k - 1; turn >= 0; --turn) {
    __syncthreads();
    if (warp_k != turn) continue;
#pragma unroll
    for (int i = 0; i < kM * kN * 4; ++i) {
      const int m = i / (4 * kN), n = i / 4 % kN;
      const int place = at + (m * 16 + i % 4 / 2 * 8) * width + n * 8 + i % 2;
      float sum = sums[m][n][i % 4];
      if (turn != p.warps_k - 1) sum += gathering[place];
      (turn == 0 ? target : gathering)[place] = sum;
    }
  }
}

// --- The sum of all blocks -------------------------------------------------------------------

constexpr int kGatherAddThreads = 512, kGatherAddRows = 16, kGatherAddBatch = 8;

// Rows of threads share the blocks of a job, up to 16: so many that each has a batch of them. Every
// row finds out anew where its sums go, which takes longer than to read them.
struct AddShape {
  int rows = 1, log_across = 9;  // threads of a row
  int parts, pieces;             // of a job, and of a part: a block each
  Divider by_parts, by_pieces;

  explicit AddShape(const GatherParams& p) {
    for (int i = 0; i < p.jobs; ++i)
      while (rows < kGatherAddRows && rows * kGatherAddBatch < p.job[i].shares)
        rows *= 2, --log_across;
    parts = p.groups * p.out_blocks * p.in_blocks * p.tap_blocks;
    pieces = (p.sums + (1 << log_across) - 1) >> log_across;
    by_parts = Divider(parts);
    by_pieces = Divider(pieces);
  }
  int blocks(const GatherParams& p) const { return p.jobs * parts * pieces; }
};
static_assert(kGatherAddThreads == 1 << 9, "one row has all threads");

// A block takes neighbouring sums of a part of the weight; row r of them adds those of blocks r,
// r + rows, ..., then the rows are added as a tree. (Sixteen rows where there was one block to add:
// 433 us for 1.8 million weights.)
template <typename Operand>
__global__ void __launch_bounds__(kGatherAddThreads)
    gather_wgrad_add(const __grid_constant__ GatherParams p,
                     const __grid_constant__ AddShape shape) {
  unsigned char* const memory = shared_memory();
  const int across = 1 << shape.log_across;
  const int row = threadIdx.x >> shape.log_across, lane = threadIdx.x & (across - 1);
  int number = blockIdx.x;
  const int index = split_off(number, shape.by_pieces, shape.pieces) * across + lane;
  const int within = split_off(number, shape.by_parts, shape.parts);
  const GatherJob& job = p.job[number];
  const int block = job.block + within * job.shares;
  const WeightPart part(p, block);
  int line_number = index;
  const int width = p.warps_n * p.tiles_n * 8;
  const ProductColumn column(p, job, split_off(line_number, p.by_sums_wide, width));
  const ProductRow line(p, job, line_number);
  const bool wanted = index < p.sums && line.exists(p, part) && column.exists(p, part);
  float sum = 0.f;
  if (wanted) {
    const float* const source = p.workspace + static_cast<int64_t>(block) * p.sums + index;
    sum = ordered_sum<kGatherAddBatch, float>(row, job.shares, shape.rows, [&](int i) {
      return source[static_cast<int64_t>(i) * p.sums];
    });
  }
  float* const sums = reinterpret_cast<float*>(memory) + lane;
  sums[across * row] = sum;
  for (int half = shape.rows / 2; half > 0; half /= 2) {
    __syncthreads();
    if (row < half) sums[across * row] += sums[across * (row + half)];
  }
  if (row != 0 || !wanted) return;
  const int64_t in =
      static_cast<int64_t>(part.group) * p.in_channels + part.channel_in + column.channel;
  const int kz = job.tap_z + (line.z + column.z) * p.step_z;
  const int ky = job.tap_y + (line.y + column.y) * p.step_y;
  const int64_t plane = (in * p.out_channels + part.channel_out + line.channel) * p.kernel_z + kz;
  static_cast<typename Operand::Element*>(
      p.result)[(plane * p.kernel_y + ky) * p.kernel_x + part.tap + line.x] =
      Operand::from_float(sums[0]);
}

}  // namespace upconv::gather
