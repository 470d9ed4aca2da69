// The kernel for few output channels: shared memory, units of work, and the boxes of the input.
#pragma once

#include "gather_stage.cuh"
#include "overlap_params.h"

// Older GPUs have no TMA; plans for them have no boxes.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define UPCONV_OVERLAP_TMA 1
#else
#define UPCONV_OVERLAP_TMA 0
#endif

namespace upconv::overlap {

using gather::Fragment;
using gather::Row;
using gather::Source;
using gather::split_off;

template <typename Operand>
constexpr int kBytes = sizeof(typename Operand::Element);

template <typename Operand>
constexpr int kStep = Operand::kStep;  // channels of a product

// --- Shared memory ---------------------------------------------------------------------------

// An output row of a warp: where it lies in the output (-1: nowhere), where its sums do, in floats
// (-1: it has none).
struct alignas(16) OutputRow {
  int offset, sums;
  float bias;
  int unused;
};

// A shift and a step of K as the products see them: bytes into the box, and which tiles of 8
// columns they concern.
struct BoxStep {
  int offset, tiles;
};

// [boxes][weights][sums of each warp][output rows of each warp][steps][rows of boxes][barriers].
struct Shared {
  unsigned char *boxes, *weights;
  float* sums;         // of this warp
  OutputRow* outputs;  // of this warp
  BoxStep* steps;
  Row* lines;         // none where the TMA brings the boxes
  uint32_t barriers;  // of each slot: it is full, it is empty

  __device__ Shared(const OverlapParams& p, unsigned char* memory) {
    const int warp = threadIdx.x / 32;
    boxes = memory;
    weights = boxes + p.stages * p.box_bytes;
    float* const all = reinterpret_cast<float*>(weights + p.weight_bytes);
    sums = all + warp * p.sum_rows * p.sum_pitch;
    OutputRow* const rows = reinterpret_cast<OutputRow*>(all + p.warps * p.sum_rows * p.sum_pitch);
    outputs = rows + warp * p.sums;
    steps = reinterpret_cast<BoxStep*>(rows + p.warps * p.sums);
    lines = reinterpret_cast<Row*>(steps + p.shifts * p.steps);
    barriers = mma_ptx::shared_address(memory) + p.shared_bytes - 16 * p.stages;
  }

  __device__ __forceinline__ uint32_t full(int slot) const { return barriers + 16 * slot; }
  __device__ __forceinline__ uint32_t empty(int slot) const { return barriers + 16 * slot + 8; }
};

// --- Units -----------------------------------------------------------------------------------

// Places of one image: some rows, and the columns of a block.
struct Unit {
  int image, z, y, tile;  // the first row of places, counted from the first of all

  __device__ Unit(const OverlapParams& p, int index) {
    tile = split_off(index, p.by_tiles_x, p.tiles_x);
    y = split_off(index, p.by_units_y, p.units_y) * p.rows;
    z = split_off(index, p.by_count_z, p.count_z);
    image = index;
  }

  __device__ __forceinline__ void advance(const OverlapParams& p) {
    if (++tile < p.tiles_x) return;
    tile = 0;
    y += p.rows;
    if (y < p.count_y) return;
    y = 0;
    if (++z < p.count_z) return;
    z = 0;
    ++image;
  }

  // The first input column of a block.
  __device__ __forceinline__ int column(const OverlapParams& p) const {
    return p.first_x + tile * p.warps_x * p.valid;
  }
};

// Which row of places and which columns a warp has in its block's unit.
struct Warp {
  int y, x;

