// The operators for CUDA tensors, in two libraries that are compiled from this file. The gradient
// of the weight has one of its own (UPCONV_WGRAD), which is built when it is first asked for: its
// kernels take a quarter of the compilers' time, and inference needs none of them. Some types of
// the other kernels are in further libraries (cuda_types_binding.cpp).
#include <ATen/cuda/EmptyTensor.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <list>

#include "common.h"
#include "cuda/bias_gradient.h"
#include "cuda_kernels.h"
#include "gradients.h"
#include "tf32.h"

namespace upconv {
namespace {

PlanCache& plan_cache() {
  static PlanCache cache;
  return cache;
}

// The plan as the kernel takes it, made once. A plan for a kernel that no library here has (they
// were built for another GPU) is PyTorch's to serve.
bool record_complete(const PlanKey& key, PlanRecord& plan) {
  plan.gpu_kernel = find_kernel_anywhere(cuda_kernels(), plan.kernel, key);
  if (plan.gpu_kernel == nullptr) {
    plan.kernel = kAten;
    return true;
  }
  plan.prepared = plan.gpu_kernel->read(CallSizes(key), plan.params);
  return plan.prepared != nullptr;
}

// ------------------------------------------------------------------------------------------------
// Packed weights

// A frozen weight (no gradient, unchanged version) is packed once for each plan and stream that
// uses it. Entries whose weight is gone are dropped when a new one comes.
class PackedWeights {
 public:
  Tensor find(const Tensor& weight, const PlanPointer& plan, cudaStream_t stream) {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const Entry& entry : entries_) {
      if (entry.weight._unsafe_get_target() == weight.unsafeGetTensorImpl() &&
          entry.version == weight._version() && entry.data == weight.const_data_ptr() &&
          entry.plan == plan && entry.stream == stream && !entry.weight.expired())
        return entry.packed;
    }
    return {};
  }

  void insert(const Tensor& weight, const PlanPointer& plan, cudaStream_t stream, Tensor packed) {
    std::lock_guard<std::mutex> lock(mutex_);
    entries_.remove_if([&](const Entry& entry) {
      return entry.weight.expired() ||
             (entry.weight._unsafe_get_target() == weight.unsafeGetTensorImpl() &&
              entry.version != weight._version());
    });
    if (entries_.size() >= kMost) entries_.pop_front();
    entries_.push_back({c10::weak_intrusive_ptr<at::TensorImpl>(weight.getIntrusivePtr()),
                        weight._version(), weight.const_data_ptr(), plan, stream,
                        std::move(packed)});
  }

  void clear() {
    std::lock_guard<std::mutex> lock(mutex_);
    entries_.clear();
  }

 private:
  struct Entry {
    c10::weak_intrusive_ptr<at::TensorImpl> weight;
    int64_t version;
    const void* data;
    PlanPointer plan;
    cudaStream_t stream;
    Tensor packed;
  };
  static constexpr size_t kMost = 128;
  std::mutex mutex_;
  std::list<Entry> entries_;
};

PackedWeights& packed_weights() {
  static PackedWeights cache;
  return cache;
}

void check(cudaError_t error, const char* what, const PlanKey& key) {
  if (error == cudaSuccess) return;
  TORCH_CHECK(false, message("upconv: ", what, " failed: ", cudaGetErrorString(error),
                             " (problem key ", key.list(),
                             "); set UPCONV_BACKEND=aten to go on with PyTorch's own operator"));
}

Tensor empty_cuda(at::IntArrayRef shape, at::ScalarType type, at::Device device,
                  at::MemoryFormat format) {
  return Tensor(at::detail::empty_cuda(shape, type, device, format));
}

bool capturing(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  cudaStreamIsCapturing(stream, &status);
  return status != cudaStreamCaptureStatusNone;
}

// Dense in the layout that the plan reads, on the boundary that the kernel's vector loads need.
Tensor readable(const Tensor& tensor, at::MemoryFormat format, int alignment) {
  Tensor dense = tensor.contiguous(format);
  if (reinterpret_cast<uintptr_t>(dense.const_data_ptr()) % alignment != 0) {
    dense = dense.clone(format);
  }
  return dense;
}

// The packed weight: from the table, or by one small kernel. While a CUDA graph is captured the
// packing is part of the graph, which then never reads memory that the table may give up.
Tensor packed_weight(const Tensor& weight, const PlanPointer& plan, const CudaKernel& kernel,
                     const PlanKey& key, cudaStream_t stream) {
  if (kernel.pack == nullptr) return weight.contiguous();
  const bool frozen = !weight.requires_grad() && !weight.is_inference() && !capturing(stream);
  if (frozen) {
    if (Tensor found = packed_weights().find(weight, plan, stream); found.defined()) return found;
  }
  const Tensor dense = readable(weight, at::MemoryFormat::Contiguous, kernel.alignment);
  Tensor packed = empty_cuda({kernel.packed_bytes(plan->prepared.get())}, at::kByte,
                             weight.device(), at::MemoryFormat::Contiguous);
  check(
      kernel.pack(plan->prepared.get(), dense.const_data_ptr(), packed.mutable_data_ptr(), stream),
      "packing the weights", key);
  if (frozen) packed_weights().insert(weight, plan, stream, packed);
  return packed;
}

// What a plan needs besides its tensors; nothing for most of them.
Tensor workspace_of(const CudaKernel& kernel, const PlanPointer& plan, at::Device device) {
  if (kernel.workspace_bytes == nullptr) return {};
  const int64_t bytes = kernel.workspace_bytes(plan->prepared.get());
  return bytes ? empty_cuda({bytes}, at::kByte, device, at::MemoryFormat::Contiguous) : Tensor();
}

void* pointer_to(const Tensor& workspace) {
  return workspace.defined() ? workspace.mutable_data_ptr() : nullptr;
}

// ------------------------------------------------------------------------------------------------
// One call

int multiprocessors(int device) {
  int count = 0;
  cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
  return count;
}

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
  const Tensor workspace = workspace_of(kernel, plan, x.device());
  const Operands operands{x.const_data_ptr(), w.const_data_ptr(),
                          b.defined() ? b.const_data_ptr() : nullptr, y.mutable_data_ptr(),
                          pointer_to(workspace)};
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
  return run_kernel<N>(*plan->gpu_kernel, key, plan, call);
}

