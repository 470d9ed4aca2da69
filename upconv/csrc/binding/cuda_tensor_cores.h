// The kernels on tensor cores as the binding sees them. Those for Hopper are in sm90_kernels.h.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "cuda/gather_launch.h"
#include "cuda/mma_launch.h"
#include "cuda/operands.h"
#include "cuda/overlap_launch.h"
#include "cuda_kernel.h"
#ifdef UPCONV_SM90
#include "sm90_kernels.h"
#endif

namespace upconv {

// ------------------------------------------------------------------------------------------------
// The mma.sync kernel

inline CudaKernel::Prepared read_mma(const CallSizes& call, const std::vector<int64_t>& record) {
  auto plan = std::make_shared<MmaPlan>();
  if (!read_mma_plan(record.data(), static_cast<int64_t>(record.size()), plan.get()))
    return nullptr;
  const MmaParams& p = plan->params;
  const bool fits = p.batch == call.batch && !call.channels_last && p.groups == call.groups &&
                    p.in_channels * call.groups == call.in_channels &&
                    p.out_channels * call.groups == call.out_channels && p.in_d == call.in[0] &&
                    p.in_h == call.in[1] && p.in_w == call.in[2] && p.out_d == call.out[0] &&
                    p.out_h == call.out[1] && p.out_w == call.out[2] &&
                    call.weight_strides(p.weight_in, p.weight_out);
  if (!fits) return nullptr;
  return plan;
}

inline const MmaPlan& mma_plan(const void* plan) { return *static_cast<const MmaPlan*>(plan); }

inline CudaKernel mma_kernel() {
  return {kMmaFprop,
          "the mma.sync kernel",
          1,
          read_mma,
          [](const void* plan) { return mma_packed_bytes(mma_plan(plan)); },
          [](const void* plan, const void* weight, void* packed, cudaStream_t stream) {
            return mma_pack(mma_plan(plan), weight, packed, stream);
          },
          [](const void* plan, const Operands& operands, int, cudaStream_t stream) {
            MmaParams params = mma_plan(plan).params;
            params.x = operands.input;
            params.w = static_cast<const uint4*>(operands.weight);
            params.bias = operands.bias;
            params.y = operands.output;
            return mma_fprop(params, stream);
          }};
}

// ------------------------------------------------------------------------------------------------
// The mma.sync kernel for few output channels

inline CudaKernel::Prepared read_overlap(const CallSizes& call,
                                         const std::vector<int64_t>& record) {
  auto plan = std::make_shared<OverlapParams>();
  if (!read_overlap_plan(record.data(), static_cast<int64_t>(record.size()), plan.get()))
    return nullptr;
  const int64_t in[] = {plan->in_d, plan->in_h, plan->in_w};
  const int64_t out[] = {plan->out_d, plan->out_h, plan->out_w};
  const int kernel[] = {plan->kernel_z, plan->kernel_y, plan->kernel_x};
  const bool fits =
      !call.channels_last && plan->batch == call.batch && plan->groups == call.groups &&
      plan->in_channels * call.groups == call.in_channels &&
      plan->out_channels * call.groups == call.out_channels && std::equal(in, in + 3, call.in) &&
      std::equal(out, out + 3, call.out) && std::equal(kernel, kernel + 3, call.kernel);
  if (!fits) return nullptr;
  return plan;
}

inline const OverlapParams& overlap_plan(const void* plan) {
  return *static_cast<const OverlapParams*>(plan);
}

inline CudaKernel overlap_kernel() {
  return {kOverlapFprop,
          "the mma.sync kernel for few output channels",
          16,
          read_overlap,
          [](const void* plan) { return overlap_packed_bytes(overlap_plan(plan)); },
          [](const void* plan, const void* weight, void* packed, cudaStream_t stream) {
            return overlap_pack(overlap_plan(plan), weight, packed, stream);
          },
          [](const void* plan, const Operands& operands, int, cudaStream_t stream) {
            OverlapParams params = overlap_plan(plan);
            params.x = operands.input;
            params.w = operands.weight;
            params.bias = operands.bias;
            params.y = operands.output;
            return overlap_fprop(params, stream);
          }};
}

// ------------------------------------------------------------------------------------------------
// The mma.sync kernels for the gradients

inline CudaKernel::Prepared read_gather(const CallSizes& call, const std::vector<int64_t>& record) {
  auto plan = std::make_shared<GatherParams>();
  if (!read_gather_plan(record.data(), static_cast<int64_t>(record.size()), plan.get()))
    return nullptr;
  const bool by_weight = call.direction == kGradWeight;
  const int64_t in[] = {plan->in_channels * call.groups, plan->in_d, plan->in_h, plan->in_w};
  const int64_t out[] = {plan->out_channels * call.groups, plan->out_d, plan->out_h, plan->out_w};
  const int64_t *from = by_weight ? in : out, *to = by_weight ? out : in;
  const int kernel[] = {plan->kernel_z, plan->kernel_y, plan->kernel_x};
  const bool fits =
      !call.channels_last && by_weight == (plan->by_weight != 0) && plan->batch == call.batch &&
      plan->groups == call.groups && from[0] == call.in_channels && to[0] == call.out_channels &&
      std::equal(from + 1, from + 4, call.in) && std::equal(to + 1, to + 4, call.out) &&
      std::equal(kernel, kernel + 3, call.kernel);
  if (!fits) return nullptr;
  return plan;
}

inline CudaKernel gather_wgrad_kernel() {
  CudaKernel kernel{kGatherWgrad,
                    "the mma.sync kernel for the weight's gradient",
                    1,  // copies as much at a time as the tensors' places allow
                    read_gather,
                    nullptr,
                    nullptr,
                    nullptr};
  kernel.launch = [](const void* plan, const Operands& operands, int, cudaStream_t stream) {
    GatherParams params = *static_cast<const GatherParams*>(plan);
    params.other = operands.input;
    params.gy = operands.weight;
    params.result = operands.output;
    params.workspace = static_cast<float*>(operands.workspace);
    return gather_wgrad(params, stream);
  };
  kernel.workspace_bytes = [](const void* plan) {
    return gather_workspace_bytes(*static_cast<const GatherParams*>(plan));
  };
  return kernel;
}

inline CudaKernel gather_igrad_kernel() {
  return {kGatherIgrad,
          "the mma.sync kernel for the input's gradient",
          1,
          read_gather,
          nullptr,
          nullptr,
          [](const void* plan, const Operands& operands, int, cudaStream_t stream) {
            GatherParams params = *static_cast<const GatherParams*>(plan);
            params.other = operands.weight;
            params.gy = operands.input;
            params.result = operands.output;
            return gather_igrad(params, stream);
          }};
}

// ------------------------------------------------------------------------------------------------

// All but those for the gradient of the weight, with the types of operands that this library has.
inline KernelTable tensor_core_kernels() {
  KernelTable kernels = {mma_kernel(), overlap_kernel()};
#ifdef UPCONV_SM90
  kernels.push_back(sm90_kernel());
  kernels.push_back(patch_kernel());
#endif
  // These have no split operands: a library of those alone is built without their sources.
#if UPCONV_OPERAND_BITS != 8
  kernels.push_back(gather_igrad_kernel());
#ifdef UPCONV_SM90
  kernels.push_back(phases_kernel());
  kernels.push_back(walk_kernel());
#endif
#endif
  for (CudaKernel& kernel : kernels) kernel.operands = UPCONV_OPERAND_BITS;
  return kernels;
}

}  // namespace upconv
