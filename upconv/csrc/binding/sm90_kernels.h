// The Hopper kernels as the binding sees them: rows of the tables of kernels.
#pragma once

#include "cuda/sm90_launch.h"
#include "cuda/sm90_patch_launch.h"
#include "cuda/sm90_phases_launch.h"
#include "cuda/sm90_walk_launch.h"
#include "cuda/sm90_wgrad_launch.h"
#include "cuda/sm90_wgrad_patch_launch.h"
#include "cuda/sm90_wgrad_phases_launch.h"
#include "cuda_kernel.h"

namespace upconv {

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

inline CudaKernel::Prepared read_walk(const CallSizes& call, const std::vector<int64_t>& record) {
  auto plan = std::make_shared<WalkParams>();
  if (!read_walk_plan(record.data(), static_cast<int64_t>(record.size()), plan.get()))
    return nullptr;
  // Walks go through the rows of an image as they do through the depths of a volume.
  const auto is = [&](const int64_t (&sizes)[3], int z, int y, int x) {
    const bool by_rows = sizes[0] == 1 && y == 1;
    return sizes[2] == x && (by_rows ? sizes[1] == z : sizes[0] == z && sizes[1] == y);
  };
  const bool fits = !call.channels_last && call.groups == 1 && plan->batch == call.batch &&
                    plan->in_channels == call.in_channels &&
                    plan->out_channels == call.out_channels &&
                    is(call.in, plan->in_d, plan->in_h, plan->in_w) &&
                    is(call.out, plan->out_d, plan->out_h, plan->out_w) &&
                    is(call.kernel, plan->kernel_z, plan->kernel_y, plan->kernel_x) &&
                    call.weight_strides(plan->weight_in, plan->weight_out);
  if (!fits) return nullptr;
  return plan;
}

inline const WalkParams& walk_plan(const void* plan) {
  return *static_cast<const WalkParams*>(plan);
}

inline CudaKernel walk_kernel() {
  return {kSm90Walk,
          "the Hopper kernel that walks",
          16,
          read_walk,
          [](const void* plan) { return walk_packed_bytes(walk_plan(plan)); },
          [](const void* plan, const void* weight, void* packed, cudaStream_t stream) {
            return walk_pack(walk_plan(plan), weight, packed, stream);
          },
          [](const void* plan, const Operands& operands, int multiprocessors, cudaStream_t stream) {
            WalkParams params = walk_plan(plan);
            params.source = operands.input;
            params.w = operands.weight;
            params.bias = operands.bias;
            params.result = operands.output;
            return walk_run(params, multiprocessors, stream);
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

// The row of a kernel for the weight's gradient whose parameters are `Params`.
template <typename Params, cudaError_t (*kLaunch)(const Params&, int, cudaStream_t),
          int64_t (*kWorkspaceBytes)(const Params&)>
CudaKernel pixels_wgrad_kernel(KernelId id, const char* name, decltype(CudaKernel::read) read) {
  CudaKernel kernel{id, name, 16, read, nullptr, nullptr, nullptr};
  kernel.launch = [](const void* plan, const Operands& operands, int multiprocessors,
                     cudaStream_t stream) {
    Params params = *static_cast<const Params*>(plan);
    params.x = operands.input;
    params.gy = operands.weight;
    params.gw = operands.output;
    params.gb = operands.bias_gradient;
    params.workspace = static_cast<float*>(operands.workspace);
    return kLaunch(params, multiprocessors, stream);
  };
  kernel.adds_bias = [](const void* plan) { return static_cast<const Params*>(plan)->sums != 0; };
  kernel.workspace_bytes = [](const void* plan) {
    return kWorkspaceBytes(*static_cast<const Params*>(plan));
  };
  return kernel;
}

inline CudaKernel patch_wgrad_kernel() {
  return pixels_wgrad_kernel<PatchWgradParams, patch_wgrad, patch_wgrad_workspace_bytes>(
      kSm90PatchWgrad, "the Hopper kernel for the weight's gradient of patches", read_patch_wgrad);
}

inline CudaKernel::Prepared read_phases_wgrad(const CallSizes& call,
                                              const std::vector<int64_t>& record) {
  auto plan = std::make_shared<PhasesWgradParams>();
  if (!read_phases_wgrad_plan(record.data(), static_cast<int64_t>(record.size()), plan.get()))
    return nullptr;
  int64_t in[] = {plan->in_d, plan->in_h, plan->in_w};
  int64_t out[] = {plan->out_d, plan->out_h, plan->out_w};
  int64_t kernel[] = {plan->kernel_z, plan->kernel_y, plan->kernel_x};
  // Some rows of the layer are one of the plan's, with all four taps side by side.
  if (plan->square) {
    const int64_t rows = plan->in_w / plan->square;
    in[1] *= rows, in[2] = plan->square;
    out[1] *= 2 * rows, out[2] /= 2 * rows;
    kernel[1] *= 2, kernel[2] /= 2;
  }
  const bool fits = !call.channels_last && call.groups == 1 && plan->batch == call.batch &&
                    plan->in_channels == call.in_channels &&
                    plan->out_channels == call.out_channels && std::equal(in, in + 3, call.in) &&
                    std::equal(out, out + 3, call.out) &&
                    std::equal(kernel, kernel + 3, call.kernel);
  if (!fits) return nullptr;
  return plan;
}

inline CudaKernel phases_wgrad_kernel() {
  return pixels_wgrad_kernel<PhasesWgradParams, phases_wgrad, phases_wgrad_workspace_bytes>(
      kSm90PhasesWgrad, "the Hopper kernel for the weight's gradient of all phases of a row",
      read_phases_wgrad);
}

}  // namespace upconv
