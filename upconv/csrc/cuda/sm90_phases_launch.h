// Entry points of the Hopper kernel for both phases of a row, free of PyTorch: what binding and
// tests call.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "sm90_phases_params.h"

namespace upconv {

// Reads the planner's integers. Returns false when they do not make a plan.
bool read_phases_plan(const int64_t* record, int64_t length, PhasesParams* plan);

int64_t phases_packed_bytes(const PhasesParams& plan);

cudaError_t phases_pack(const PhasesParams& plan, const void* weight, void* packed,
                        cudaStream_t stream);
cudaError_t phases_run(const PhasesParams& plan, int multiprocessors, cudaStream_t stream);

}  // namespace upconv
