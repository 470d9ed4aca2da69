// Entry points of the Hopper kernel that walks, free of PyTorch: what binding and tests call.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "sm90_walk_params.h"

namespace upconv {

// Reads the planner's integers. Returns false when they do not make a plan.
bool read_walk_plan(const int64_t* record, int64_t length, WalkParams* plan);

int64_t walk_packed_bytes(const WalkParams& plan);

cudaError_t walk_pack(const WalkParams& plan, const void* weight, void* packed,
                      cudaStream_t stream);
cudaError_t walk_run(const WalkParams& plan, int multiprocessors, cudaStream_t stream);

}  // namespace upconv
