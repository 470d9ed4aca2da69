// Entry points of the Hopper kernel for the weight's gradient, free of PyTorch.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "sm90_wgrad_params.h"

namespace upconv {

// Reads the planner's integers. Returns false when they do not make a plan.
bool read_wgrad_plan(const int64_t* record, int64_t length, WgradParams* plan);

// Size of the partial sums that the blocks leave for each other.
int64_t wgrad_workspace_bytes(const WgradParams& plan);

cudaError_t sm90_wgrad(const WgradParams& plan, cudaStream_t stream);

}  // namespace upconv
