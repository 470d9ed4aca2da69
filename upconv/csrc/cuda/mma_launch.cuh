// Host side of the mma.sync kernel for one operand type: plan in, two launches out.
#pragma once

#include <cuda_runtime.h>

#include "mma_fprop.cuh"
#include "mma_launch.h"
#include "shared_memory.h"

namespace upconv {

template <typename Operand>
cudaError_t launch_mma(const MmaParams& p, cudaStream_t stream) {
  auto kernel = p.warp_pixels == 64 ? mma_fprop_kernel<Operand, 4> : mma_fprop_kernel<Operand, 2>;
  cudaError_t error = allow_shared(kernel, p.shared_bytes);
  if (error != cudaSuccess) return error;
  const int tiles = p.tiles_o * p.tiles_z * p.tiles_y * p.tiles_x;
  const int blocks = tiles * p.groups * p.chunks * p.kinds;
  kernel<<<blocks, 32 * p.warps_m * p.warps_n, p.shared_bytes, stream>>>(p);
  return cudaGetLastError();
}

template <typename Operand>
cudaError_t launch_mma_pack(const MmaPlan& plan, const void* weight, void* packed,
                            cudaStream_t stream) {
  const MmaParams& p = plan.params;
  if (p.steps == 0) return cudaSuccess;
  const dim3 grid(p.steps, p.slices, p.groups * p.chunks);
  mma_pack_weights<Operand><<<grid, 32 * Operand::kTiles * p.warps_n, 0, stream>>>(
      p, plan.pack, static_cast<const typename Operand::Element*>(weight),
      static_cast<uint32_t*>(packed));
  return cudaGetLastError();
}

}  // namespace upconv
