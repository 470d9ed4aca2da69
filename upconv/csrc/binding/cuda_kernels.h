// The GPU kernels as the binding sees them: one table row each, chosen by a plan's kernel number.
//
// To add a kernel: include its launch header, write its `read_...` (the planner's integers into the
// kernel's own parameters, null where they do not fit the call), and add a row to cuda_kernels().
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "common.h"
#include "cuda/direct_grad_launch.h"
#include "cuda/direct_launch.h"
#include "cuda/gather_launch.h"
#include "cuda/mma_launch.h"
#ifdef UPCONV_SM90
#include "cuda/sm90_launch.h"
#include "cuda/sm90_patch_launch.h"
#include "cuda/sm90_phases_launch.h"
#include "cuda/sm90_wgrad_launch.h"
#include "cuda/sm90_wgrad_patch_launch.h"
#endif

namespace upconv {

// The sizes of a call, leading dimensions that it does not have as 1. A plan that speaks of other
// sizes than the tensors have would have a kernel read or write outside them.
struct CallSizes {
  int64_t batch, in_channels, out_channels, groups;
  Direction direction;
  int ndim;
  bool channels_last;
  int64_t in[3], out[3], kernel[3];  // depth, height, width

  explicit CallSizes(const PlanKey& key)
      : batch(key[kKeyBatch]),
        in_channels(key[kKeyInChannels]),
        out_channels(key[kKeyOutChannels]),
        groups(key[kKeyGroups]),
        direction(static_cast<Direction>(key[kKeyDirection])),
        ndim(static_cast<int>(key[kKeyNdim])),
        channels_last(key[kKeyChannelsLast] != 0) {
    for (int i = 0; i < 3; ++i) {
      const int dimension = i - (3 - ndim);
      const auto value = [&](int list) { return key[kKeyHeader + list * ndim + dimension]; };
      in[i] = out[i] = kernel[i] = 1;
      if (dimension < 0) continue;
      in[i] = value(0);
      kernel[i] = value(1);
      out[i] = (in[i] - 1) * value(2) - 2 * value(3) + value(5) * (kernel[i] - 1) + value(4) + 1;
    }
    // The input's gradient is a convolution the other way: a kernel reads what the layer wrote.
    if (direction == kGradInput) {
      std::swap(in_channels, out_channels);
      for (int i = 0; i < 3; ++i) std::swap(in[i], out[i]);
    }
  }

  // Are these the weight's strides between the channels that a kernel reads and writes?
  bool weight_strides(int64_t by_in, int64_t by_out) const {
    const int64_t taps = kernel[0] * kernel[1] * kernel[2];
    const bool swapped = direction == kGradInput;
    return by_in == (swapped ? taps : out_channels / groups * taps) &&
           by_out == (swapped ? in_channels / groups * taps : taps);
  }
};

// Where the tensors of one launch lie; `weight` is packed where the kernel packs. A kernel for the
// weight's gradient gets grad_output in its place.
struct Operands {
  const void* input;
  const void* weight;
  const void* bias;  // null where there is none
  void* output;
  void* workspace = nullptr;      // of the size that the kernel asks for
  void* bias_gradient = nullptr;  // for plans whose kernel adds it up on the way
};

struct CudaKernel {
  using Prepared = std::shared_ptr<const void>;

