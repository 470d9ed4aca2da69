// Entry points of the CUDA-core kernels for the gradients, free of PyTorch: what binding and tests
// call.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "direct_grad_params.h"
#include "parts.h"

namespace upconv {

// Reads the planner's integers. Returns false when they do not make a plan.
bool read_direct_grad_plan(const int64_t* record, int64_t length, DirectGradParams* plan);

int64_t direct_grad_workspace_bytes(const DirectGradParams& plan);  // 0 for the input's gradient

cudaError_t direct_grad(const DirectGradParams& plan, cudaStream_t stream);

}  // namespace upconv
