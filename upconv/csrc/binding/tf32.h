// May a float32 convolution on the GPU round to TF32? PyTorch's own switch,
// torch.backends.cudnn.conv.fp32_precision, as it stands at the call.
//
// In a header of its own: ATen/Context.h is heavy, and only GPU bindings ask.
#pragma once

#include <ATen/Context.h>

#include <string>
#include <type_traits>

namespace upconv {

// The getter took and returned strings in torch 2.9 and takes enumerators later. Deducing its types
// serves both; the branch that is not taken is never instantiated. `allowTF32CuDNN` would be the
// older name, but it raises as soon as old and new style settings disagree.
template <typename Precision, typename Backend, typename Operation>
bool conv_precision_is_tf32(Precision (at::Context::*get)(Backend, Operation) const) {
  const at::Context& context = at::globalContext();
  if constexpr (std::is_enum_v<Precision>)
    return (context.*get)(Backend::CUDA, Operation::CONV) == Precision::TF32;
  else
    return (context.*get)(std::string("cuda"), std::string("conv")) == "tf32";
}

inline bool conv_tf32_allowed() { return conv_precision_is_tf32(&at::Context::float32Precision); }

}  // namespace upconv
