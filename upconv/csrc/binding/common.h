// What the bindings of all devices share: the key of a call, the table of plans, the gate between
// automatic differentiation and the kernels, and the way to PyTorch's own operator.
//
// A call on tensors that has been seen before costs no Python at all: its key is built on the
// stack, looked up, and the kernel runs. Everything else (checking, planning, gradients) is asked
// of Python through the operators that upconv/ops.py defines.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/GradMode.h>
#include <torch/library.h>

#include <array>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace upconv {

using at::Tensor;

// ------------------------------------------------------------------------------------------------
// Error messages

// Text and numbers as one string. TORCH_CHECK would put several parts into a stream, and where the
// compiler links a C++ library of its own into ours, a number in a stream is the end of the message
// or of the process: its locale is the other library's.
inline std::string to_text(const std::string& part) { return part; }
inline std::string to_text(int64_t part) { return std::to_string(part); }
inline std::string to_text(at::IntArrayRef parts) {
  std::string all = "[";
  for (const int64_t part : parts) all += (all.size() > 1 ? ", " : "") + std::to_string(part);
  return all + "]";
}
template <typename... Parts>
std::string message(const Parts&... parts) {
  return (std::string() + ... + to_text(parts));
}

// ------------------------------------------------------------------------------------------------
// The numbers that C++ and Python share (upconv/plans.py)

enum DeviceKind : int64_t { kCpu = 0, kCuda = 1 };
enum KernelId : int64_t {
  kAten = 0,
  kCpuFprop = 1,
  kSm90WgmmaFprop = 2,
  kMmaFprop = 3,
  kDirectFprop = 4,
  kSm90WgmmaWgrad = 5,
  kDirectWgrad = 6,
  kDirectIgrad = 7,
  kGatherWgrad = 8,
  kGatherIgrad = 9,
  kSm90Patch = 10,
  kSm90PatchWgrad = 11,
  kSm90Phases = 12,
  kSm90PhasesWgrad = 13,
  kOverlapFprop = 14,
  kDepthwiseIgrad = 15,
  kDepthwiseWgrad = 16,
  kSm90Walk = 17
};
// In a kernel's place: PyTorch's operator for this call, and the next one asks again.
constexpr int64_t kAskAgain = -1;
enum Direction : int64_t { kForward = 0, kGradInput = 1, kGradWeight = 2 };

// Positions in a key. After the header come lists of one value per spatial dimension.
enum KeyField : int {
  kKeyDeviceKind = 0,
  kKeyDeviceIndex = 1,
  kKeyDtype = 2,
  kKeyChannelsLast = 3,
  kKeyTf32 = 4,
  kKeyHasBias = 5,
  kKeyThreads = 6,
  kKeyNdim = 7,
  kKeyBatch = 8,
  kKeyInChannels = 9,
  kKeyOutChannels = 10,
  kKeyGroups = 11,
  kKeyDirection = 12,
  kKeyHeader = 13
};
enum KeyList : int {
  kListInSize = 0,
  kListKernel = 1,
  kListStride = 2,
  kListPadding = 3,
  kListOutputPadding = 4,
  kListDilation = 5,
  kKeyLists = 6
};
constexpr int kMaxKey = kKeyHeader + kKeyLists * 3;

// The dtypes that kernels of ours can have, numbered as in upconv::DType; -1 for all others.
inline int64_t dtype_number(at::ScalarType type) {
  switch (type) {
    case at::kFloat:
      return 0;
    case at::kDouble:
      return 1;
    case at::kBFloat16:
      return 2;
    case at::kHalf:
      return 3;
    default:
      return -1;
  }
}

// ------------------------------------------------------------------------------------------------
// One call

// Kernels are registered in boxed form, which is how Python calls them, and how the gate hands a
// call on untouched. (The other form would cost 3 s of template instantiation in every cold build.)
using torch::jit::Stack;

constexpr int kArguments = 8;  // of conv_transpose1d/2d/3d

// A parameter with one value for each spatial dimension, or one for all.
inline at::DimVector size_list(const at::IValue& value) {
  if (value.isIntList()) return value.toDimVector();
  at::DimVector result;
  for (const c10::SymInt& size : value.toSymIntVector()) result.push_back(size.expect_int());
  return result;
}

