// The gradient operators of a device: key, plan, and PyTorch's convolutions where the plan says so.
//
// A device is a struct with its kind, its table of plans, the settings that enter a key, `complete`
// (see plan_for) and `run`, which computes a gradient by a kernel of ours. One that is also asked
// for the weight's and the bias's gradient together has `bias`, which computes the latter by
// itself.
#pragma once

#include "common.h"

namespace upconv {

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
inline bool fill_gradient_key(PlanKey& key, const GradientCall& call, Direction direction,
                              DeviceKind kind, bool tf32, int64_t threads, bool bias = false) {
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
       {int64_t{kind}, int64_t{gy.device().has_index() ? gy.device().index() : 0}, dtype,
        int64_t{last != 0}, int64_t{dtype == 0 && tf32}, int64_t{bias}, threads, int64_t{ndim},
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
    if (gy.size(gy.dim() - ndim + i) != key_out_size(key, i)) return false;
  }
  return true;
}

// A stack for the operators that take a gradient's name and then its arguments.
inline Stack with_direction(Direction direction, const Stack& stack) {
  Stack result{at::IValue(direction == kGradWeight ? "grad_weight" : "grad_input")};
  result.insert(result.end(), stack.end() - kArguments, stack.end());
  return result;
}

// PyTorch's own, as aten_input_gradient and aten_weight_gradient in autograd.py, without a detour
// by Python, which takes 20 us of the host and at times 100. Undefined where those have more to do
// (no batch; a gradient that runs on beyond the input; 16-bit types on a CPU).
inline Tensor aten_gradient_here(const GradientCall& call, Direction direction) {
  const Tensor& gy = call.grad_output;
  const bool by_weight = direction == kGradWeight;
  const int64_t ndim = (by_weight ? static_cast<int64_t>(call.size.size()) : call.other.dim()) - 2;
  const bool narrow = gy.scalar_type() == at::kBFloat16 || gy.scalar_type() == at::kHalf;
  if (gy.dim() != ndim + 2 || (gy.is_cpu() && narrow)) return {};
  const at::AutoDispatchBelowAutograd below;
  const auto list = [](at::IntArrayRef values) { return at::IValue(values.vec()); };
  const at::IValue stride = list(call.lists[0]), padding = list(call.lists[1]);
  const at::IValue output_padding = list(call.lists[2]), dilation = list(call.lists[3]);
  if (!by_weight) {
    static const c10::OperatorHandle convolution = find_operator("aten::convolution");
    const at::IValue none = list(std::vector<int64_t>(ndim, 0));
    Stack stack{gy, call.other, at::IValue(), stride, padding, dilation, false, none, call.groups};
    convolution.callBoxed(stack);
    Tensor result = stack.at(0).toTensor();
    return result.sizes() == at::IntArrayRef(call.size) ? result : Tensor();
  }
  static const c10::OperatorHandle empty = find_operator("aten::new_empty");
  Stack made{gy, list(call.size), at::IValue(), at::IValue(), at::IValue(), at::IValue()};
  empty.callBoxed(made);
  Tensor weight = made.at(0).toTensor();  // only its shape and its strides are read
  if (ndim == 2 && gy.is_contiguous(at::MemoryFormat::ChannelsLast)) {
    weight = weight.contiguous(at::MemoryFormat::ChannelsLast);
  }
  static const c10::OperatorHandle backward = find_operator("aten::convolution_backward");
  const c10::List<bool> wanted({false, true, false});
  Stack stack{gy,       call.other, weight,         at::IValue(), stride, padding,
              dilation, true,       output_padding, call.groups,  wanted};
  backward.callBoxed(stack);
  return stack.at(1).toTensor();
}

// The gradient by our kernel, or by PyTorch's convolutions where the plan says so. With `kBias` the
// bias's comes second.
template <typename Device, Direction direction, bool kBias = false>
void gradient(const c10::OperatorHandle&, c10::DispatchKeySet, Stack* stack) {
  const GradientCall call(*stack);
  PlanKey key;
  const bool known = fill_gradient_key(key, call, direction, Device::kKind, Device::tf32(),
                                       Device::threads(), kBias);
  PlanPointer plan = known ? Device::cache().find(key) : nullptr;
  if (plan == nullptr) {
    static const c10::OperatorHandle check_gradient = find_operator("upconv::_check_gradient");
    Stack arguments = with_direction(direction, *stack);
    check_gradient.callBoxed(arguments);
    if (known) plan = make_plan_of(Device::cache(), key, Device::complete);
  }
  Tensor result, bias;
  if (plan == nullptr || plan->kernel == kAten) {
    if (plan != nullptr) result = aten_gradient_here(call, direction);
    if (!result.defined()) {
      static const c10::OperatorHandle aten_gradient = find_operator("upconv::_aten_gradient");
      Stack arguments = with_direction(direction, *stack);
      aten_gradient.callBoxed(arguments);
      result = arguments.at(0).toTensor();
    }
  } else if constexpr (kBias) {
    result = Device::run(key, plan, call, &bias);
  } else {
    result = Device::run(key, plan, call);
  }
  if constexpr (kBias) {
    if (!bias.defined()) bias = Device::bias(call.grad_output, call.size.size() - 2);
  }
  torch::jit::drop(*stack, kArguments);
  stack->emplace_back(std::move(result));
  if (kBias) stack->emplace_back(std::move(bias));
}

template <typename Device, Direction direction, bool kBias = false>
torch::CppFunction gradient_kernel() {
  return torch::CppFunction::makeFromBoxedFunction<&gradient<Device, direction, kBias>>();
}

}  // namespace upconv