  KernelId id;
  const char* name;  // in error messages
  int alignment;     // bytes: of the input's first element
  Prepared (*read)(const CallSizes&, const std::vector<int64_t>& record);
  // Both null for a kernel that reads the weight as PyTorch keeps it.
  int64_t (*packed_bytes)(const void* plan);
  cudaError_t (*pack)(const void* plan, const void* weight, void* packed, cudaStream_t);
  cudaError_t (*launch)(const void* plan, const Operands&, int multiprocessors, cudaStream_t);
  int64_t (*workspace_bytes)(const void* plan) = nullptr;  // null: none needed
  bool (*adds_bias)(const void* plan) = nullptr;           // null: none of its plans does
};

// ------------------------------------------------------------------------------------------------
// The Hopper kernel

#ifdef UPCONV_SM90
inline CudaKernel::Prepared read_sm90(const CallSizes& call, const std::vector<int64_t>& record) {
  auto plan = std::make_shared<Sm90Params>();
  if (!read_sm90_plan(record.data(), static_cast<int64_t>(record.size()), plan.get()))
    return nullptr;
  const int64_t groups = plan->conv_groups;
  const bool fits =
      groups == call.groups && plan->batch == call.batch &&
      plan->channels_last == call.channels_last && plan->in_channels * groups == call.in_channels &&
      plan->out_channels * groups == call.out_channels && plan->in_d == call.in[0] &&
      plan->in_h == call.in[1] && plan->in_w == call.in[2] && plan->out_d == call.out[0] &&
      plan->out_h == call.out[1] && plan->out_w == call.out[2] &&
      call.weight_strides(plan->weight_in, plan->weight_out);
  if (!fits) return nullptr;
  return plan;
}

inline const Sm90Params& sm90_plan(const void* plan) {
  return *static_cast<const Sm90Params*>(plan);
}

inline CudaKernel sm90_kernel() {
  return {kSm90WgmmaFprop,
          "the Hopper kernel",
          16,
          read_sm90,
          [](const void* plan) { return sm90_packed_bytes(sm90_plan(plan)); },
          [](const void* plan, const void* weight, void* packed, cudaStream_t stream) {
            return sm90_pack(sm90_plan(plan), weight, packed, stream);
          },
          [](const void* plan, const Operands& operands, int multiprocessors, cudaStream_t stream) {
            Sm90Params params = sm90_plan(plan);
            params.x = operands.input;
            params.w = static_cast<const uint4*>(operands.weight);
            params.bias = operands.bias;
            params.y = operands.output;
            params.ranges = static_cast<uint2*>(operands.workspace);
            return sm90_fprop(params, multiprocessors, stream);
          },
          [](const void* plan) { return sm90_workspace_bytes(sm90_plan(plan)); }};
}

inline CudaKernel::Prepared read_patch(const CallSizes& call, const std::vector<int64_t>& record) {
  auto plan = std::make_shared<PatchParams>();
  if (!read_patch_plan(record.data(), static_cast<int64_t>(record.size()), plan.get()))
    return nullptr;
  const int64_t in[] = {plan->in_d, plan->in_h, plan->in_w};
  const int64_t step[] = {plan->step_z, plan->step_y, plan->step_x};
  const bool back = call.direction == kGradInput;
  bool fits = plan->channels_last == call.channels_last && call.groups == 1 &&
              plan->backward == back && plan->batch == call.batch &&
              plan->in_channels == (back ? call.out_channels : call.in_channels) &&
              plan->out_channels == (back ? call.in_channels : call.out_channels);
  for (int i = 0; i < 3; ++i) {
    fits = fits && in[i] == (back ? call.out : call.in)[i] && step[i] == call.kernel[i] &&
           in[i] * step[i] == (back ? call.in : call.out)[i];
  }
  if (!fits) return nullptr;
  return plan;
}

inline const PatchParams& patch_plan(const void* plan) {
  return *static_cast<const PatchParams*>(plan);
}

inline CudaKernel patch_kernel() {
  return {kSm90Patch,
          "the Hopper kernel for patches",
          16,
          read_patch,
          [](const void* plan) { return patch_packed_bytes(patch_plan(plan)); },
          [](const void* plan, const void* weight, void* packed, cudaStream_t stream) {
            return patch_pack(patch_plan(plan), weight, packed, stream);
          },
          [](const void* plan, const Operands& operands, int multiprocessors, cudaStream_t stream) {
            PatchParams params = patch_plan(plan);
            params.source = operands.input;
            params.w = operands.weight;
            params.bias = operands.bias;
            params.result = operands.output;
            return patch_run(params, multiprocessors, stream);
          }};
}

inline CudaKernel::Prepared read_phases(const CallSizes& call, const std::vector<int64_t>& record) {
  auto plan = std::make_shared<PhasesParams>();
  if (!read_phases_plan(record.data(), static_cast<int64_t>(record.size()), plan.get()))
    return nullptr;
  const int64_t in[] = {plan->in_d, plan->in_h, plan->in_w};
  const int64_t out[] = {plan->out_d, plan->out_h, plan->out_w};
  const int64_t kernel[] = {plan->kernel_z, plan->kernel_y, plan->kernel_x};
  const bool back = call.direction == kGradInput;
  bool fits = !call.channels_last && call.groups == 1 && plan->backward == back &&
              plan->batch == call.batch &&
              plan->in_channels == (back ? call.out_channels : call.in_channels) &&
              plan->out_channels == (back ? call.in_channels : call.out_channels);
  for (int i = 0; i < 3; ++i) {
    fits = fits && in[i] == (back ? call.out : call.in)[i] &&
           out[i] == (back ? call.in : call.out)[i] && kernel[i] == call.kernel[i];
  }
  if (!fits) return nullptr;
  return plan;
}

inline const PhasesParams& phases_plan(const void* plan) {
  return *static_cast<const PhasesParams*>(plan);
}

inline CudaKernel phases_kernel() {
  return {kSm90Phases,
          "the Hopper kernel for both phases of a row",
          16,
          read_phases,
          [](const void* plan) { return phases_packed_bytes(phases_plan(plan)); },
          [](const void* plan, const void* weight, void* packed, cudaStream_t stream) {
            return phases_pack(phases_plan(plan), weight, packed, stream);
          },
          [](const void* plan, const Operands& operands, int multiprocessors, cudaStream_t stream) {
            PhasesParams params = phases_plan(plan);
            params.source = operands.input;
            params.w = operands.weight;
            params.bias = operands.bias;
            params.result = operands.output;
            return phases_run(params, multiprocessors, stream);
          }};
}

inline CudaKernel::Prepared read_wgrad(const CallSizes& call, const std::vector<int64_t>& record) {
  auto plan = std::make_shared<WgradParams>();
  if (!read_wgrad_plan(record.data(), static_cast<int64_t>(record.size()), plan.get()))
    return nullptr;
  const int in[] = {plan->in_d, plan->in_h, plan->in_w};
  const int out[] = {plan->out_d, plan->out_h, plan->out_w};
  const bool fits = !call.channels_last && plan->batch == call.batch &&
                    plan->in_channels == call.in_channels &&
                    plan->out_channels == call.out_channels && std::equal(in, in + 3, call.in) &&
                    std::equal(out, out + 3, call.out) &&
                    plan->taps == call.kernel[0] * call.kernel[1] * call.kernel[2];
  if (!fits) return nullptr;
  return plan;
}

inline CudaKernel wgrad_kernel() {
  CudaKernel kernel{kSm90WgmmaWgrad,
                    "the Hopper kernel for the weight's gradient",
                    16,
                    read_wgrad,
                    nullptr,
                    nullptr,
                    nullptr};
  kernel.launch = [](const void* plan, const Operands& operands, int, cudaStream_t stream) {
    WgradParams params = *static_cast<const WgradParams*>(plan);
    params.x = operands.input;
    params.gy = operands.weight;
    params.gw = operands.output;
    params.gb = operands.bias_gradient;
    params.workspace = static_cast<float*>(operands.workspace);
    return sm90_wgrad(params, stream);
  };
  kernel.adds_bias = [](const void* plan) { return static_cast<const WgradParams*>(plan)->sums; };
  kernel.workspace_bytes = [](const void* plan) {
    return wgrad_workspace_bytes(*static_cast<const WgradParams*>(plan));
  };
  return kernel;
}

inline CudaKernel::Prepared read_patch_wgrad(const CallSizes& call,
                                             const std::vector<int64_t>& record) {
  auto plan = std::make_shared<PatchWgradParams>();
  if (!read_patch_wgrad_plan(record.data(), static_cast<int64_t>(record.size()), plan.get()))
    return nullptr;
  const int64_t in[] = {plan->in_d, plan->in_h, plan->in_w};
  const int64_t step[] = {plan->step_z, plan->step_y, 2};
  bool fits = !call.channels_last && call.groups == 1 && plan->batch == call.batch &&
              plan->in_channels == call.in_channels && plan->out_channels == call.out_channels;
  for (int i = 0; i < 3; ++i) {
    fits =
        fits && in[i] == call.in[i] && step[i] == call.kernel[i] && in[i] * step[i] == call.out[i];
  }
  if (!fits) return nullptr;
  return plan;
}

inline CudaKernel patch_wgrad_kernel() {
  CudaKernel kernel{kSm90PatchWgrad,
                    "the Hopper kernel for the weight's gradient of patches",
                    16,
                    read_patch_wgrad,
                    nullptr,
                    nullptr,
                    nullptr};
  kernel.launch = [](const void* plan, const Operands& operands, int multiprocessors,
                     cudaStream_t stream) {
    PatchWgradParams params = *static_cast<const PatchWgradParams*>(plan);
    params.x = operands.input;
    params.gy = operands.weight;
    params.gw = operands.output;
    params.gb = operands.bias_gradient;
    params.workspace = static_cast<float*>(operands.workspace);
    return patch_wgrad(params, multiprocessors, stream);
  };
  kernel.adds_bias = [](const void* plan) {
    return static_cast<const PatchWgradParams*>(plan)->sums != 0;
  };
  kernel.workspace_bytes = [](const void* plan) {
    return patch_wgrad_workspace_bytes(*static_cast<const PatchWgradParams*>(plan));
  };
  return kernel;
}
#endif

// ------------------------------------------------------------------------------------------------
// The mma.sync kernel

inline CudaKernel::Prepared read_mma(const CallSizes& call, const std::vector<int64_t>& record) {
  auto plan = std::make_shared<MmaPlan>();
  if (!read_mma_plan(record.data(), static_cast<int64_t>(record.size()), plan.get()))
    return nullptr;
  const MmaParams& p = plan->params;
  const int64_t taps = call.kernel[0] * call.kernel[1] * call.kernel[2];
  const bool fits = p.batch == call.batch && !call.channels_last && p.groups == call.groups &&
                    p.in_channels * call.groups == call.in_channels &&
                    p.out_channels * call.groups == call.out_channels && p.in_d == call.in[0] &&
                    p.in_h == call.in[1] && p.in_w == call.in[2] && p.out_d == call.out[0] &&
                    p.out_h == call.out[1] && p.out_w == call.out[2] && p.weight_out == taps &&
                    p.weight_in == taps * p.out_channels;
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

// Every kernel of this library: those for the gradient of the weight, or all others.
inline const std::vector<CudaKernel>& cuda_kernels() {
  static const std::vector<CudaKernel> kernels = {
#if UPCONV_WGRAD
#ifdef UPCONV_SM90
      wgrad_kernel(),
      patch_wgrad_kernel(),
#endif
      direct_wgrad_kernel(),
      gather_wgrad_kernel(),
#else
#ifdef UPCONV_SM90
      sm90_kernel(), patch_kernel(),  phases_kernel(),
#endif
      mma_kernel(),  direct_kernel(), direct_igrad_kernel(), gather_igrad_kernel(),
#endif
  };
  return kernels;
}

}  // namespace upconv
