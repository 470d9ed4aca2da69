// Hopper kernel for patches: sizes, units of work, shared memory. The idea, roles and pipelines are
// told in sm90_patch.cuh.
#pragma once

#include "ptx.cuh"
#include "sm90_layout.cuh"
#include "sm90_patch_params.h"

namespace upconv::patch {

// --- Configuration ---------------------------------------------------------------------------

constexpr int kBlock = 64;  // pixels: rows of one product
constexpr int kConsumers = 2, kConsumerWarps = 4 * kConsumers;
constexpr int kThreads = 128 * kConsumers + 128;
constexpr int kSteps = 4;       // products of one stage, 32 bytes of K each
constexpr int kRowBytes = 128;  // of one channel in a box; 16 of them change places with others
constexpr int kBoxBytes = kBlock * kSteps * 32;
constexpr int kMaxStages = 16;        // of one ring
constexpr int kTablesAt = 1024;       // the header: barriers, and where runs of outputs go
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

// A place in a ring.
struct Slot {
  int index = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void advance(int stages) {
    if (++index == stages) index = 0, parity ^= 1;
  }
};

// --- Shared memory ---------------------------------------------------------------------------

// The barriers of the consumers' boxes, and of what both of them read.
struct Rings {
  uint32_t full, empty, box_full, box_empty;

  __device__ __forceinline__ explicit Rings(unsigned char* memory) {
    full = ptx::shared_address(memory);
    empty = full + 8 * kMaxStages;
    box_full = empty + 8 * kMaxStages;
    box_empty = box_full + 8 * kMaxStages * kConsumers;
  }
  __device__ __forceinline__ uint32_t box_full_at(int consumer, int stage) const {
    return box_full + 8 * (kMaxStages * consumer + stage);
  }
  __device__ __forceinline__ uint32_t box_empty_at(int consumer, int stage) const {
    return box_empty + 8 * (kMaxStages * consumer + stage);
  }

  // By all threads of a block. A warp gives a stage back for itself: the four of a warpgroup
  // multiply without each other.
  __device__ __forceinline__ void begin() const {
    if (threadIdx.x == 0) {
      for (int i = 0; i < kMaxStages; ++i) {
        ptx::barrier_init(full + 8 * i, 1);
        ptx::barrier_init(empty + 8 * i, kConsumerWarps);
        for (int c = 0; c < kConsumers; ++c) {
          ptx::barrier_init(box_full_at(c, i), 1);
          ptx::barrier_init(box_empty_at(c, i), kConsumerWarps / kConsumers);
        }
      }
      ptx::barrier_init_fence();
    }
    __syncthreads();
  }
};
static_assert(8 * kMaxStages * (2 + 2 * kConsumers) <= kTablesAt, "the header is too small");

struct Shared : Rings {
  uint32_t tables, boxes, weights;

  __device__ __forceinline__ Shared(const PatchParams& p, unsigned char* memory) : Rings(memory) {
    tables = full + kTablesAt;
    boxes = full + kHeaderBytes;
    weights = boxes + kConsumers * p.box_stages * kBoxBytes;
  }
};

}  // namespace upconv::patch
