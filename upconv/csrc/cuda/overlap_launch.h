// Entry points of the kernel for few output channels, free of PyTorch: what binding and tests call.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "overlap_params.h"

namespace upconv {

// Reads the planner's integers. Returns false when they do not make a plan.
bool read_overlap_plan(const int64_t* record, int64_t length, OverlapParams* plan);

int64_t overlap_packed_bytes(const OverlapParams& plan);
cudaError_t overlap_pack(const OverlapParams& plan, const void* weight, void* packed,
                         cudaStream_t stream);

cudaError_t overlap_fprop(const OverlapParams& plan, cudaStream_t stream);

}  // namespace upconv
