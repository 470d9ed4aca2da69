// The operators for CUDA tensors.
#include <ATen/cuda/EmptyTensor.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <list>

#include "common.h"
#include "cuda/sm90_launch.h"
#include "tf32.h"

namespace upconv {
namespace {

PlanCache& plan_cache() {
  static PlanCache cache;
  return cache;
}

// The plan as the kernel takes it, made once. A plan that speaks of other sizes than the tensors
// have would have the kernel read or write outside them.
bool record_complete(const PlanKey& key, PlanRecord& plan) {
  auto params = std::make_shared<Sm90Params>();
  const std::vector<int64_t>& record = plan.params;
  if (plan.kernel != kSm90WgmmaFprop) return false;
  if (!read_sm90_plan(record.data(), static_cast<int64_t>(record.size()), params.get()))
    return false;
  const int ndim = static_cast<int>(key[kKeyNdim]);
  const auto last = [&](int list, int back) -> int64_t {
    return back < ndim ? key[kKeyHeader + list * ndim + ndim - 1 - back] : 1;
  };
  const auto out = [&](int back) {
    return back >= ndim ? 1
                        : (last(0, back) - 1) * last(2, back) - 2 * last(3, back) +
                              last(5, back) * (last(1, back) - 1) + last(4, back) + 1;
  };
  const int64_t groups = params->conv_groups;
  const bool fits = groups == key[kKeyGroups] && params->batch == key[kKeyBatch] &&
                    params->channels_last == key[kKeyChannelsLast] &&
                    params->in_channels * groups == key[kKeyInChannels] &&
                    params->out_channels * groups == key[kKeyOutChannels] &&
                    params->in_w == last(0, 0) && params->in_h == last(0, 1) &&
                    params->in_d == last(0, 2) && params->out_w == out(0) &&
                    params->out_h == out(1) && params->out_d == out(2) &&
                    params->weight_out == last(1, 0) * last(1, 1) * last(1, 2);
  plan.prepared = std::move(params);
  return fits;
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
Tensor packed_weight(const Tensor& weight, const PlanPointer& plan, const Sm90Params& params,
                     const PlanKey& key, cudaStream_t stream) {
  const bool frozen = !weight.requires_grad() && !weight.is_inference() && !capturing(stream);
  if (frozen) {
    if (Tensor found = packed_weights().find(weight, plan, stream); found.defined()) return found;
  }
  const Tensor dense = weight.contiguous();
  Tensor packed = empty_cuda({sm90_packed_bytes(params)}, at::kByte, weight.device(),
                             at::MemoryFormat::Contiguous);
  check(sm90_pack(params, dense.const_data_ptr(), packed.mutable_data_ptr(), stream),
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

// Dense in the layout that the plan reads, on the 16-byte boundary that its vector loads need.
Tensor readable(const Tensor& tensor, at::MemoryFormat format) {
  Tensor dense = tensor.contiguous(format);
  if (reinterpret_cast<uintptr_t>(dense.const_data_ptr()) % 16 != 0) dense = dense.clone(format);
  return dense;
}

template <int N>
Tensor run_sm90(const PlanKey& key, const PlanPointer& plan, const Call& call) {
  const c10::cuda::CUDAGuard guard(call.input.device());
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream().stream();
  const auto& planned = *static_cast<const Sm90Params*>(plan->prepared.get());
  const std::array<int64_t, N + 2> shape = output_shape<N>(key);
  const bool batched = call.input.dim() == N + 2;
  const auto format =
      key[kKeyChannelsLast] ? at::MemoryFormat::ChannelsLast : at::MemoryFormat::Contiguous;
  const Tensor x = readable(call.input, format);
  const Tensor b = call.has_bias() ? call.bias.contiguous() : Tensor();
  const Tensor packed = packed_weight(call.weight, plan, planned, key, stream);
  Tensor y = empty_cuda(at::IntArrayRef(shape).slice(batched ? 0 : 1), x.scalar_type(), x.device(),
                        format);
  Sm90Params params = planned;
  params.x = x.const_data_ptr();
  params.w = static_cast<const uint4*>(packed.const_data_ptr());
  params.bias = b.defined() ? b.const_data_ptr() : nullptr;
  params.y = y.mutable_data_ptr();
  check(sm90_fprop(params, multiprocessors(x.device().index()), stream), "the Hopper kernel", key);
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
  if (plan->kernel != kSm90WgmmaFprop || (unbatched && key[kKeyChannelsLast])) return std::nullopt;
  return run_sm90<N>(key, plan, call);
}

void clear_plans() {
  plan_cache().clear();
  packed_weights().clear();
}

TORCH_LIBRARY_IMPL(upconv, CUDA, library) {
  library.impl("conv_transpose1d", kernel<1, run<1>>());
  library.impl("conv_transpose2d", kernel<2, run<2>>());
  library.impl("conv_transpose3d", kernel<3, run<3>>());
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
