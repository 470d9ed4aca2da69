// Entry points of the Hopper kernel for patches, free of PyTorch: what binding and tests call.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "sm90_patch_params.h"

namespace upconv {

// Reads the planner's integers. Returns false when they do not make a plan.
bool read_patch_plan(const int64_t* record, int64_t length, PatchParams* plan);

int64_t patch_packed_bytes(const PatchParams& plan);

cudaError_t patch_pack(const PatchParams& plan, const void* weight, void* packed,
                       cudaStream_t stream);
cudaError_t patch_run(const PatchParams& plan, int multiprocessors, cudaStream_t stream);

}  // namespace upconv
