// The gradient of the weight for CUDA tensors: a library of its own (cuda_call.h).
#include "cuda_call.h"

namespace upconv {
namespace {

const std::vector<CudaKernel>& library_kernels() {
  static const std::vector<CudaKernel> kernels = {
#ifdef UPCONV_SM90
      wgrad_kernel(),
#endif
      direct_wgrad_kernel(),
  };
  return kernels;
}

TORCH_LIBRARY_IMPL(upconv, CUDA, library) {
  library.impl("conv_transpose_grad_weight", gradient_kernel<CudaGradients, kGradWeight>());
}

TORCH_LIBRARY_IMPL(upconv, CompositeExplicitAutograd, library) {
  library.impl("_clear_cuda_wgrad_plans", clear_plans);
}

}  // namespace
}  // namespace upconv
