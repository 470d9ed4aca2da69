// Plan integers -> DirectGradParams, and the choice of the tensors' type.
#include "direct_grad_launch.h"

#include "plan_reader.h"

namespace upconv {

#if UPCONV_WITH_WGRAD
#define UPCONV_TYPES(X) X(0, float32) X(1, float64) X(2, bfloat16) X(3, float16)
#else  // the input's gradient has no others
#define UPCONV_TYPES(X) X(0, float32) X(1, float64)
#endif
#define UPCONV_DECLARE(index, name) \
  cudaError_t direct_grad_##name(const DirectGradParams&, cudaStream_t);
UPCONV_TYPES(UPCONV_DECLARE)
#undef UPCONV_DECLARE

bool read_direct_grad_plan(const int64_t* record, int64_t length, DirectGradParams* plan) {
  PlanReader reader(record, length);
#define UPCONV_READ(name) reader.read(&plan->name);
  UPCONV_DIRECT_GRAD_FIELDS(UPCONV_READ)
#undef UPCONV_READ
  if (!reader.whole() || plan->lanes_x < 1 || plan->slots < 1 || plan->lanes_x * plan->slots > 32 ||
      plan->in_h < 1 || plan->in_d < 1 || plan->segments < 1 || plan->columns > 31 ||
      plan->warps < 1 || plan->chunk < 1 || plan->chunk > kGradPixels ||
      (plan->chunk - 1) * plan->stride_x + (plan->lanes_x - 1) * plan->dilation_x >= kGradOutputs)
    return false;
  plan->in_plane = static_cast<int64_t>(plan->in_d) * plan->in_h * plan->in_w;
  plan->out_plane = static_cast<int64_t>(plan->out_d) * plan->out_h * plan->out_w;
  plan->all_columns = plan->out_channels * plan->kernel_z * plan->kernel_y;
  plan->all_units = plan->batch * plan->in_d * plan->segments * plan->in_h;
  plan->tiles = plan->x_tiles * plan->column_tiles * plan->channel_tiles;
  plan->workers = plan->shares * plan->warps;
  plan->sums = plan->inputs * plan->columns * plan->lanes_x;
  plan->by_in_h = Divider(plan->in_h);
  plan->by_in_d = Divider(plan->in_d);
  plan->by_segments = Divider(plan->segments);
  return true;
}

int64_t direct_grad_workspace_bytes(const DirectGradParams& plan) {
  const int64_t sums = static_cast<int64_t>(plan.groups) * plan.tiles * plan.workers * plan.sums;
  return sums * (plan.type == 1 ? 8 : 4);
}

cudaError_t direct_grad(const DirectGradParams& plan, cudaStream_t stream) {
#define UPCONV_TRY(index, name) \
  if (plan.type == index) return direct_grad_##name(plan, stream);
  UPCONV_TYPES(UPCONV_TRY)
#undef UPCONV_TRY
  return cudaErrorInvalidConfiguration;
}

}  // namespace upconv
