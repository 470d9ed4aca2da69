// Entry points of the Hopper kernel for the weight's gradient of patches, free of PyTorch.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "sm90_wgrad_patch_params.h"

namespace upconv {

// Reads the planner's integers. Returns false when they do not make a plan.
bool read_patch_wgrad_plan(const int64_t* record, int64_t length, PatchWgradParams* plan);

int64_t patch_wgrad_workspace_bytes(const PatchWgradParams& plan);

cudaError_t patch_wgrad(const PatchWgradParams& plan, int multiprocessors, cudaStream_t stream);

}  // namespace upconv
