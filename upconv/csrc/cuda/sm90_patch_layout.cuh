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
constexpr int kRowBytes = 128;  // of one channel in a box; 16 of them change places with others
constexpr int kBoxBytes = kBlock * kSteps * 32;
constexpr int kTablesAt = kBarrierBytes;  // the header: barriers, and where runs of outputs go
constexpr int kTableBytes = 128 * 8;  // of a run: its place from a pixel's first output, and bias
constexpr uint32_t kNone = 0xffffffffu;  // no such channel
constexpr int kHeaderBytes = kTablesAt + kConsumers * kTableBytes;

__host__ __device__ inline int weight_bytes(const PatchParams& p) { return p.tile_n * kSteps * 32; }
__host__ __device__ inline int shared_bytes(const PatchParams& p) {
  return kHeaderBytes + kConsumers * p.box_stages * kBoxBytes + p.weight_stages * weight_bytes(p);
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
// A unit of work is a group of columns of `kConsumers` blocks of pixels.
template <typename Way>
__host__ __device__ int unit_count(const PatchParams& p) {
  return (Way::block_count(p) + kConsumers - 1) / kConsumers * column_groups(p);
}

// --- Shared memory ---------------------------------------------------------------------------

struct Shared : Rings {
  uint32_t tables, boxes, weights;

  __device__ __forceinline__ Shared(const PatchParams& p, unsigned char* memory) : Rings(memory) {
    tables = full + kTablesAt;
    boxes = full + kHeaderBytes;
    weights = boxes + kConsumers * p.box_stages * kBoxBytes;
  }
};

}  // namespace upconv::patch