// The arguments on top of the stack. References stay valid as long as the stack holds them.
struct Call {
  const Tensor& input;
  const Tensor& weight;
  const Tensor bias;  // undefined where there is none
  at::DimVector stride, padding, output_padding;
  int64_t groups;
  at::DimVector dilation;

  static const at::IValue& argument(const Stack& stack, int index) {
    return stack[stack.size() - kArguments + index];
  }

  static Tensor optional_tensor(const at::IValue& value) {
    return value.isTensor() ? value.toTensor() : Tensor();
  }

  explicit Call(const Stack& stack)
      : input(argument(stack, 0).toTensor()),
        weight(argument(stack, 1).toTensor()),
        bias(optional_tensor(argument(stack, 2))),
        stride(size_list(argument(stack, 3))),
        padding(size_list(argument(stack, 4))),
        output_padding(size_list(argument(stack, 5))),
        groups(argument(stack, 6).toSymInt().expect_int()),
        dilation(size_list(argument(stack, 7))) {}

  bool has_bias() const { return bias.defined(); }
};

struct PlanKey {
  std::array<int64_t, kMaxKey> values;
  int size = 0;

  void push(int64_t value) { values[size++] = value; }
  at::IntArrayRef list() const { return {values.data(), static_cast<size_t>(size)}; }
  int64_t operator[](int field) const { return values[field]; }
  bool operator==(const PlanKey& other) const { return list() == other.list(); }
};

struct PlanKeyHash {
  size_t operator()(const PlanKey& key) const {
    uint64_t hash = 0x9e3779b97f4a7c15u;
    for (int64_t value : key.list()) {
      hash = (hash ^ static_cast<uint64_t>(value)) * 0xff51afd7ed558ccdu;
      hash ^= hash >> 32;
    }
    return hash;
  }
};

// Does PyTorch take a tensor of these strides for channels_last? Its own rule (MemoryFormat.h),
// also for one spatial dimension, which it convolves as two with a height of 1 put in.
inline bool strides_channels_last(at::IntArrayRef sizes, at::IntArrayRef strides) {
  const int dims = static_cast<int>(sizes.size());
  if (strides[1] == 0) return false;
  int64_t least = 0;
  for (int step = 0; step < dims; ++step) {
    // channels, then the spatial dimensions from the last to the first, then the batch
    const int dim = step == 0 ? 1 : step == dims - 1 ? 0 : dims - step;
    if (sizes[dim] == 0 || strides[dim] < least) return false;
    if (dim == 0 && least == strides[1]) return false;
    least = strides[dim] * (sizes[dim] > 1 ? sizes[dim] : 1);
  }
  return true;
}

// The key of a call that a kernel of ours might serve: dense tensors of one device and one of our
// dtypes, with fitting ranks and channels. False for anything else, right or wrong.
template <int N>
bool fill_key(PlanKey& key, const Call& call, DeviceKind kind, bool tf32, int64_t threads) {
  const Tensor &x = call.input, &w = call.weight;
  const int64_t dtype = dtype_number(x.scalar_type());
  const int64_t rank = x.dim();
  const bool batched = rank == N + 2;
  if (dtype < 0 || (!batched && rank != N + 1) || w.dim() != N + 2 ||
      w.scalar_type() != x.scalar_type() || w.device() != x.device() ||
      x.layout() != at::kStrided || w.layout() != at::kStrided)
    return false;
  const int64_t in_channels = w.size(0), out_channels = w.size(1) * call.groups;
  if (x.size(batched ? 1 : 0) != in_channels) return false;
  if (call.has_bias()) {
    const Tensor& b = call.bias;
    if (b.dim() != 1 || b.size(0) != out_channels || b.scalar_type() != x.scalar_type() ||
        b.device() != x.device() || b.layout() != at::kStrided)
      return false;
  }
  // An unbatched tensor gets a batch of 1 whose stride ends the comparison, so it never counts.
  const bool channels_last = (batched && strides_channels_last(x.sizes(), x.strides())) ||
                             strides_channels_last(w.sizes(), w.strides());
  key.push(kind);
  key.push(x.device().has_index() ? x.device().index() : 0);
  key.push(dtype);
  key.push(channels_last);
  key.push(tf32 && dtype == 0);
  key.push(call.has_bias());
  key.push(threads);
  key.push(N);
  key.push(batched ? x.size(0) : 1);
  key.push(in_channels);
  key.push(out_channels);
  key.push(call.groups);
  key.push(kForward);
  for (int i = 0; i < N; ++i) key.push(x.size(rank - N + i));
  for (int i = 0; i < N; ++i) key.push(w.size(2 + i));
  for (at::IntArrayRef list :
       {at::IntArrayRef(call.stride), at::IntArrayRef(call.padding),
        at::IntArrayRef(call.output_padding), at::IntArrayRef(call.dilation)}) {
    if (list.size() != 1 && list.size() != N) return false;
    for (int i = 0; i < N; ++i) key.push(list[list.size() == 1 ? 0 : i]);
  }
  return true;
}

