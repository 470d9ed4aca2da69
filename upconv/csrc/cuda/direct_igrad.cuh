// The gradient of the input of depthwise layers on the CUDA cores.
//
// gx[i] is a sum over all taps of w[tap] * gy[place of (i, tap)]. A lane keeps the weights of its
// tap along the width, one for each row of the kernel, in registers; the lanes of a pixel add up
// what they have as a tree. Strides cost nothing here: direct_fprop, which keeps one plane of
// grad_output for each residue of the stride, took 0.42 ms on a layer with stride 8, this one 0.13.
// There is no form for 16-bit types: it took 0.41 ms where PyTorch takes 0.13.
#pragma once

#include "direct_grad_work.cuh"

namespace upconv::direct {

// The sum over the taps of a pixel, in its first lane: always the same tree.
template <typename Acc>
__device__ __forceinline__ Acc add_taps(const DirectGradParams& p, int tap, Acc sum) {
  for (int count = p.lanes_x; count > 1;) {
    const int half = (count + 1) / 2;
    const Acc other = __shfl_down_sync(kAllLanes, sum, half);
    if (tap + half < count) sum += other;
    count = half;
  }
  return sum;
}

template <typename T, int kColumns>
__global__ void __launch_bounds__(128, kColumns > 8 ? 5 : 6)
    direct_igrad_kernel(const __grid_constant__ DirectGradParams p) {
  using Acc = Sum<T>;
  extern __shared__ __align__(16) unsigned char raw_memory[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  Acc* const stage = reinterpret_cast<Acc*>(raw_memory) + warp * kColumns * kGradOutputs;
  const int share = blockIdx.x % p.shares, channel = blockIdx.x / p.shares;
  const Place place(p, 0);
  const Column mine(p, min(lane, p.all_columns - 1));
  const int64_t row_offset = static_cast<int64_t>(mine.z) * p.out_h + mine.y;
  const int my_offset = static_cast<int>(mine.channel * p.out_plane + row_offset * p.out_w);
  Acc w[kColumns];
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
    const int64_t column = static_cast<int64_t>(channel) * p.all_columns + c;
    w[c] = c < p.all_columns ? widen(static_cast<const T*>(p.x)[column * p.kernel_x + place.tap])
                             : Acc(0);
  }

  const int step = p.slots * p.stride_x;
  const int unit_end = min((share + 1) * p.units, p.all_units);
  for (int unit = share * p.units + warp; unit < unit_end; unit += p.warps) {
    const PixelRow row(p, unit);
    const int oz = row.z * p.stride_z - p.padding_z, oy = row.y * p.stride_y - p.padding_y;
    const unsigned met =
        __ballot_sync(kAllLanes, lane < p.all_columns && below(oz + mine.z, p.out_d) &&
                                     below(oy + mine.y, p.out_h));
    const int64_t plane = row.image * p.groups + channel;
    const T* const gy = static_cast<const T*>(p.gy) + plane * p.out_channels * p.out_plane +
                        (static_cast<int64_t>(oz) * p.out_h + oy) * p.out_w;
    T* const gx =
        static_cast<T*>(p.result) + plane * p.in_plane + (row.z * p.in_h + row.y) * p.in_w;
    for (int first = row.begin; first < row.end; first += p.chunk) {
      const int end = min(first + p.chunk, row.end);
      const int outputs = (end - first - 1) * p.stride_x + (p.kernel_x - 1) * p.dilation_x + 1;
      stage_outputs<kColumns>(p, gy, my_offset, first * p.stride_x - p.padding_x, outputs, met,
                              stage);
      wait_until_staged();
      const Acc* source = stage + place.pixel * p.stride_x + place.tap * p.dilation_x;
#pragma unroll 2
      for (int at = first; at < end; at += p.slots, source += step) {
        const int ix = at + place.pixel;
        const int ox = ix * p.stride_x - p.padding_x + place.tap * p.dilation_x;
        Acc sum = 0;
        if (ix < end && below(ox, p.out_w)) {
#pragma unroll
          for (int c = 0; c < kColumns; ++c) {
            if (met >> c & 1) sum += w[c] * source[c * kGradOutputs];
          }
        }
        sum = add_taps(p, lane - place.slot * p.lanes_x, sum);
        if (lane == place.slot * p.lanes_x && place.active(p) && ix < end) gx[ix] = narrow<T>(sum);
      }
      __syncwarp();
    }
  }
}

}  // namespace upconv::direct