// ------------------------------------------------------------------------------------------------
// Gradients

// With the bias's gradient where the plan adds it up on the way: plans do for keys that ask for it.
Tensor run_gradient(const CudaKernel& kernel, const PlanKey& key, const PlanPointer& plan,
                    const GradientCall& call, Tensor* bias) {
  const Tensor &gy = call.grad_output, &other = call.other;
  const c10::cuda::CUDAGuard guard(gy.device());
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream().stream();
  const int ndim = static_cast<int>(key[kKeyNdim]);
  const auto last = ndim == 3 ? at::MemoryFormat::ChannelsLast3d : at::MemoryFormat::ChannelsLast;
  const auto format = key[kKeyChannelsLast] ? last : at::MemoryFormat::Contiguous;
  const bool by_weight = key[kKeyDirection] == kGradWeight;
  const Tensor dense = readable(gy, format, kernel.alignment);
  const Tensor second = by_weight ? readable(other, format, kernel.alignment)
                                  : packed_weight(other, plan, kernel, key, stream);
  Tensor result = empty_cuda(call.size, gy.scalar_type(), gy.device(), format);
  const Tensor workspace = workspace_of(kernel, plan, gy.device());
  Operands operands{(by_weight ? second : dense).const_data_ptr(),
                    (by_weight ? dense : second).const_data_ptr(), nullptr,
                    result.mutable_data_ptr(), pointer_to(workspace)};
  if (kernel.adds_bias != nullptr && kernel.adds_bias(plan->prepared.get())) {
    TORCH_CHECK(bias != nullptr, "upconv: a plan with the bias's gradient for a call without it");
    *bias = empty_cuda({key[kKeyOutChannels]}, gy.scalar_type(), gy.device(),
                       at::MemoryFormat::Contiguous);
    operands.bias_gradient = bias->mutable_data_ptr();
  }
  check(kernel.launch(plan->prepared.get(), operands, multiprocessors(gy.device().index()), stream),
        kernel.name, key);
  return result;
}

Tensor grad_bias(const Tensor& gy, int64_t ndim);

struct CudaGradients {
  static constexpr DeviceKind kKind = kCuda;
  static PlanCache& cache() { return plan_cache(); }
  static bool tf32() { return conv_tf32_allowed(); }
  static int64_t threads() { return 0; }
  static bool complete(const PlanKey& key, PlanRecord& plan) { return record_complete(key, plan); }
  static Tensor run(const PlanKey& key, const PlanPointer& plan, const GradientCall& call,
                    Tensor* bias = nullptr) {
    return run_gradient(*plan->gpu_kernel, key, plan, call, bias);
  }
  static Tensor bias(const Tensor& gy, int64_t ndim) { return grad_bias(gy, ndim); }
};

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
    sum.workspace = static_cast<double*>(workspace.mutable_data_ptr());
  }
  sum.result = result.mutable_data_ptr();
  const cudaError_t error = bias_gradient(sum, stream);
  TORCH_CHECK(error == cudaSuccess,
              message("upconv: adding up the bias's gradient of a grad_output of ", gy.sizes(),
                      " failed: ", cudaGetErrorString(error),
                      "; set UPCONV_BACKEND=aten to go on with PyTorch's own operator"));
  return result;
}

void clear_plans() {
  plan_cache().clear();
  packed_weights().clear();
}

#if UPCONV_WGRAD

TORCH_LIBRARY_IMPL(upconv, CUDA, library) {
  library.impl("conv_transpose_grad_weight", gradient_kernel<CudaGradients, kGradWeight>());
  library.impl("_grad_weight_and_bias", gradient_kernel<CudaGradients, kGradWeight, true>());
}

TORCH_LIBRARY_IMPL(upconv, CompositeExplicitAutograd, library) {
  library.impl("_clear_cuda_wgrad_plans", clear_plans);
}

#else

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

#endif

}  // namespace
}  // namespace upconv
