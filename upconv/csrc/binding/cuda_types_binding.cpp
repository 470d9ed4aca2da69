// The kernels for some types of operands (UPCONV_OPERAND_BITS), as a library that the one with the
// operators takes them from. It is built when a plan first needs one of them: FP16 and strict
// float32 take a third of the compilers' time, and few programs use either.
#include "cuda_tensor_cores.h"

namespace upconv {
namespace {

int64_t kernels() {
  static const KernelTable table = tensor_core_kernels();
  return reinterpret_cast<int64_t>(&table);
}

// UPCONV_TABLE: the name of this library's operator.
#define UPCONV_TEXT_OF(name) #name
#define UPCONV_TEXT(name) UPCONV_TEXT_OF(name)
TORCH_LIBRARY_IMPL(upconv, CompositeExplicitAutograd, library) {
  library.impl(UPCONV_TEXT(UPCONV_TABLE), kernels);
}

}  // namespace
}  // namespace upconv
