// Transposed convolution whose kernel is its stride, on Hopper, straight on NCHW, and its input's
// gradient. Every input pixel becomes a patch of outputs of its own: y[co, i * stride + k] = sum
// over ci of x[ci, i] * w[ci, co, k]. U-Nets, mask heads and decoders of vision transformers have
// such layers.
//
// The idea. It is one matrix product, pixels x channels times channels x (channels, taps). With a
// single tap for each output, bringing the input to the tensor cores is what limits
// sm90_wgmma_fprop.cuh: TMA writes a box, loaders read it and write it again with channels side by
// side. Here pixels are the rows of the product (operand A) and come from registers, which are
// loaded straight from the box as it lies in memory. Of the port of shared memory, 128 pixels and
// 256 columns take 256 cycles for each 32 bytes of channels, where that kernel takes 352; the
// tensor cores take 256.
//
// Rows: rows r and r + 8 of a product are neighbouring pixels, so that one load brings both, and
// that a thread, which has both of them and two neighbouring columns, holds four outputs that lie
// side by side (stride 2): the accumulators are stored as they are, 128 bytes in a row.
// Blocks: 64 pixels of one image; what is left over of an image, say 4 of 14 x 14, goes into blocks
// with that of other images. For the gradient, parts of rows of any images, or several short rows.
// 16-bit planes of an odd number of 8 bytes, which no TMA stride can be: two channels are one row.
// channels_last: pixels of all images follow each other, and operand A needs no registers.
// float32 that must not be rounded has consumers of its own: sm90_patch_strict.cuh.
// Weights: a ring, or, where all of a group of columns fit, they stay, and the thread block keeps
// to that group.
//
// Roles: consumers  warps 0-7: two warpgroups, a block each, the same columns
//        feeders    one thread each of warps 8 and 9 for the consumers' boxes, of 10 for the
//        weights
// Pipelines: box_full[consumer][stage]   bytes of a box               -> its consumer may read
//            box_empty[consumer][stage]  each of the consumer's warps -> its feeder may fill again
//            full[stage]                 bytes of weights             -> consumers may read
//            empty[stage]                each warp of both consumers  -> the feeder may fill again
//
// What differs by direction, layout and type is a Way, the first argument of every template here:
//   Operand, Element, kBytes       what is multiplied, as it lies in memory, and bytes of a box
//   depth, block_count             stages of a product's K; blocks of 64 rows of the whole problem
//   block, kParts, fetch           a block by its number; the feeder starts each part of its boxes
//   places, load                   where a lane finds its pixels in a box; a box into registers
//   kFromMemory                    no registers: the box is operand A as it lies (channels_last)
//   begin_group, target, store     a group of columns begins; where a block's outputs go; they go
//   weight_at                      packing: the place of a weight, negative for none
// sm90_patch_forward.cuh has the simplest.
#pragma once

#include "sm90_patch_backward.cuh"
#include "sm90_patch_forward.cuh"
#include "sm90_patch_last.cuh"
#include "sm90_patch_paired.cuh"
#include "sm90_patch_short.cuh"
#include "sm90_patch_strict.cuh"
#include "wgmma.cuh"
#include "wgmma_registers.cuh"

