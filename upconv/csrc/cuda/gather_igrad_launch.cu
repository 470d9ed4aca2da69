// The input's gradient on mma.sync: the choice of the tensors' type.
#include "gather_launch.h"
#include "operands.h"

namespace upconv {

#define UPCONV_TYPES(X) X(0, tf32) X(1, bf16) X(2, fp16)
#define UPCONV_DECLARE(index, name) \
  cudaError_t gather_igrad_##name(const GatherParams&, cudaStream_t);
UPCONV_TYPES(UPCONV_DECLARE)
#undef UPCONV_DECLARE

cudaError_t gather_igrad(const GatherParams& plan, cudaStream_t stream) {
  const GatherParams p = with_copies_that_fit(plan);
#define UPCONV_TRY(index, name)                                 \
  if constexpr (is_here(index)) {                               \
    if (p.type == index) return gather_igrad_##name(p, stream); \
  }
  UPCONV_TYPES(UPCONV_TRY)
#undef UPCONV_TRY
  return cudaErrorInvalidConfiguration;
}

}  // namespace upconv
