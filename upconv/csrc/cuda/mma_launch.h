// Entry points of the mma.sync kernel, free of PyTorch: what binding and tests call.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "mma_params.h"

namespace upconv {

struct MmaPlan {
  MmaParams params;
  MmaPack pack;
};

// Reads the planner's integers. Returns false when they do not make a plan (wrong length, a count
// over its limit).
bool read_mma_plan(const int64_t* record, int64_t length, MmaPlan* plan);

// Size of the packed weights that a plan reads.
int64_t mma_packed_bytes(const MmaPlan& plan);

cudaError_t mma_pack(const MmaPlan& plan, const void* weight, void* packed, cudaStream_t stream);
cudaError_t mma_fprop(const MmaParams& params, cudaStream_t stream);

}  // namespace upconv
