// Entry points of the mma.sync kernels for the gradients, free of PyTorch: what binding and tests
// call.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "gather_params.h"

namespace upconv {

// Reads the planner's integers. Returns false when they do not make a plan.
bool read_gather_plan(const int64_t* record, int64_t length, GatherParams* plan);

int64_t gather_workspace_bytes(const GatherParams& plan);  // 0 for the input's gradient

// The plan with copies no wider than the places of the tensors allow.
GatherParams with_copies_that_fit(const GatherParams& plan);

cudaError_t gather_wgrad(const GatherParams& plan, cudaStream_t stream);
cudaError_t gather_igrad(const GatherParams& plan, cudaStream_t stream);

}  // namespace upconv
