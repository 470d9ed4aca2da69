// Hopper kernel for both phases of a row: sizes, units of work, shared memory, and what its two
// directions have in common. The idea, roles and pipelines are told in sm90_phases.cuh.
#pragma once

#include "ptx.cuh"
#include "sm90_layout.cuh"
#include "sm90_phases_params.h"
#include "sm90_rings.cuh"

namespace upconv::phases {

using rings::kBarrierBytes, rings::kBlock, rings::kConsumers, rings::kConsumerWarps,
    rings::kMaxStages, rings::kThreads, rings::Rings, rings::Slot;

// --- Configuration ---------------------------------------------------------------------------

constexpr int kOctet = 8;        // pixels that always lie side by side
constexpr int kStepBytes = 32;   // of K in one product
constexpr int kPieceBytes = 16;  // TMA begins with whole ones
constexpr int kMaxColumns = 256;
constexpr int kTableBytes = kMaxColumns * 4;  // of a consumer: the bias of its channels
constexpr int kHeaderBytes = kBarrierBytes + kConsumers * kTableBytes;

__host__ __device__ inline int element_bytes(const PhasesParams& p) {
  return p.operand == 0 ? 4 : 2;
}
// Of a channel, a box has an odd number of 16-byte pieces, or twice an odd number: then four
// channels, two or one apart, are read from different banks.
__host__ __device__ inline int channel_bytes(const PhasesParams& p) {
  return p.box_w * p.box_h * p.box_d * element_bytes(p);
}
// From one row to the next, and one slice to the next.
__host__ __device__ inline int row_bytes(const PhasesParams& p) {
  return (p.flat ? p.in_w : p.box_w) * element_bytes(p);
}
__host__ __device__ inline int slice_bytes(const PhasesParams& p) {
  return p.box_w * p.box_h * element_bytes(p);
}
__host__ __device__ inline int channel_step(const PhasesParams& p) {
  return channel_bytes(p) / kPieceBytes % 2 ? 2 : 1;
}
// K of a box, in products. Forward, a tap takes half as many cycles, and what else there is to do
// for each box and tap would take as long.
constexpr int kForwardSteps = 2, kBackwardSteps = 1;
__host__ __device__ inline int steps_of(const PhasesParams& p) {
  return p.backward ? kBackwardSteps : kForwardSteps;
}
__host__ __device__ inline int box_channels(const PhasesParams& p) {
  return steps_of(p) * kStepBytes / element_bytes(p);
}
__host__ __device__ inline int box_bytes(const PhasesParams& p) {
  return channel_bytes(p) * box_channels(p);
}
// From one box to the next: TMA writes to multiples of 128 bytes.
__host__ __device__ inline int box_pitch(const PhasesParams& p) {
  return (box_bytes(p) + 127) / 128 * 128;
}
// Of one tap of the rows and a box's channels, with all taps in the row.
__host__ __device__ inline int weight_bytes(const PhasesParams& p) {
  return p.tile_n * kStepBytes * p.kernel_x * steps_of(p);
}
__host__ __device__ inline int shared_bytes(const PhasesParams& p) {
  return kHeaderBytes + kConsumers * p.box_stages * box_pitch(p) +
         p.weight_stages * weight_bytes(p);
}

// --- Units of work ---------------------------------------------------------------------------

__host__ __device__ inline int divided(int value, int by) { return (value + by - 1) / by; }

// Pixels are those of grad_input, or, going forward, all phases of one input pixel.
__host__ __device__ inline int grid_d(const PhasesParams& p) {
  return p.backward ? p.in_d : divided(p.out_d, p.stride_z);
}
__host__ __device__ inline int grid_h(const PhasesParams& p) {
  return p.backward ? p.in_h : divided(p.out_h, p.stride_y);
}
__host__ __device__ inline int grid_w(const PhasesParams& p) {
  return p.backward ? p.in_w : divided(p.out_w, 2);
}
// A consumer's pixels: rows of octets; or, flat, so many of a slice, which is then one long row.
__host__ __device__ inline int row_w(const PhasesParams& p) {
  return p.flat ? grid_h(p) * grid_w(p) : grid_w(p);
}
__host__ __device__ inline int rows_h(const PhasesParams& p) { return p.flat ? 1 : grid_h(p); }
__host__ __device__ inline int block_w(const PhasesParams& p) {
  return p.flat ? p.blocks * kBlock : p.octets * kOctet;
}
__host__ __device__ inline int block_h(const PhasesParams& p) {
  return p.blocks * kBlock / block_w(p);
}
__host__ __device__ inline int block_count(const PhasesParams& p) {
  return p.batch * grid_d(p) * divided(rows_h(p), block_h(p)) * divided(row_w(p), block_w(p));
}
struct Block {
  int image, z, y, x;
};
__device__ __forceinline__ Block block_at(const PhasesParams& p, int number) {
  const int wide = divided(row_w(p), block_w(p)), high = divided(rows_h(p), block_h(p));
  const int row = number / wide, slice = row / high, image = slice / grid_d(p);
  return {image, slice - image * grid_d(p), (row - slice * high) * block_h(p),
          (number - row * wide) * block_w(p)};
}

__host__ __device__ inline int columns_of(const PhasesParams& p) {
  return p.backward ? p.in_channels : p.out_channels;
}
__host__ __device__ inline int column_groups(const PhasesParams& p) {
  return divided(columns_of(p), p.tile_n);
}
// Phases of the rows; a unit of work has one of them, with both phases in the row.
__host__ __device__ inline int row_phases(const PhasesParams& p) {
  return p.backward ? 1 : p.stride_z * p.stride_y;
}
// Boxes that K has.
__host__ __device__ inline int depth_of(const PhasesParams& p) {
  return divided(p.backward ? p.out_channels : p.in_channels, box_channels(p));
}
// A unit of work: a group of channels in one phase of the rows, for a block of each consumer.
__host__ __device__ inline int unit_count(const PhasesParams& p) {
  return divided(block_count(p), kConsumers) * row_phases(p) * column_groups(p);
}
struct Unit {
  int pair, phase, group;  // pair: of blocks
};
__device__ __forceinline__ Unit unit_at(const PhasesParams& p, int number) {
  const int groups = column_groups(p), phases = row_phases(p);
  const int rest = number / groups, pair = rest / phases, turn = rest - pair * phases;
  // Phases may have different numbers of taps. Where the units of a thread block would all have
  // the same one, they take turns.
  const int apart = max(1, static_cast<int>(gridDim.x) / (groups * phases));
  const int phase = p.resident ? turn : (turn + pair / apart) % phases;
  return {pair, phase, number - rest * groups};
}

// Taps of the rows in one phase.
struct Taps {
  int z, y;
};
// Of one dimension: going forward, taps `(phase + pad) % stride` and every stride-th after it.
__host__ __device__ inline int tap_count(int kernel, int stride, int pad, int phase) {
  const int first = (phase + pad) % stride;
  return first < kernel ? divided(kernel - first, stride) : 0;
}
__host__ __device__ inline Taps taps_of(const PhasesParams& p, int phase) {
  if (p.backward) return {p.kernel_z, p.kernel_y};
  const int z = phase / p.stride_y, y = phase - z * p.stride_y;
  return {tap_count(p.kernel_z, p.stride_z, p.pad_z, z),
          tap_count(p.kernel_y, p.stride_y, p.pad_y, y)};
}
// The most that a phase has.
__host__ __device__ inline Taps most_taps(const PhasesParams& p) {
  if (p.backward) return {p.kernel_z, p.kernel_y};
  return {divided(p.kernel_z, p.stride_z), divided(p.kernel_y, p.stride_y)};
}

// --- Shared memory ---------------------------------------------------------------------------

struct Shared : Rings {
  uint32_t tables, boxes, weights;

