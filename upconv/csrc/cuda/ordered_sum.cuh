// Sums of what thread blocks have left in a workspace, always in the same order.
#pragma once

namespace upconv {

__device__ __forceinline__ void add(float& sum, float more) { sum += more; }
__device__ __forceinline__ void add(double& sum, double more) { sum += more; }
__device__ __forceinline__ void add(float2& sum, float2 more) { sum.x += more.x, sum.y += more.y; }
__device__ __forceinline__ void add(float4& sum, float4 more) {
  sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w;
}

// Numbers `first`, `first + step`, ... below `count`. Those of a batch are on their way together:
// in a loop that the compiler unrolls each load waits for the one before (35 us for 66 of them, 9
// now). What is not there is zero, which changes no sum that began with zero.
template <int kBatch, typename Number, typename At>
__device__ __forceinline__ Number ordered_sum(int first, int count, int step, const At& at) {
  Number sum{};
#pragma unroll 1
  for (int i = first; i < count; i += kBatch * step) {
    Number batch[kBatch];
#pragma unroll
    for (int k = 0; k < kBatch; ++k) batch[k] = i + k * step < count ? at(i + k * step) : Number{};
#pragma unroll
    for (int k = 0; k < kBatch; ++k) add(sum, batch[k]);
  }
  return sum;
}

}  // namespace upconv