namespace upconv::patch {

// --- Feeders ---------------------------------------------------------------------------------

// The boxes of consumer `c`.
template <typename Way>
__device__ __forceinline__ void feed_boxes(const PatchParams& p, const Shared& shared, int c,
                                           const CUtensorMap& whole, const CUtensorMap& rest) {
  const Way way{p};
  const int units = unit_count<Way>(p), last = Way::block_count(p) - 1;
  const int depth = Way::depth(p);
  Slot slot;
  for (int unit = blockIdx.x; unit < units; unit += gridDim.x) {
    const auto block = way.block(min(p.shape.by_groups(unit) * kConsumers + c, last));
    for (int k = 0; k < depth; ++k) {
      const uint32_t full = shared.box_full_at(c, slot.index);
      const uint32_t box = shared.boxes + (c * p.box_stages + slot.index) * Way::kBytes;
      ptx::barrier_wait(shared.box_empty_at(c, slot.index), slot.parity ^ 1);
      ptx::barrier_arrive_expect(full, Way::kBytes);
#pragma unroll
      for (int part = 0; part < Way::kParts; ++part) {
        way.fetch(block, k, part, box + part * (Way::kBytes / Way::kParts), whole, rest, full);
      }
      slot.advance(p.box_stages);
    }
  }
}

template <typename Way>
__device__ __forceinline__ void feed_weights(const PatchParams& p, const Shared& shared) {
  const int units = unit_count<Way>(p), bytes = weight_bytes(p);
  const int depth = Way::depth(p);
  Slot slot;
  for (int unit = blockIdx.x; unit < units; unit += gridDim.x) {
    const int group = unit - p.shape.by_groups(unit) * p.shape.groups;
    const char* from = static_cast<const char*>(p.w) + static_cast<int64_t>(group) * depth * bytes;
    for (int k = 0; k < depth; ++k) {
      const uint32_t full = shared.full + 8 * slot.index;
      ptx::barrier_wait(shared.empty + 8 * slot.index, slot.parity ^ 1);
      ptx::barrier_arrive_expect(full, bytes);
      ptx::bulk_copy(shared.weights + slot.index * bytes, from, bytes, full);
      from += bytes;
      slot.advance(p.weight_stages);
    }
    if (p.resident) return;
  }
}

// --- Consumers -------------------------------------------------------------------------------

template <typename Way, int N>
struct Consumer {
  const PatchParams& p;
  const Shared& shared;
  const Way way;
  const int c, warp, lane;
  Slot box, weights;
  int box_before, weights_before;  // the stage before; negative for none
  typename Way::Places places;
  float d[N / 2];
  uint32_t a[2][kSteps][4];

  __device__ __forceinline__ Consumer(const PatchParams& p, const Shared& shared)
      : p(p),
        shared(shared),
        way{p},
        c(threadIdx.x / 128),
        warp(threadIdx.x / 32 % 4),
        lane(threadIdx.x % 32) {}

  __device__ __forceinline__ void give_back() const {
    if (lane != 0) return;
    ptx::barrier_arrive(shared.box_empty_at(c, box_before));
    if (!p.resident) ptx::barrier_arrive(shared.empty + 8 * weights_before);
  }

  // One stage; then the one before is over, and its registers and memory are free.
  template <int kSet>
  __device__ __forceinline__ void multiply() {
    const uint32_t from = shared.boxes + (c * p.box_stages + box.index) * Way::kBytes;
    ptx::barrier_wait(shared.box_full_at(c, box.index), box.parity);
    if constexpr (!Way::kFromMemory) way.load(a[kSet], from, places);
    ptx::barrier_wait(shared.full + 8 * weights.index, weights.parity);
    // 8 columns are 128 bytes, the other 16 bytes of their K come after all columns.
    const uint64_t high = static_cast<uint64_t>(128 >> 4) << 32;
    uint32_t low = (shared.weights + weights.index * weight_bytes(p)) >> 4 | N << 16;
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      if constexpr (Way::kFromMemory) {
        // Rows of 128 bytes, swizzled (mode 1); 8 of them are 1024 bytes.
        const uint64_t rows = static_cast<uint64_t>(1u << 30 | 1024 >> 4) << 32;
        const uint32_t at = (from >> 4) + step * 2 | 1u << 16;
        Wgmma<typename Way::Operand, N>::run(d, rows | at, high | low);
      } else {
        WgmmaRegisters<typename Way::Operand, N>::run(d, a[kSet][step], high | low);
      }
      low += N * 32 >> 4;
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<1>();
    if (box_before >= 0) give_back();
    box_before = box.index, weights_before = weights.index;
    box.advance(p.box_stages);
    weights.advance(p.weight_stages);
    if (p.resident) weights.parity = 0;  // full once and for all
  }

