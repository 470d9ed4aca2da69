// Entry points of the CUDA-core kernel, free of PyTorch: what binding and tests call.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "direct_params.h"

namespace upconv {

// Reads the planner's integers. Returns false when they do not make a plan (wrong length, a count
// over its limit).
bool read_direct_plan(const int64_t* record, int64_t length, DirectParams* plan);

cudaError_t direct_fprop(const DirectParams& plan, cudaStream_t stream);

}  // namespace upconv
