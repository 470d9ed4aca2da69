// What the Hopper kernels whose rows are pixels share: their roles, and the barriers between them.
// Two warpgroups multiply; single threads of a third one bring them their boxes of the input and
// what both of them read.
#pragma once

#include "ptx.cuh"

namespace upconv::rings {

constexpr int kBlock = 64;  // pixels: rows of one product
constexpr int kConsumers = 2, kConsumerWarps = 4 * kConsumers;
constexpr int kThreads = 128 * kConsumers + 128;
constexpr int kMaxStages = 16;       // of one ring
constexpr int kBarrierBytes = 1024;  // the first ones of shared memory

// A place in a ring.
struct Slot {
  int index = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void advance(int stages) {
    if (++index == stages) index = 0, parity ^= 1;
  }
};

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
static_assert(8 * kMaxStages * (2 + 2 * kConsumers) <= kBarrierBytes, "there is no room for them");

}  // namespace upconv::rings
