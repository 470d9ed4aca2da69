// The operators for CUDA tensors, but for the gradient of the weight (cuda_wgrad_binding.cpp).
#include "cuda/bias_gradient.h"
#include "cuda_call.h"

namespace upconv {
namespace {

const std::vector<CudaKernel>& library_kernels() {
  static const std::vector<CudaKernel> kernels = {
#ifdef UPCONV_SM90
      sm90_kernel(),
#endif
      mma_kernel(),
      direct_kernel(),
      direct_igrad_kernel(),
  };
  return kernels;
}

// ------------------------------------------------------------------------------------------------
// One call

template <int N>
Tensor run_kernel(const CudaKernel& kernel, const PlanKey& key, const PlanPointer& plan,
                  const Call& call) {
  const c10::cuda::CUDAGuard guard(call.input.device());
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream().stream();
  const std::array<int64_t, N + 2> shape = output_shape<N>(key);
  const bool batched = call.input.dim() == N + 2;
  const auto last = N == 3 ? at::MemoryFormat::ChannelsLast3d : at::MemoryFormat::ChannelsLast;
  const auto format = key[kKeyChannelsLast] ? last : at::MemoryFormat::Contiguous;
  const Tensor x = readable(call.input, format, kernel.alignment);
  const Tensor b = call.has_bias() ? call.bias.contiguous() : Tensor();
  const Tensor w = packed_weight(call.weight, plan, kernel, key, stream);
  Tensor y = empty_cuda(at::IntArrayRef(shape).slice(batched ? 0 : 1), x.scalar_type(), x.device(),
                        format);
  const Operands operands{x.const_data_ptr(), w.const_data_ptr(),
                          b.defined() ? b.const_data_ptr() : nullptr, y.mutable_data_ptr()};
  check(kernel.launch(plan->prepared.get(), operands, multiprocessors(x.device().index()), stream),
        kernel.name, key);
  return y;
}

// Our kernel's output, or nothing where PyTorch's is to run.
template <int N>
std::optional<Tensor> run(const Stack& stack) {
  const Call call(stack);
  PlanKey key;
  if (!fill_key<N>(key, call, kCuda, conv_tf32_allowed(), /*threads=*/0)) {
    check_call(N, stack);
    return std::nullopt;
  }
  const PlanPointer plan = plan_for(plan_cache(), key, stack, record_complete);
  // An unbatched input can only owe channels_last to its weight; the strides of PyTorch's answer
  // then depend on its backend.
  const bool unbatched = call.input.dim() == N + 1;
  if (plan->kernel == kAten || (unbatched && key[kKeyChannelsLast])) return std::nullopt;
  return run_kernel<N>(*kernel_of(*plan), key, plan, call);
}

// ------------------------------------------------------------------------------------------------
// The gradient of the bias

// The sum of grad_output over everything but its channels. What is not dense (a gradient that was
// expanded from one number, say), empty or of another dtype is PyTorch's to add.
Tensor grad_bias(const Tensor& gy, int64_t ndim) {
  const int64_t at = gy.dim() - ndim - 1;
  const auto type = gy.scalar_type();
  const bool known = type == at::kFloat || type == at::kBFloat16 || type == at::kHalf;
  const bool contiguous = gy.is_contiguous();
  const bool last = !contiguous && at == 1 &&
                    ((ndim == 2 && gy.is_contiguous(at::MemoryFormat::ChannelsLast)) ||
                     (ndim == 3 && gy.is_contiguous(at::MemoryFormat::ChannelsLast3d)));
  if (!known || at < 0 || at > 1 || gy.numel() == 0 || (!contiguous && !last)) {
    at::DimVector others;
    for (int64_t d = 0; d < gy.dim(); ++d)
      if (d != at) others.push_back(d);
    return gy.sum(others);
  }
  const c10::cuda::CUDAGuard guard(gy.device());
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream().stream();
  BiasGradient sum{};
  sum.type = type == at::kFloat      ? SumType::kFloat32
             : type == at::kBFloat16 ? SumType::kBfloat16
                                     : SumType::kFloat16;
  sum.channels_last = last;
  sum.images = at == 1 ? gy.size(0) : 1;
  sum.channels = gy.size(at);
  sum.pixels = gy.numel() / sum.images / sum.channels;
  sum.gy = gy.const_data_ptr();
  plan_bias_gradient(&sum, multiprocessors(gy.device().index()));
  Tensor result = empty_cuda({sum.channels}, type, gy.device(), at::MemoryFormat::Contiguous);
  Tensor workspace;
  if (const int64_t bytes = bias_gradient_workspace_bytes(sum)) {
    workspace = empty_cuda({bytes}, at::kByte, gy.device(), at::MemoryFormat::Contiguous);
    sum.workspace = static_cast<float*>(workspace.mutable_data_ptr());
  }
  sum.result = result.mutable_data_ptr();
  const cudaError_t error = bias_gradient(sum, stream);
  TORCH_CHECK(error == cudaSuccess, "upconv: adding up the bias's gradient of a grad_output of ",
              gy.sizes(), " failed: ", cudaGetErrorString(error),
              "; set UPCONV_BACKEND=aten to go on with PyTorch's own operator");
  return result;
}

TORCH_LIBRARY_IMPL(upconv, CUDA, library) {
  library.impl("conv_transpose1d", kernel<1, run<1>>());
  library.impl("conv_transpose2d", kernel<2, run<2>>());
  library.impl("conv_transpose3d", kernel<3, run<3>>());
  library.impl("conv_transpose_grad_input", gradient_kernel<CudaGradients, kGradInput>());
  library.impl("_grad_bias", grad_bias);
}

TORCH_LIBRARY_IMPL(upconv, AutogradCUDA, library) {
  library.impl("conv_transpose1d", gate<1>());
  library.impl("conv_transpose2d", gate<2>());
  library.impl("conv_transpose3d", gate<3>());
}

TORCH_LIBRARY_IMPL(upconv, CompositeExplicitAutograd, library) {
  library.impl("_clear_cuda_plans", clear_plans);
}

}  // namespace
}  // namespace upconv
