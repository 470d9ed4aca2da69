// Hopper kernel for patches: sizes, units of work, shared memory. The idea, roles and pipelines are
// told in sm90_patch.cuh.
#pragma once

#include "ptx.cuh"
#include "sm90_layout.cuh"
#include "sm90_patch_params.h"
#include "sm90_rings.cuh"

namespace upconv::patch {

using rings::kBarrierBytes, rings::kBlock, rings::kConsumers, rings::kConsumerWarps,
    rings::kMaxStages, rings::kThreads, rings::Rings, rings::Slot;

// --- Configuration ---------------------------------------------------------------------------

constexpr int kSteps = 4;       // products of one stage, 32 bytes of K each
constexpr int kSplitSteps = 6;  // the same of split float32: three products of 16 numbers each
constexpr int kRowBytes = 128;  // of one channel in a box; 16 of them change places with others
constexpr int kBoxBytes = kBlock * kSteps * 32;  // but for paired channels
constexpr int kTablesAt = kBarrierBytes;  // the header: barriers, and where runs of outputs go
constexpr int kTableBytes = 128 * 8;  // of a run: its place from a pixel's first output, and bias
constexpr int kFactorsAt = kTableBytes / 2;  // in it, split float32: what sums are multiplied with
constexpr uint32_t kNone = 0xffffffffu;      // no such channel
constexpr int kHeaderBytes = kTablesAt + kConsumers * kTableBytes;

__host__ __device__ inline bool is_split(const PatchParams& p) { return p.operand == 3; }
__host__ __device__ inline bool is_wide(const PatchParams& p) {
  return p.operand == 0 || is_split(p);
}
__host__ __device__ inline int weight_bytes(const PatchParams& p) {
  return p.tile_n * (is_split(p) ? kSplitSteps : kSteps) * 32;
}
__host__ __device__ inline int shared_bytes(const PatchParams& p, int box_bytes) {
  return kHeaderBytes + kConsumers * p.box_stages * box_bytes + p.weight_stages * weight_bytes(p);
}

// --- Units of work ---------------------------------------------------------------------------

__host__ __device__ inline int pixels_of(const PatchParams& p) { return p.in_d * p.in_h * p.in_w; }
__host__ __device__ inline int taps_of(const PatchParams& p) {
  return p.step_z * p.step_y * p.step_x;
}
__host__ __device__ inline int64_t out_area(const PatchParams& p) {
  return static_cast<int64_t>(pixels_of(p)) * taps_of(p);
}
__host__ __device__ inline int columns_of(const PatchParams& p) {
  return p.backward ? p.in_channels : p.out_channels * taps_of(p);
}
__host__ __device__ inline int column_groups(const PatchParams& p) {
  return (columns_of(p) + p.tile_n - 1) / p.tile_n;
}

inline PatchShape shape_of(const PatchParams& p) {
  PatchShape s;
  s.groups = column_groups(p);
  s.each = pixels_of(p) / kBlock;
  s.runs = p.span ? taps_of(p) / p.span : 1;
  s.rest_shift = 0;
  while (1 << s.rest_shift < p.rest_pixels) ++s.rest_shift;
  const int part = kRowBytes / (is_wide(p) ? 4 : 2) / 2;  // pixels
  s.row_parts = (p.in_w + part - 1) / part;
  if (p.short_rows) s.row_parts = (p.in_h + p.short_rows - 1) / p.short_rows;
  s.area = out_area(p);
  s.row_step = static_cast<uint32_t>(p.in_w) * p.step_x * p.step_y;
  s.slice_step = s.row_step * p.in_h * p.step_z;
  const auto by = [](int value) { return Divider(value > 0 ? value : 1); };
  s.by_groups = by(s.groups);
  s.by_each = by(s.each);
  s.by_runs = by(s.runs);
  s.by_row_runs = by(p.span ? p.step_x / p.span : 1);
  s.by_row_parts = by(s.row_parts);
  s.by_rows = by(p.short_rows ? p.step_z : p.step_z * p.step_y);
  s.by_pixels = by(pixels_of(p));
  s.by_in_w = by(p.in_w);
  s.by_in_h = by(p.in_h);
  s.by_in_d = by(p.in_d);
  s.by_step_y = by(p.step_y);
  s.by_step_x = by(p.step_x);
  s.by_out_channels = by(p.out_channels);
  return s;
}

// The first output of a pixel, of those of a channel.
__device__ __forceinline__ uint32_t first_output(const PatchParams& p, int pixel) {
  const int row = p.shape.by_in_w(pixel), z = p.shape.by_in_h(row);
  return z * p.shape.slice_step + (row - z * p.in_h) * p.shape.row_step +
         (pixel - row * p.in_w) * p.step_x;
}

// A unit of work is a group of columns of `kConsumers` blocks of pixels.
template <typename Way>
__host__ __device__ int unit_count(const PatchParams& p) {
  return (Way::block_count(p) + kConsumers - 1) / kConsumers * column_groups(p);
}

// --- Shared memory ---------------------------------------------------------------------------

struct Shared : Rings {
  uint32_t tables, boxes, weights;

  __device__ __forceinline__ Shared(const PatchParams& p, unsigned char* memory, int box_bytes)
      : Rings(memory) {
    tables = full + kTablesAt;
    boxes = full + kHeaderBytes;
    weights = boxes + kConsumers * p.box_stages * box_bytes;
  }
};

}  // namespace upconv::patch
