// Entry points of the Hopper kernel for the weight's gradient of all phases of a row, free of
// PyTorch.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "sm90_wgrad_phases_params.h"

namespace upconv {

// Reads the planner's integers. Returns false when they do not make a plan.
bool read_phases_wgrad_plan(const int64_t* record, int64_t length, PhasesWgradParams* plan);

int64_t phases_wgrad_workspace_bytes(const PhasesWgradParams& plan);

cudaError_t phases_wgrad(const PhasesWgradParams& plan, int multiprocessors, cudaStream_t stream);

}  // namespace upconv
