// The operators for CPU tensors.
#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>

#include "common.h"
#include "cpu/fprop.h"

namespace upconv {
namespace {

PlanCache& plan_cache() {
  static PlanCache cache;
  return cache;
}

// The layout is stated in cpu/fprop.h. A record that is too short, or that speaks of other sizes
// than the tensors have, would have the kernel read or write outside them.
bool record_complete(const PlanKey& key, const PlanRecord& plan) {
  const std::vector<int64_t>& params = plan.params;
  const int64_t size = static_cast<int64_t>(params.size());
  if (plan.kernel != kCpuFprop || size < kPhaseLists) return false;
  if (params[kBatch] != key[kKeyBatch] || params[kCin] != key[kKeyInChannels] ||
      params[kCout] != key[kKeyOutChannels] || params[kGroups] != key[kKeyGroups])
    return false;
  const int ndim = static_cast<int>(key[kKeyNdim]);
  for (int i = 0; i < ndim; ++i) {
    const int dim = 3 - ndim + i;
    if (params[kInSize + dim] != key_size(key, kListInSize, i) ||
        params[kKernel + dim] != key_size(key, kListKernel, i) ||
        params[kOutSize + dim] != key_out_size(key, i))
      return false;
  }
  int64_t at = kPhaseLists;
  for (int dim = 0; dim < 3; ++dim) {
    if (at >= size || params[at] < 0) return false;
    for (int64_t phases = params[at++]; phases > 0; --phases) {
      if (at + 3 > size || params[at + 2] < 0) return false;
      at += 3 + 2 * params[at + 2];
    }
  }
  return at == size;
}

// Nothing where the kernel declines the call.
template <int N>
std::optional<Tensor> run_cpu_fprop(const PlanKey& key, const PlanRecord& plan, const Call& call) {
  const std::array<int64_t, N + 2> shape = output_shape<N>(key);
  const bool batched = call.input.dim() == N + 2;
  const Tensor x = call.input.contiguous();
  const Tensor w = call.weight.contiguous();
  const Tensor b = call.has_bias() ? call.bias.contiguous() : Tensor();
  Tensor y(at::detail::empty_cpu(at::IntArrayRef(shape).slice(batched ? 0 : 1), x.options()));
  const bool served =
      cpu_fprop(plan.params.data(), static_cast<DType>(key[kKeyDtype]), x.const_data_ptr(),
                w.const_data_ptr(), b.defined() ? b.const_data_ptr() : nullptr,
                y.mutable_data_ptr(), static_cast<int>(key[kKeyThreads]));
  return served ? std::optional<Tensor>(std::move(y)) : std::nullopt;
}

// Our kernel's output, or nothing where PyTorch's is to run.
template <int N>
std::optional<Tensor> run(const Stack& stack) {
  const Call call(stack);
  PlanKey key;
  if (!fill_key<N>(key, call, kCpu, /*tf32=*/false, at::get_num_threads())) {
    check_call(N, stack);
    return std::nullopt;
  }
  const PlanPointer plan = plan_for(plan_cache(), key, stack, record_complete);
  // The kernel writes NCHW only; where PyTorch would write channels_last, PyTorch does.
  if (plan->kernel != kCpuFprop || key[kKeyChannelsLast]) return std::nullopt;
  return run_cpu_fprop<N>(key, *plan, call);
}

void clear_plans() { plan_cache().clear(); }

TORCH_LIBRARY_IMPL(upconv, CPU, library) {
  library.impl("conv_transpose1d", kernel<1, run<1>>());
  library.impl("conv_transpose2d", kernel<2, run<2>>());
  library.impl("conv_transpose3d", kernel<3, run<3>>());
}

TORCH_LIBRARY_IMPL(upconv, AutogradCPU, library) {
  library.impl("conv_transpose1d", gate<1>());
  library.impl("conv_transpose2d", gate<2>());
  library.impl("conv_transpose3d", gate<3>());
}

TORCH_LIBRARY_IMPL(upconv, CompositeExplicitAutograd, library) {
  library.impl("_clear_cpu_plans", clear_plans);
}

}  // namespace
}  // namespace upconv