  __device__ __forceinline__ Shared(const PhasesParams& p, unsigned char* memory) : Rings(memory) {
    tables = full + kBarrierBytes;
    boxes = full + kHeaderBytes;
    weights = boxes + kConsumers * p.box_stages * box_pitch(p);
  }
};

// --- Operands --------------------------------------------------------------------------------

// Of a thread, which of a consumer's pixels in its block `b`: an even one; it has the next, too.
struct Own {
  int x, y;
};
__device__ __forceinline__ Own own_pixel(const PhasesParams& p, int b, int warp, int lane) {
  const int number = b * kBlock + 16 * warp + lane / 4 * 2;
  const int y = number / block_w(p);
  return {number - y * block_w(p), y};
}
// The same in the image.
__device__ __forceinline__ Own pixel_at(const PhasesParams& p, const Block& block, const Own& own) {
  const int x = block.x + own.x, y = block.y + own.y;
  if (!p.flat) return {x, y};
  const int row = x / p.in_w;
  return {x - row * p.in_w, row};
}

// Packs the same halves of two channels' words.
__device__ __forceinline__ uint32_t low_halves(uint32_t first, uint32_t second) {
  return __byte_perm(first, second, 0x5410);
}
__device__ __forceinline__ uint32_t high_halves(uint32_t first, uint32_t second) {
  return __byte_perm(first, second, 0x7632);
}

// Two outputs of 16 bits, the first in the lower half.
template <typename Operand>
__device__ __forceinline__ uint32_t two_halves(float low, float high) {
  if constexpr (std::is_same_v<Operand, Fp16>) return ptx::to_halves(low, high);
  return ptx::to_bfloat16s(low, high);
}

// K may be numbered as one likes. Lane t reads channels t * step and another one of 8, in 16 bits
// of 8 and of the next 8; they are numbers t and t + 4 of K, or pair t and pair t + 4.
struct Channels {
  uint32_t first, other, eight;  // places in a box; `other` and `eight` from the first
  uint32_t step;                 // from the channels of a product to those of the next
};
__device__ __forceinline__ Channels channels_of(const PhasesParams& p, int lane) {
  const int step = channel_step(p), bytes = channel_bytes(p);
  return {static_cast<uint32_t>(lane % 4 * step * bytes),
          static_cast<uint32_t>((step == 2 ? 1 : 4) * bytes), static_cast<uint32_t>(8 * bytes),
          static_cast<uint32_t>(kStepBytes / element_bytes(p) * bytes)};
}
// The channel of a box that is number `i` of the first or second 16 bytes of K.
template <typename Element>
__device__ __forceinline__ int channel_of(const PhasesParams& p, int half, int i) {
  const int step = channel_step(p), other = step == 2 ? 1 : 4;
  return sizeof(Element) == 4 ? i * step + half * other : 8 * half + i / 2 * step + i % 2 * other;
}

}  // namespace upconv::phases