// One number of a key's list, and the size of the output, in one of its spatial dimensions.
inline int64_t key_size(const PlanKey& key, KeyList list, int64_t dimension) {
  return key[kKeyHeader + list * key[kKeyNdim] + dimension];
}
inline int64_t key_out_size(const PlanKey& key, int64_t dimension) {
  const auto size = [&](KeyList list) { return key_size(key, list, dimension); };
  return (size(kListInSize) - 1) * size(kListStride) - 2 * size(kListPadding) +
         size(kListDilation) * (size(kListKernel) - 1) + size(kListOutputPadding) + 1;
}

// Shape of the output; without the batch where the input has none.
template <int N>
std::array<int64_t, N + 2> output_shape(const PlanKey& key) {
  std::array<int64_t, N + 2> shape{key[kKeyBatch], key[kKeyOutChannels]};
  for (int i = 0; i < N; ++i) shape[2 + i] = key_out_size(key, i);
  return shape;
}

// ------------------------------------------------------------------------------------------------
// Plans

struct CudaKernel;

struct PlanRecord {
  KernelId kernel = kAten;
  std::vector<int64_t> params;
  std::shared_ptr<const void> prepared;  // the parameters as the kernel takes them, where it helps
  const CudaKernel* gpu_kernel = nullptr;  // what runs the plan on a GPU, if a kernel of ours does
};

using PlanPointer = std::shared_ptr<const PlanRecord>;

class PlanCache {
 public:
  PlanPointer find(const PlanKey& key) const {
    std::shared_lock<std::shared_mutex> lock(mutex_);
    const auto found = plans_.find(key);
    return found == plans_.end() ? nullptr : found->second;
  }

  void insert(const PlanKey& key, PlanPointer plan) {
    std::unique_lock<std::shared_mutex> lock(mutex_);
    // Shapes that change at every call must not fill the memory: 65,536 plans are some 50 MB.
    if (plans_.size() >= 65536) plans_.clear();
    plans_[key] = std::move(plan);
  }

  void clear() {
    std::unique_lock<std::shared_mutex> lock(mutex_);
    plans_.clear();
  }

 private:
  mutable std::shared_mutex mutex_;
  std::unordered_map<PlanKey, PlanPointer, PlanKeyHash> plans_;
};

inline c10::OperatorHandle find_operator(const char* name, const char* overload = "") {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, overload);
}

// A new stack for an operator that takes the number of dimensions and then the same arguments.
inline Stack with_ndim(int64_t ndim, const Stack& stack) {
  Stack result{at::IValue(ndim)};
  result.insert(result.end(), stack.end() - kArguments, stack.end());
  return result;
}

// Raises Python's exception when the call is one that no transposed convolution has.
inline void check_call(int64_t ndim, const Stack& stack) {
  static const c10::OperatorHandle op = find_operator("upconv::_check");
  Stack arguments = with_ndim(ndim, stack);
  op.callBoxed(arguments);
}

