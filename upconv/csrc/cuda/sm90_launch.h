// Entry points of the Hopper kernel, free of PyTorch: what binding and tests call.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "sm90_params.h"

namespace upconv {

// Reads the planner's integers. Returns false when they do not make a plan (wrong length, a count
// over its limit).
bool read_sm90_plan(const int64_t* record, int64_t length, Sm90Params* plan);

// Size of the packed weights that a plan reads, and of what `ranges` points to; 0 for none.
int64_t sm90_packed_bytes(const Sm90Params& plan);
int64_t sm90_workspace_bytes(const Sm90Params& plan);

cudaError_t sm90_pack(const Sm90Params& plan, const void* weight, void* packed,
                      cudaStream_t stream);
cudaError_t sm90_fprop(const Sm90Params& plan, int multiprocessors, cudaStream_t stream);

}  // namespace upconv
