// Entry points of the kernels for the gradients of depthwise layers, free of PyTorch: what binding
// and tests call.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "depthwise_params.h"
#include "parts.h"

namespace upconv {

// Reads the planner's integers. Returns false when they do not make a plan.
bool read_depthwise_plan(const int64_t* record, int64_t length, DepthwiseParams* plan);

int64_t depthwise_workspace_bytes(const DepthwiseParams& plan);  // 0 for the input's gradient

cudaError_t depthwise_grad(const DepthwiseParams& plan, cudaStream_t stream);

}  // namespace upconv
