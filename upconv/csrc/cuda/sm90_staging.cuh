// Hopper kernel that walks: finished outputs on their way out of a thread block. A consumer lays
// them down in shared memory, some channels at a time, in pieces of a ring; a warp of its own, the
// writer, copies each piece to where it lies in the output. So a warpgroup goes on with its
// products at once. When both stored by themselves, that took 2,800 cycles for 64 channels x 64
// pixels, in which the other one alone cannot keep the tensor cores busy: 4,600 cycles of products
// became 7,400.
//
// Pipelines: full[consumer][piece]   each of the consumer's warps -> its writer may read
//            empty[consumer][piece]  the writer                   -> they may lay down again
#pragma once

#include "ptx.cuh"
#include "sm90_rings.cuh"

namespace upconv::staging {

using rings::kConsumers, rings::kConsumerWarps, rings::Slot;

constexpr int kMaxPieces = 16;        // of one ring
constexpr int kMostBytes = 8 * 1024;  // of a piece, but for what parts its channels
constexpr int kBarrierBytes = 2 * kConsumers * kMaxPieces * 8;

// From one channel of a piece to the next: pixels, and 16 bytes more, so that what lanes of four
// channels, two apart, lay down falls on different banks.
__host__ __device__ constexpr int pitch_of(int row_bytes) { return row_bytes + 16; }

// The ring of one consumer, as its warps and its writer see it.
struct Pieces {
  const uint32_t full, empty, memory;
  const int count, bytes;
  Slot next;

  // `barriers` and `memory` are those of all consumers.
  __device__ __forceinline__ Pieces(uint32_t barriers, uint32_t memory, int count, int bytes,
                                    int consumer)
      : full(barriers + consumer * 2 * kMaxPieces * 8),
        empty(full + kMaxPieces * 8),
        memory(memory + consumer * count * bytes),
        count(count),
        bytes(bytes) {}

  // By one thread of a block, before all others begin.
  __device__ static __forceinline__ void begin(uint32_t barriers) {
    for (int i = 0; i < kConsumers * kMaxPieces; ++i) {
      const uint32_t full = barriers + (i / kMaxPieces * 2 * kMaxPieces + i % kMaxPieces) * 8;
      ptx::barrier_init(full, kConsumerWarps / kConsumers);
      ptx::barrier_init(full + kMaxPieces * 8, 1);
    }
  }

  // A warp of the consumer: where the next piece may be laid down; and that it has been.
  __device__ __forceinline__ uint32_t wait_for_room() const {
    ptx::barrier_wait(empty + 8 * next.index, next.parity ^ 1);
    return memory + next.index * bytes;
  }
  __device__ __forceinline__ void hand_over() { pass(full); }

  // The writer: where the next piece lies; and that it has been copied.
  __device__ __forceinline__ uint32_t wait_for_outputs() const {
    ptx::barrier_wait(full + 8 * next.index, next.parity);
    return memory + next.index * bytes;
  }
  __device__ __forceinline__ void hand_back() { pass(empty); }

  __device__ __forceinline__ void pass(uint32_t barriers) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::barrier_arrive(barriers + 8 * next.index);
    next.advance(count);
  }
};

}  // namespace upconv::staging
