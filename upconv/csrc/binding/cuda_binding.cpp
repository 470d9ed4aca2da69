// The operators for CUDA tensors.
#include <ATen/cuda/EmptyTensor.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <list>

#include "common.h"
#include "cuda_kernels.h"
#include "tf32.h"

namespace upconv {
namespace {

PlanCache& plan_cache() {
  static PlanCache cache;
  return cache;
}

// The kernel of a plan that this library holds; null where it was built without it.
const CudaKernel* kernel_of(const PlanRecord& plan) {
  for (const CudaKernel& kernel : cuda_kernels()) {
    if (kernel.id == plan.kernel) return &kernel;
  }
  return nullptr;
}

// The plan as the kernel takes it, made once. A plan for a kernel that this library was not built
// with (a library built for another GPU) is PyTorch's to serve.
bool record_complete(const PlanKey& key, PlanRecord& plan) {
  const CudaKernel* kernel = kernel_of(plan);
  if (kernel == nullptr) {
    plan.kernel = kAten;
    return true;
  }
  plan.prepared = kernel->read(CallSizes(key), plan.params);
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
  std::string problem;
  for (int64_t value : key.list()) problem += (problem.empty() ? "" : ", ") + std::to_string(value);
  TORCH_CHECK(false, "upconv: ", what, " failed: ", cudaGetErrorString(error), " (problem key [",
              problem, "]); set UPCONV_BACKEND=aten to go on with PyTorch's own operator");
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

// The packed weight: from the table, or by one small kernel. While a CUDA graph is captured the
// packing is part of the graph, which then never reads memory that the table may give up.
Tensor packed_weight(const Tensor& weight, const PlanPointer& plan, const CudaKernel& kernel,
                     const PlanKey& key, cudaStream_t stream) {
  if (kernel.pack == nullptr) return weight.contiguous();
  const bool frozen = !weight.requires_grad() && !weight.is_inference() && !capturing(stream);
  if (frozen) {
    if (Tensor found = packed_weights().find(weight, plan, stream); found.defined()) return found;
  }
  const Tensor dense = weight.contiguous();
  Tensor packed = empty_cuda({kernel.packed_bytes(plan->prepared.get())}, at::kByte,
                             weight.device(), at::MemoryFormat::Contiguous);
  check(
      kernel.pack(plan->prepared.get(), dense.const_data_ptr(), packed.mutable_data_ptr(), stream),
      "packing the weights", key);
  if (frozen) packed_weights().insert(weight, plan, stream, packed);
  return packed;
}

// ------------------------------------------------------------------------------------------------
// One call

int multiprocessors(int device) {
  int count = 0;
  cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
  return count;
}

// Dense in the layout that the plan reads, on the boundary that the kernel's vector loads need.
Tensor readable(const Tensor& tensor, at::MemoryFormat format, int alignment) {
  Tensor dense = tensor.contiguous(format);
  if (reinterpret_cast<uintptr_t>(dense.const_data_ptr()) % alignment != 0) {
    dense = dense.clone(format);
  }
  return dense;
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
  // An unbatched input can only owe channels_last to its weight; PyTorch's answer is contiguous.
  const bool unbatched = call.input.dim() == N + 1;
  if (plan->kernel == kAten || (unbatched && key[kKeyChannelsLast])) return std::nullopt;
  return run_kernel<N>(*kernel_of(*plan), key, plan, call);
}

// ------------------------------------------------------------------------------------------------
// Gradients

// The arguments of a gradient on top of the stack, as many as the forward operators have.
struct GradientCall {
  const Tensor& grad_output;
  const Tensor& other;  // the weight, or the input
  at::DimVector size;   // of the input, or of the weight
  at::DimVector lists[4];
  int64_t groups;

  explicit GradientCall(const Stack& stack)
      : grad_output(Call::argument(stack, 0).toTensor()),
        other(Call::argument(stack, 1).toTensor()),
        size(size_list(Call::argument(stack, 2))),
        lists{size_list(Call::argument(stack, 3)), size_list(Call::argument(stack, 4)),
              size_list(Call::argument(stack, 5)), size_list(Call::argument(stack, 7))},
        groups(Call::argument(stack, 6).toSymInt().expect_int()) {}
};

// The key of a gradient that a kernel of ours might serve, as gradient_key_of in plans.py makes it.
// False also where the layouts of the two tensors differ, and where sizes do not fit: those are no
// part of the key, and a kernel would read outside the tensor.
bool fill_gradient_key(PlanKey& key, const GradientCall& call, Direction direction) {
  const Tensor &gy = call.grad_output, &other = call.other;
  const bool by_weight = direction == kGradWeight;
  const at::IntArrayRef x = by_weight ? other.sizes() : at::IntArrayRef(call.size);
  const at::IntArrayRef w = by_weight ? at::IntArrayRef(call.size) : other.sizes();
  const int64_t dtype = dtype_number(gy.scalar_type());
  const int ndim = static_cast<int>(w.size()) - 2;
  if (dtype < 0 || ndim < 1 || ndim > 3 || gy.dim() != static_cast<int64_t>(x.size()) ||
      (gy.dim() != ndim + 2 && gy.dim() != ndim + 1) || other.scalar_type() != gy.scalar_type() ||
      other.device() != gy.device() || gy.layout() != at::kStrided ||
      other.layout() != at::kStrided)
    return false;
  const bool batched = gy.dim() == ndim + 2;
  int counted = 0, last = 0;
  for (const Tensor* tensor : {&gy, &other}) {
    if (tensor->dim() != ndim + 2) continue;
    ++counted;
    last += strides_channels_last(tensor->sizes(), tensor->strides());
  }
  if (last && !(last == counted && batched)) return false;
  for (const int64_t value :
       {int64_t{kCuda}, int64_t{gy.device().index()}, dtype, int64_t{last != 0},
        int64_t{dtype == 0 && conv_tf32_allowed()}, int64_t{0}, int64_t{0}, int64_t{ndim},
        batched ? x[0] : int64_t{1}, w[0], w[1] * call.groups, call.groups, int64_t{direction}})
    key.push(value);
  for (int i = 0; i < ndim; ++i) key.push(x[x.size() - ndim + i]);
  for (int i = 0; i < ndim; ++i) key.push(w[2 + i]);
  for (const at::DimVector& list : call.lists) {
    if (list.size() != 1 && static_cast<int>(list.size()) != ndim) return false;
    for (int i = 0; i < ndim; ++i) key.push(list[list.size() == 1 ? 0 : i]);
  }
  if (x[x.size() - ndim - 1] != w[0] || gy.size(batched ? 1 : 0) != w[1] * call.groups ||
      (batched && gy.size(0) != x[0]))
    return false;
  for (int i = 0; i < ndim; ++i) {
    const auto value = [&](int list) { return key[kKeyHeader + list * ndim + i]; };
    const int64_t expected =
        (value(0) - 1) * value(2) - 2 * value(3) + value(5) * (value(1) - 1) + value(4) + 1;
    if (gy.size(gy.dim() - ndim + i) != expected) return false;
  }
  return true;
}

// A stack for the operators that take a gradient's name and then its arguments.
Stack with_direction(Direction direction, const Stack& stack) {
  Stack result{at::IValue(direction == kGradWeight ? "grad_weight" : "grad_input")};
  result.insert(result.end(), stack.end() - kArguments, stack.end());
  return result;
}

Tensor run_gradient(const CudaKernel& kernel, const PlanKey& key, const PlanPointer& plan,
                    const GradientCall& call) {
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
  Tensor workspace;
  if (kernel.workspace_bytes != nullptr) {
    workspace = empty_cuda({kernel.workspace_bytes(plan->prepared.get())}, at::kByte, gy.device(),
                           at::MemoryFormat::Contiguous);
  }
  const Operands operands{(by_weight ? second : dense).const_data_ptr(),
                          (by_weight ? dense : second).const_data_ptr(), nullptr,
                          result.mutable_data_ptr(),
                          workspace.defined() ? workspace.mutable_data_ptr() : nullptr};
  check(kernel.launch(plan->prepared.get(), operands, multiprocessors(gy.device().index()), stream),
        kernel.name, key);
  return result;
}

// The gradient by our kernel, or by PyTorch's convolutions where the plan says so.
template <Direction direction>
void gradient(const c10::OperatorHandle&, c10::DispatchKeySet, Stack* stack) {
  const GradientCall call(*stack);
  PlanKey key;
  const bool known = fill_gradient_key(key, call, direction);
  PlanPointer plan = known ? plan_cache().find(key) : nullptr;
  if (plan == nullptr) {
    static const c10::OperatorHandle check_gradient = find_operator("upconv::_check_gradient");
    Stack arguments = with_direction(direction, *stack);
    check_gradient.callBoxed(arguments);
    if (known) plan = make_plan_of(plan_cache(), key, record_complete);
  }
  Tensor result;
  if (plan == nullptr || plan->kernel == kAten) {
    static const c10::OperatorHandle aten_gradient = find_operator("upconv::_aten_gradient");
    Stack arguments = with_direction(direction, *stack);
    aten_gradient.callBoxed(arguments);
    result = arguments.at(0).toTensor();
  } else {
    result = run_gradient(*kernel_of(*plan), key, plan, call);
  }
  torch::jit::drop(*stack, kArguments);
  stack->emplace_back(std::move(result));
}

template <Direction direction>
torch::CppFunction gradient_kernel() {
  return torch::CppFunction::makeFromBoxedFunction<&gradient<direction>>();
}

void clear_plans() {
  plan_cache().clear();
  packed_weights().clear();
}

TORCH_LIBRARY_IMPL(upconv, CUDA, library) {
  library.impl("conv_transpose1d", kernel<1, run<1>>());
  library.impl("conv_transpose2d", kernel<2, run<2>>());
  library.impl("conv_transpose3d", kernel<3, run<3>>());
  library.impl("conv_transpose_grad_input", gradient_kernel<kGradInput>());
  library.impl("conv_transpose_grad_weight", gradient_kernel<kGradWeight>());
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
