// Entry points of the mma.sync kernels for the gradients, free of PyTorch: what binding and tests
// call.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "gather_params.h"
#include "parts.h"

namespace upconv {

// Reads the planner's integers. Returns false when they do not make a plan.
bool read_gather_plan(const int64_t* record, int64_t length, GatherParams* plan);

int64_t gather_workspace_bytes(const GatherParams& plan);  // 0 for the input's gradient

cudaError_t gather_grad(const GatherParams& plan, cudaStream_t stream);

}  // namespace upconv
