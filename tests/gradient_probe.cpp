// The gradient operators on a device that exists for tests: CPU tensors, no table of its own rules,
// and a "kernel" that answers with sevens. Shows which calls reach a kernel.
#include <ATen/Parallel.h>
#include <ATen/ops/full.h>

#include "binding/gradients.h"

namespace upconv {
namespace {

struct Probe {
  static constexpr DeviceKind kKind = kCpu;
  static PlanCache& cache() {
    static PlanCache plans;
    return plans;
  }
  static bool tf32() { return false; }
  static int64_t threads() { return at::get_num_threads(); }
  static bool complete(const PlanKey&, PlanRecord& plan) { return plan.kernel == kSm90WgmmaWgrad; }
  static Tensor run(const PlanKey&, const PlanPointer&, const GradientCall& call) {
    return at::full(call.size, 7.0, call.grad_output.options());
  }
};

TORCH_LIBRARY_IMPL(upconv, CPU, library) {
  library.impl("conv_transpose_grad_input", gradient_kernel<Probe, kGradInput>());
  library.impl("conv_transpose_grad_weight", gradient_kernel<Probe, kGradWeight>());
}

}  // namespace
}  // namespace upconv