  __device__ __forceinline__ void run() {
    const int units = unit_count<Way>(p);
    const int blocks = Way::block_count(p), depth = Way::depth(p);
    const uint32_t table = shared.tables + c * kTableBytes;
    int group_before = -1;
    for (int unit = blockIdx.x; unit < units; unit += gridDim.x) {
      const int pair = p.shape.by_groups(unit), group = unit - pair * p.shape.groups;
      const int number = pair * kConsumers + c;
      const auto block = way.block(min(number, blocks - 1));
      places = way.places(block, warp, lane);
      if (group != group_before) {
        group_before = group;
        ptx::warpgroup_sync(1 + c);
        way.begin_group(table, group);
        ptx::warpgroup_sync(1 + c);
      }
#pragma unroll
      for (int i = 0; i < N / 2; ++i) d[i] = 0.f;
      box_before = -1;
      multiply<0>();
      const auto target = way.target(block, group, warp, lane);  // the tensor cores are busy
#pragma unroll 1
      for (int k = 1; k < depth; k += 2) {
        multiply<1>();
        if (k + 1 == depth) break;  // with a branch round it, ptxas would serialize the products
        multiply<0>();
      }
      ptx::wgmma_wait<0>();
#pragma unroll
      for (int i = 0; i < N / 2; ++i) ptx::keep_after_wait(d[i]);
      give_back();
      if (number < blocks) way.store(d, target, group, lane, table);
    }
  }
};

// --- The kernel ------------------------------------------------------------------------------

template <typename Way, int N>
__global__ void __launch_bounds__(kThreads, 1)
    sm90_patch(const __grid_constant__ PatchParams p, const __grid_constant__ CUtensorMap whole,
               const __grid_constant__ CUtensorMap rest) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const Shared shared(p, memory, Way::kBytes);
  shared.begin();
  // 168 registers a thread, handed round: 2 x 232 + 40.
  if (threadIdx.x < 128 * kConsumers) {
    ptx::take_registers<232>();
    if constexpr (Way::Operand::kSplit) {
      StrictConsumer<Way, N>(p, shared).run();
    } else {
      Consumer<Way, N>(p, shared).run();
    }
  } else {
    ptx::give_registers<40>();
    const int feeder = threadIdx.x / 32 - kConsumerWarps;
    if (feeder > kConsumers || !ptx::elected()) return;
    if (feeder == kConsumers) return feed_weights<Way>(p, shared);
    feed_boxes<Way>(p, shared, feeder, whole, rest);
  }
}

// --- Packing ---------------------------------------------------------------------------------

// [group of columns][stage][step][half][column][16 bytes of K]
template <typename Way>
__global__ void sm90_patch_pack(const __grid_constant__ PatchParams p,
                                const typename Way::Element* __restrict__ weight,
                                uint4* __restrict__ packed) {
  using Element = typename Way::Element;
  using Operand = typename Way::Operand;
  constexpr int kEach = 16 / static_cast<int>(sizeof(Element));
  const int column = threadIdx.x + blockIdx.x * blockDim.x;
  const int half = blockIdx.y % 2, step = blockIdx.y / 2;
  if (column >= column_groups(p) * p.tile_n) return;
  alignas(16) Element piece[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int64_t at = Way::weight_at(p, step / kSteps, step % kSteps, half, column, i);
    piece[i] = at < 0 ? Operand::from_float(0.f) : weight[at];
    if constexpr (sizeof(Element) == 4) {
      piece[i] = __uint_as_float(Operand::prepare(__float_as_uint(piece[i])));
    }
  }
  const int group = column / p.tile_n;
  const int64_t steps = static_cast<int64_t>(Way::depth(p)) * kSteps;
  packed[((group * steps + step) * 2 + half) * p.tile_n + column - group * p.tile_n] =
      *reinterpret_cast<const uint4*>(piece);
}

}  // namespace upconv::patch
