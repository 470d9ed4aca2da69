// Entry points of the CUDA-core kernel for the weight's gradient, free of PyTorch: what binding and
// tests call.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "direct_wgrad_params.h"

namespace upconv {

// Reads the planner's integers. Returns false when they do not make a plan.
bool read_direct_wgrad_plan(const int64_t* record, int64_t length, DirectWgradParams* plan);

int64_t direct_wgrad_workspace_bytes(const DirectWgradParams& plan);

cudaError_t direct_wgrad(const DirectWgradParams& plan, cudaStream_t stream);

}  // namespace upconv