  __device__ explicit Warp(const OverlapParams& p) {
    int column = threadIdx.x / 32;
    x = split_off(column, p.by_warps_x, p.warps_x);
    y = column;
  }
};

// --- Set-up ----------------------------------------------------------------------------------

// Rows of a box: channels next to each other, so that a product's K lies one pitch apart.
__device__ __forceinline__ void list_box(const OverlapParams& p, Row* lines) {
  const int total = p.planes * p.box_rows * p.channels, shift = 31 - __clz(p.channels);
  for (int i = threadIdx.x; i < total; i += blockDim.x) {
    int z = i >> shift;
    const int y = split_off(z, p.by_rows, p.box_rows), channel = i & (p.channels - 1);
    lines[i].offset = static_cast<int>(channel * p.in_plane + (z * p.in_h + y) * p.in_w);
    lines[i].z = static_cast<short>(z);
    lines[i].y = static_cast<short>(y);
  }
}

template <typename Operand>
__device__ __forceinline__ void list_steps(const OverlapParams& p, const Shared& shared) {
  const int channel_bytes = p.pitch * kBytes<Operand>, shift = 31 - __clz(p.steps);
  for (int i = threadIdx.x; i < p.shifts << shift; i += blockDim.x) {
    const OverlapShift& at = p.shift[i >> shift];
    const int line = (at.z - p.low_z) * p.box_rows + at.y - p.low_y;
    const int channel = (i & (p.steps - 1)) * kStep<Operand>;
    shared.steps[i] = {(line * p.channels + channel) * channel_bytes, at.tiles};
  }
}

__device__ __forceinline__ void load_weights(const OverlapParams& p, const Shared& shared,
                                             int group) {
  const unsigned char* const from =
      static_cast<const unsigned char*>(p.w) + static_cast<int64_t>(group) * p.weight_bytes;
  const uint32_t to = mma_ptx::shared_address(shared.weights);
  for (int at = threadIdx.x * 16; at < p.weight_bytes; at += blockDim.x * 16) {
    mma_ptx::copy_async16(to + at, from + at);
  }
}

// --- Boxes -----------------------------------------------------------------------------------

// The TMA has the input as columns, channels of a group, rows, planes, groups of all images.
template <bool kBoxes, typename Operand>
__device__ __forceinline__ void load_box(const OverlapParams& p, const OverlapBoxes& boxes,
                                         const Shared& shared, int group, const Unit& unit,
                                         int chunk, int slot) {
  using Element = typename Operand::Element;
  const int first = chunk * p.channels, z = unit.z + p.first_z + p.low_z;
  const int x = unit.column(p), y = unit.y + p.first_y + p.low_y;
  unsigned char* const box = shared.boxes + slot * p.box_bytes;
  if constexpr (kBoxes) {
#if UPCONV_OVERLAP_TMA
    if (threadIdx.x % 32 != 0) return;
    const uint32_t barrier = shared.full(slot);
    mma_ptx::barrier_arrive_expect(barrier,
                                   p.box_rows * p.planes * p.channels * p.pitch * kBytes<Operand>);
    mma_ptx::tensor_copy(mma_ptx::shared_address(box), &boxes, x, first, y, z,
                         unit.image * p.groups + group, barrier);
#endif
  } else {
    const int64_t all = static_cast<int64_t>(p.groups) * p.in_channels * p.in_plane;
    const int64_t before = (static_cast<int64_t>(group) * p.in_channels + first) * p.in_plane;
    const Source<Element> source{static_cast<const Element*>(p.x) + before, all, p.in_d, p.in_h,
                                 p.in_w};
    const gather::Channels channels{p.channels - 1, p.in_channels - first};
    gather::stage(source, shared.lines, p.planes * p.box_rows * p.channels, unit.image, z, y, x,
                  p.box_columns, p.vector, box, p.pitch * kBytes<Operand>, channels);
    mma_ptx::copy_async_commit();
  }
}

// Which slot a loop over boxes is at, and how often it has been there.
struct Slot {
  int index = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void advance(const OverlapParams& p) {
    if (++index == p.stages) index = 0, parity ^= 1;
  }
};

// Until a box has come; by copies also: for all, and until nobody reads the one before.
template <bool kBoxes>
__device__ __forceinline__ void wait_for_box(const OverlapParams& p, const Shared& shared,
                                             const Slot& slot) {
  if constexpr (kBoxes) {
#if UPCONV_OVERLAP_TMA
    mma_ptx::barrier_wait(shared.full(slot.index), slot.parity);
#endif
  } else {
    if (p.stages == 2) {
      mma_ptx::copy_async_wait<0>();
    } else {
      mma_ptx::copy_async_wait<1>();
    }
    __syncthreads();
  }
}

// This warp has read a box.
template <bool kBoxes>
__device__ __forceinline__ void hand_back(const Shared& shared, const Slot& slot) {
#if UPCONV_OVERLAP_TMA
  if constexpr (kBoxes) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) mma_ptx::barrier_arrive(shared.empty(slot.index));
  }
#endif
}

}  // namespace upconv::overlap
