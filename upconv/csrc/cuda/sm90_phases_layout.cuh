// Hopper kernel for both phases of a row: sizes, units of work, shared memory, and what its two
// directions have in common. The idea, roles and pipelines are told in sm90_phases.cuh.
#pragma once

#include "ptx.cuh"
#include "sm90_layout.cuh"
#include "sm90_phases_params.h"
#include "sm90_pixels.cuh"
#include "sm90_rings.cuh"

namespace upconv::phases {

using pixels::Channels, pixels::high_halves, pixels::kPieceBytes, pixels::kStepBytes,
    pixels::low_halves, pixels::two_halves;
using rings::kBarrierBytes, rings::kBlock, rings::kConsumers, rings::kConsumerWarps,
    rings::kMaxStages, rings::kThreads, rings::Rings, rings::Slot;

// --- Configuration ---------------------------------------------------------------------------

constexpr int kOctet = 8;  // pixels that always lie side by side
constexpr int kMaxColumns = 256;
constexpr int kMostPackRows = 9;  // of taps that a block packs: 3 x 3, in 37 KB of shared memory
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
  return pixels::channel_step(channel_bytes(p));
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

inline int divided(int value, int by) { return (value + by - 1) / by; }

inline PhasesShape shape_of(const PhasesParams& p) {
  PhasesShape s;
  // Pixels are those of grad_input, or, going forward, all phases of one input pixel. Flat, a slice
  // of them is one long row.
  const int grid_h = p.backward ? p.in_h : divided(p.out_h, p.stride_y);
  const int grid_w = p.backward ? p.in_w : divided(p.out_w, 2);
  const int rows = p.flat ? 1 : grid_h, row = p.flat ? grid_h * grid_w : grid_w;
  s.block_w = p.flat ? p.blocks * kBlock : p.octets * kOctet;
  s.block_h = p.blocks * kBlock / s.block_w;
  s.wide = divided(row, s.block_w);
  s.high = divided(rows, s.block_h);
  s.deep = p.backward ? p.in_d : divided(p.out_d, p.stride_z);
  s.blocks = p.batch * s.deep * s.high * s.wide;
  s.groups = divided(p.backward ? p.in_channels : p.out_channels, p.tile_n);
  // A unit of work has one phase of the rows, with both phases in the row: a group of channels of a
  // block of each consumer.
  s.row_phases = p.backward ? 1 : p.stride_z * p.stride_y;
  s.units = divided(s.blocks, kConsumers) * s.row_phases * s.groups;
  // Boxes that K has.
  s.depth = divided(p.backward ? p.out_channels : p.in_channels, box_channels(p));
  s.most_z = p.backward ? p.kernel_z : divided(p.kernel_z, p.stride_z);
  s.most_y = p.backward ? p.kernel_y : divided(p.kernel_y, p.stride_y);
  const int tap_rows = p.kernel_z * p.kernel_y;
  s.pack_rows = divided(tap_rows, divided(tap_rows, kMostPackRows));
  s.pack_parts = divided(tap_rows, s.pack_rows);
  s.by_pack_rows = Divider(s.pack_rows);
  s.by_pack_parts = Divider(s.pack_parts);
  s.by_kernel_y = Divider(p.kernel_y);
  s.by_block_w = Divider(s.block_w);
  s.by_wide = Divider(s.wide);
  s.by_high = Divider(s.high);
  s.by_deep = Divider(s.deep);
  s.by_groups = Divider(s.groups);
  s.by_row_phases = Divider(s.row_phases);
  s.by_stride_z = Divider(p.stride_z);
  s.by_stride_y = Divider(p.stride_y);
  s.by_width = Divider(p.in_w);
  return s;
}

struct Block {
  int image, z, y, x;
};
__device__ __forceinline__ Block block_at(const PhasesShape& s, int number) {
  const int row = s.by_wide(number), slice = s.by_high(row), image = s.by_deep(slice);
  return {image, slice - image * s.deep, (row - slice * s.high) * s.block_h,
          (number - row * s.wide) * s.block_w};
}

struct Unit {
  int pair, phase, group;  // pair: of blocks
};
__device__ __forceinline__ Unit unit_at(const PhasesParams& p, int number) {
  const PhasesShape& s = p.shape;
  const int rest = s.by_groups(number), pair = s.by_row_phases(rest);
  int phase = rest - pair * s.row_phases;
  // Phases may have different numbers of taps. Where the units of a thread block would all have
  // the same one, they take turns.
  if (!p.resident) {
    phase += s.by_apart(pair);
    phase -= s.by_row_phases(phase) * s.row_phases;
  }
  return {pair, phase, number - rest * s.groups};
}

// Of depth and height: a phase of the rows, taps, a shift of the input.
struct Rows {
  int z, y;
};
__device__ __forceinline__ Rows phase_at(const PhasesParams& p, int phase) {
  const int z = p.shape.by_stride_y(phase);
  return {z, phase - z * p.stride_y};
}
// Going forward, a phase has taps `first_row_tap` and every stride-th after it, from inputs
// `row_shift` after its own and every one before that.
__device__ __forceinline__ Rows row_shift(const PhasesParams& p, int phase) {
  const Rows at = phase_at(p, phase);
  return {p.shape.by_stride_z(at.z + p.pad_z), p.shape.by_stride_y(at.y + p.pad_y)};
}
__device__ __forceinline__ Rows first_row_tap(const PhasesParams& p, int phase) {
  const Rows at = phase_at(p, phase), shift = row_shift(p, phase);
  return {at.z + p.pad_z - shift.z * p.stride_z, at.y + p.pad_y - shift.y * p.stride_y};
}
__device__ __forceinline__ Rows taps_of(const PhasesParams& p, int phase) {
  if (p.backward) return {p.kernel_z, p.kernel_y};
  const Rows first = first_row_tap(p, phase);
  const PhasesShape& s = p.shape;
  return {s.by_stride_z(max(0, p.kernel_z - first.z) + p.stride_z - 1),
          s.by_stride_y(max(0, p.kernel_y - first.y) + p.stride_y - 1)};
}

// The other way round: the phase that has a tap.
__device__ __forceinline__ int phase_of(int tap, int pad, int stride, const Divider& by_stride) {
  const int ahead = tap + (by_stride(pad) + 1) * stride - pad;
  return ahead - by_stride(ahead) * stride;
}
// Where the packed weights have a row of taps.
struct PackedRow {
  int phase, tap;
};

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
  const int y = p.shape.by_block_w(number);
  return {number - y * p.shape.block_w, y};
}
// The same in the image.
__device__ __forceinline__ Own pixel_at(const PhasesParams& p, const Block& block, const Own& own) {
  const int x = block.x + own.x, y = block.y + own.y;
  if (!p.flat) return {x, y};
  const int row = p.shape.by_width(x);
  return {x - row * p.in_w, row};
}

// pixels::channels_of once more: with that one ptxas orders the instructions of six forms
// otherwise, which is for a GPU to judge.
__device__ __forceinline__ Channels channels_of(const PhasesParams& p, int lane) {
  const int step = channel_step(p), bytes = channel_bytes(p);
  return {static_cast<uint32_t>(lane % 4 * step * bytes),
          static_cast<uint32_t>((step == 2 ? 1 : 4) * bytes), static_cast<uint32_t>(8 * bytes),
          static_cast<uint32_t>(kStepBytes / element_bytes(p) * bytes)};
}
template <typename Element>
__device__ __forceinline__ int channel_of(const PhasesParams& p, int half, int i) {
  return pixels::channel_of<Element>(channel_bytes(p), half, i);
}

}  // namespace upconv::phases
