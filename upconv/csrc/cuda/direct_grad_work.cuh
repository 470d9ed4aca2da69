// What the CUDA-core kernels for the gradients share: how the work is divided, and the staging of
// tensors in shared memory.
//
// The lanes of a warp lie along the taps of the kernel's width, and, where these are few, along
// some neighbouring pixels ("slots"): what they read of grad_output is then nearly contiguous for
// every stride. Every warp works for itself: it stages a chunk of pixels with the rows of
// grad_output that they meet in its own part of shared memory, multiplies, and goes on. Other warps
// of the multiprocessor hide its waits; there are no barriers. 16-bit types, which asynchronous
// copies cannot move one by one, are read straight from global memory, through the first-level
// cache: staged through registers they took up to twice that time, while float32 staged takes three
// quarters of it.
//
// The warps of a block take neighbouring rows of the input at the same time, so that the rows of
// grad_output that they share come from memory once.
#pragma once

#include "direct_grad_params.h"
#include "direct_work.cuh"
#include "ptx.cuh"

namespace upconv::direct {

constexpr unsigned kAllLanes = 0xffffffffu;

// --- Work ------------------------------------------------------------------------------------

// One column of the weight: where its outputs lie, from those of the weight's first tap on.
struct Column {
  int channel, z, y;

  __device__ Column(const DirectGradParams& p, int index) {
    y = index % p.kernel_y * p.dilation_y;
    index /= p.kernel_y;
    z = index % p.kernel_z * p.dilation_z;
    channel = index / p.kernel_z;
  }
};

// A row of pixels or a piece of one. Neighbouring units are neighbouring rows.
struct PixelRow {
  int64_t image;
  int z, y, begin, end;

  __device__ PixelRow(const DirectGradParams& p, int unit) {
    const int row = p.by_in_h(unit), slice = p.by_segments(row), first = p.by_in_d(slice);
    y = unit - row * p.in_h;
    begin = (row - slice * p.segments) * p.segment;
    end = min(begin + p.segment, p.in_w);
    z = slice - first * p.in_d;
    image = first;
  }
};

// The lane's tap along the width and its pixel. Lanes that are left over do what others do.
struct Place {
  int first_x, last_x;  // taps of the warp
  int slot, tap, pixel;
  int inner, stop;  // between these pixels every lane meets an output

  __device__ Place(const DirectGradParams& p, int first) : first_x(first) {
    const int lane = threadIdx.x % 32;
    last_x = min(first + p.lanes_x, p.kernel_x) - 1;
    slot = lane / p.lanes_x;
    pixel = slot < p.slots ? slot : 0;
    tap = min(lane % p.lanes_x, last_x - first);
    const int low = max(p.padding_x - first_x * p.dilation_x, 0);
    const int high = p.out_w - 1 + p.padding_x - last_x * p.dilation_x;
    inner = (low + p.stride_x - 1) / p.stride_x;
    stop = high < 0 ? 0 : high / p.stride_x + 1;
  }

  __device__ __forceinline__ bool active(const DirectGradParams& p) const { return slot < p.slots; }
};

// --- Staging ---------------------------------------------------------------------------------

template <typename T>
constexpr bool kStaged = sizeof(T) >= 4;

template <typename T>
__device__ __forceinline__ void stage_one(const T* source, T* target) {
  ptx::copy_async<sizeof(T)>(ptx::shared_address(target), source, sizeof(T));
}

// Columns `low` to `low` + `count` - 1 of the rows of grad_output that `met` names, as
// [column][kGradOutputs]; what lies outside the tensor is left as it is and never read. Each lane
// has the offset of one column from `gy` on.
template <int kColumns, typename T>
__device__ __forceinline__ void stage_outputs(const DirectGradParams& p, const T* gy, int my_offset,
                                              int low, int count, unsigned met, T* stage) {
  for (int j = threadIdx.x % 32; j < (count + 31) / 32 * 32; j += 32) {
    const bool inside = j < count && below(low + j, p.out_w);
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const int offset = __shfl_sync(kAllLanes, my_offset, c);
      if (inside && met >> c & 1) stage_one(gy + low + j + offset, stage + c * kGradOutputs + j);
    }
  }
}

__device__ __forceinline__ void wait_until_staged() {
  ptx::copy_async_commit();
  ptx::copy_async_wait<0>();
  __syncwarp();
}

}  // namespace upconv::direct
