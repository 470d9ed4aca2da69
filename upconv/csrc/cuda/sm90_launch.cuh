// Host side of the Hopper kernel for one operand type: plan integers in, two launches out.
#pragma once

#include <cuda_runtime.h>

#include "sm90_launch.h"
#include "sm90_wgmma_fprop.cuh"

namespace upconv {

// Every tile the planner may ask for: (N, MB). TILES in upconv/planner/sm90.py is the same list.
#define UPCONV_SM90_TILES(X) \
  X(256, 1) X(216, 1) X(184, 1) X(128, 1) X(64, 1) X(128, 2) X(104, 2) X(64, 2) X(80, 3) X(64, 4)

template <typename Operand, int N, int MB>
cudaError_t launch_tile(const Sm90Params& p, int blocks, cudaStream_t stream) {
  auto kernel = sm90_wgmma_fprop<Operand, N, MB>;
  const int bytes = shared_bytes(p);
  cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return error;
  kernel<<<blocks, kThreads, bytes, stream>>>(p);
  return cudaGetLastError();
}

template <typename Operand>
cudaError_t launch_fprop(const Sm90Params& p, int multiprocessors, cudaStream_t stream) {
  const int units = p.tiles_o * p.tiles_y * p.tiles_x * p.groups;
  const int blocks = units < multiprocessors ? units : multiprocessors;
#define UPCONV_TRY(n, mb) \
  if (p.tile_n == n && p.job_blocks == mb) return launch_tile<Operand, n, mb>(p, blocks, stream);
  UPCONV_SM90_TILES(UPCONV_TRY)
#undef UPCONV_TRY
  return cudaErrorInvalidConfiguration;
}

template <typename Operand>
cudaError_t launch_pack(const Sm90Params& p, const void* weight, void* packed,
                        cudaStream_t stream) {
  int most = 1;
  for (int i = 0; i < p.jobs; ++i) {
    const int total = p.slices * p.job[i].steps * (kStageBytes / 16);
    if (total > most) most = total;
  }
  const dim3 grid((most + 255) / 256, p.jobs);
  sm90_pack_weights<Operand><<<grid, 256, 0, stream>>>(
      p, static_cast<const typename Operand::Element*>(weight), static_cast<uint4*>(packed));
  return cudaGetLastError();
}

}  // namespace upconv