// A new plan of a checked call, made by Python. `complete(key, plan)` says whether the plan of a
// kernel of ours holds all that the kernel will read.
template <typename Complete>
PlanPointer make_plan_of(PlanCache& cache, const PlanKey& key, const Complete& complete) {
  static const c10::OperatorHandle make_plan = find_operator("upconv::_make_plan");
  Stack exchange{at::IValue(key.list())};
  make_plan.callBoxed(exchange);
  const std::vector<int64_t> record = exchange.at(0).toIntVector();
  TORCH_CHECK(!record.empty(), "upconv: the planner returned an empty record");
  auto plan = std::make_shared<PlanRecord>();
  if (record[0] == kAskAgain) return plan;
  plan->kernel = static_cast<KernelId>(record[0]);
  plan->params.assign(record.begin() + 1, record.end());
  TORCH_CHECK(
      plan->kernel == kAten || complete(key, *plan),
      message("upconv: the planner's record (kernel ", record[0], ", ",
              static_cast<int64_t>(plan->params.size()),
              " parameters) does not fit the compiled kernel: planner and library differ, which"
              " is upconv's mistake. Set UPCONV_BACKEND=aten to go on with PyTorch's own"
              " operator, and please report the layer"));
  cache.insert(key, plan);
  return plan;
}

// The plan of a key: from the table, else checked and made.
template <typename Complete>
PlanPointer plan_for(PlanCache& cache, const PlanKey& key, const Stack& stack,
                     const Complete& complete) {
  if (PlanPointer plan = cache.find(key)) return plan;
  check_call(key[kKeyNdim], stack);
  return make_plan_of(cache, key, complete);
}

// PyTorch's own operator on the same arguments, which its result replaces. Called by name: the
// headers of ATen's functions would cost 1.5 s of every cold build.
template <int N>
void aten_conv_transpose(Stack* stack) {
  static const char* const names[] = {"aten::conv_transpose1d", "aten::conv_transpose2d",
                                      "aten::conv_transpose3d"};
  static const c10::OperatorHandle op = find_operator(names[N - 1], N == 1 ? "" : "input");
  op.callBoxed(stack);
}

// The kernel of a device: `run` gives our output, or nothing where PyTorch's operator is to serve.
template <int N, std::optional<Tensor> (*run)(const Stack&)>
void forward(const c10::OperatorHandle&, c10::DispatchKeySet, Stack* stack) {
  std::optional<Tensor> output = run(*stack);
  if (!output) return aten_conv_transpose<N>(stack);
  torch::jit::drop(*stack, kArguments);
  stack->emplace_back(*std::move(output));
}

template <int N, std::optional<Tensor> (*run)(const Stack&)>
torch::CppFunction kernel() {
  return torch::CppFunction::makeFromBoxedFunction<&forward<N, run>>();
}

// ------------------------------------------------------------------------------------------------
// The gate: nothing to record, so on to the kernel; else Python's autograd

inline bool has_tangent(const Tensor& tensor) { return tensor._fw_grad(0).defined(); }

inline bool in_transform() {
  return c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerBackMode) ||
         c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode);
}

inline bool must_record(const Stack& stack) {
  for (int i = 0; i < 3; ++i) {  // input, weight, bias
    const at::IValue& value = Call::argument(stack, i);
    if (!value.isTensor()) continue;
    const Tensor& tensor = value.toTensor();
    if ((c10::GradMode::is_enabled() && tensor.requires_grad()) || has_tangent(tensor)) return true;
  }
  return false;
}

template <int N>
void autograd_gate(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  // Tensor subclasses are Python's to judge: some are plain tensors under a tracer, some are not.
  if (must_record(*stack) || in_transform() || keys.has(c10::DispatchKey::Python)) {
    static const c10::OperatorHandle recorded = find_operator("upconv::_autograd");
    Stack arguments = with_ndim(N, *stack);
    recorded.callBoxed(arguments);
    torch::jit::drop(*stack, kArguments);
    stack->push_back(std::move(arguments.at(0)));
    return;
  }
  at::AutoDispatchBelowADInplaceOrView below;
  op.redispatchBoxed(keys & c10::after_autograd_keyset, stack);
}

template <int N>
torch::CppFunction gate() {
  return torch::CppFunction::makeFromBoxedFunction<&autograd_gate<N>>();
}

}  // namespace upconv
