// The GPU kernels as the binding sees them: one table row each, chosen by a plan's kernel number
// and type.
//
// To add a kernel: include its launch header, write its `read_...` (the planner's integers into the
// kernel's own parameters, null where they do not fit the call), and add a row to cuda_kernels(),
// or to tensor_core_kernels() where its types are spread over several libraries.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "cuda/depthwise_launch.h"
#include "cuda/direct_grad_launch.h"
#include "cuda/direct_launch.h"
#include "cuda_kernel.h"
#include "cuda_tensor_cores.h"

namespace upconv {

// ------------------------------------------------------------------------------------------------
// The kernel on the CUDA cores

inline CudaKernel::Prepared read_direct(const CallSizes& call, const std::vector<int64_t>& record) {
  auto plan = std::make_shared<DirectParams>();
  if (!read_direct_plan(record.data(), static_cast<int64_t>(record.size()), plan.get()))
    return nullptr;
  const bool fits =
      !call.channels_last && plan->batch == call.batch && plan->groups == call.groups &&
      plan->in_channels * call.groups == call.in_channels &&
      plan->out_channels * call.groups == call.out_channels && plan->in_d == call.in[0] &&
      plan->in_h == call.in[1] && plan->in_w == call.in[2] && plan->out_d == call.out[0] &&
      plan->out_h == call.out[1] && plan->out_w == call.out[2] &&
      call.weight_strides(plan->weight_in, plan->weight_out);
  if (!fits) return nullptr;
  return plan;
}

inline CudaKernel direct_kernel() {
  return {kDirectFprop,
          "the kernel on the CUDA cores",
          1,  // reads single elements
          read_direct,
          nullptr,
          nullptr,
          [](const void* plan, const Operands& operands, int, cudaStream_t stream) {
            DirectParams params = *static_cast<const DirectParams*>(plan);
            params.x = operands.input;
            params.w = operands.weight;
            params.bias = operands.bias;
            params.y = operands.output;
            return direct_fprop(params, stream);
          }};
}

// Those for the gradients share their parameters; `CallSizes` speaks of the input's gradient as of
// a convolution from outputs to inputs.
inline CudaKernel::Prepared read_direct_grad(const CallSizes& call,
                                             const std::vector<int64_t>& record) {
  auto plan = std::make_shared<DirectGradParams>();
  if (!read_direct_grad_plan(record.data(), static_cast<int64_t>(record.size()), plan.get()))
    return nullptr;
  const bool by_weight = call.direction == kGradWeight;
  const int64_t in[] = {plan->in_channels * call.groups, plan->in_d, plan->in_h, plan->in_w};
  const int64_t out[] = {plan->out_channels * call.groups, plan->out_d, plan->out_h, plan->out_w};
  const int64_t *from = by_weight ? in : out, *to = by_weight ? out : in;
  const int kernel[] = {plan->kernel_z, plan->kernel_y, plan->kernel_x};
  const bool fits =
      !call.channels_last && by_weight == (plan->inputs > 0) && plan->batch == call.batch &&
      plan->groups == call.groups && from[0] == call.in_channels && to[0] == call.out_channels &&
      std::equal(from + 1, from + 4, call.in) && std::equal(to + 1, to + 4, call.out) &&
      std::equal(kernel, kernel + 3, call.kernel);
  if (!fits) return nullptr;
  return plan;
}

inline CudaKernel direct_wgrad_kernel() {
  CudaKernel kernel{kDirectWgrad,
                    "the kernel on the CUDA cores for the weight's gradient",
                    1,  // reads single elements
                    read_direct_grad,
                    nullptr,
                    nullptr,
                    nullptr};
  kernel.launch = [](const void* plan, const Operands& operands, int, cudaStream_t stream) {
    DirectGradParams params = *static_cast<const DirectGradParams*>(plan);
    params.x = operands.input;
    params.gy = operands.weight;
    params.result = operands.output;
    params.workspace = operands.workspace;
    return direct_grad(params, stream);
  };
  kernel.workspace_bytes = [](const void* plan) {
    return direct_grad_workspace_bytes(*static_cast<const DirectGradParams*>(plan));
  };
  return kernel;
}

inline CudaKernel direct_igrad_kernel() {
  return {kDirectIgrad,
          "the kernel on the CUDA cores for the input's gradient",
          1,  // reads single elements
          read_direct_grad,
          nullptr,
          nullptr,
          [](const void* plan, const Operands& operands, int, cudaStream_t stream) {
            DirectGradParams params = *static_cast<const DirectGradParams*>(plan);
            params.x = operands.weight;
            params.gy = operands.input;
            params.result = operands.output;
            return direct_grad(params, stream);
          }};
}

// ------------------------------------------------------------------------------------------------
// The kernels for the gradients of depthwise layers with a stride

inline CudaKernel::Prepared read_depthwise(const CallSizes& call,
                                           const std::vector<int64_t>& record) {
  auto plan = std::make_shared<DepthwiseParams>();
  if (!read_depthwise_plan(record.data(), static_cast<int64_t>(record.size()), plan.get()))
    return nullptr;
  const bool by_weight = call.direction == kGradWeight;
  // The images of a signal are the rows of one.
  const int rows = plan->folded ? 1 : plan->in_h, out_rows = plan->folded ? 1 : plan->out_h;
  const int64_t in[] = {plan->in_d, rows, plan->in_w};
  const int64_t out[] = {plan->out_d, out_rows, plan->out_w};
  const int64_t *from = by_weight ? in : out, *to = by_weight ? out : in;
  const int kernel[] = {plan->kernel_z, plan->kernel_y, plan->kernel_x};
  const bool images = plan->folded ? plan->images == 1 && plan->in_h == call.batch &&
                                         plan->out_h == call.batch && call.ndim == 1
                                   : plan->images == call.batch;
  const bool fits = !call.channels_last && by_weight == (plan->by_weight != 0) && images &&
                    plan->channels == call.groups && call.in_channels == call.groups &&
                    call.out_channels == call.groups && std::equal(from, from + 3, call.in) &&
                    std::equal(to, to + 3, call.out) && std::equal(kernel, kernel + 3, call.kernel);
  if (!fits) return nullptr;
  return plan;
}

inline const DepthwiseParams& depthwise_plan(const void* plan) {
  return *static_cast<const DepthwiseParams*>(plan);
}

inline CudaKernel depthwise_wgrad_kernel() {
  CudaKernel kernel{kDepthwiseWgrad,
                    "the kernel for the weight's gradient of depthwise layers",
                    1,  // copies as much at a time as the tensor's place allows
                    read_depthwise,
                    nullptr,
                    nullptr,
                    nullptr};
  kernel.launch = [](const void* plan, const Operands& operands, int, cudaStream_t stream) {
    DepthwiseParams params = depthwise_plan(plan);
    params.other = operands.input;
    params.gy = operands.weight;
    params.result = operands.output;
    params.bias = operands.bias_gradient;
    params.workspace = operands.workspace;
    return depthwise_grad(params, stream);
  };
  kernel.adds_bias = [](const void* plan) { return depthwise_plan(plan).sums != 0; };
  kernel.workspace_bytes = [](const void* plan) {
    return depthwise_workspace_bytes(depthwise_plan(plan));
  };
  return kernel;
}

inline CudaKernel depthwise_igrad_kernel() {
  return {kDepthwiseIgrad,
          "the kernel for the input's gradient of depthwise layers",
          1,
          read_depthwise,
          nullptr,
          nullptr,
          [](const void* plan, const Operands& operands, int, cudaStream_t stream) {
            DepthwiseParams params = depthwise_plan(plan);
            params.other = operands.weight;
            params.gy = operands.input;
            params.result = operands.output;
            return depthwise_grad(params, stream);
          }};
}

// ------------------------------------------------------------------------------------------------

// Every kernel of this library: those for the gradient of the weight, or all others.
inline const KernelTable& cuda_kernels() {
  static const KernelTable kernels = [] {
#if UPCONV_WGRAD
    KernelTable all = {direct_wgrad_kernel(), gather_wgrad_kernel(), depthwise_wgrad_kernel()};
#ifdef UPCONV_SM90
    all.insert(all.end(), {wgrad_kernel(), patch_wgrad_kernel(), phases_wgrad_kernel()});
#endif
#else
    KernelTable all = tensor_core_kernels();
    all.insert(all.end(), {direct_kernel(), direct_igrad_kernel(), depthwise_igrad_kernel()});
#endif
    return all;
  }();
  return kernels;
}

}  // namespace upconv
