// Plan integers -> DirectParams, and the choice of the tensors' type.
#include "direct_launch.h"

#include "plan_reader.h"

namespace upconv {

#define UPCONV_TYPES(X) X(0, float32) X(1, float64) X(2, bfloat16) X(3, float16)
#define UPCONV_DECLARE(index, name) \
  cudaError_t direct_fprop_##name(const DirectParams&, cudaStream_t);
UPCONV_TYPES(UPCONV_DECLARE)
#undef UPCONV_DECLARE

bool read_direct_plan(const int64_t* record, int64_t length, DirectParams* plan) {
  PlanReader reader(record, length);
#define UPCONV_READ(name) reader.read(&plan->name);
  UPCONV_DIRECT_FIELDS(UPCONV_READ)
#undef UPCONV_READ
  if (plan->kinds > kDirectMaxKinds || plan->firsts > kDirectMaxFirsts ||
      plan->offsets > kDirectMaxOffsets || plan->taps > kDirectMaxTaps || plan->width < 1 ||
      plan->folds < 1 || plan->tile_y < 1 || plan->pitch < 1 || plan->tile_rows < 1)
    return false;
  plan->in_plane = static_cast<int64_t>(plan->in_d) * plan->in_h * plan->in_w;
  plan->out_plane = static_cast<int64_t>(plan->out_d) * plan->out_h * plan->out_w;
  plan->by_width = 1.0f / plan->width;
  plan->by_tile_y = 1.0f / plan->tile_y;
  plan->by_pitch = 1.0f / plan->pitch;
  plan->by_tile_rows = 1.0f / plan->tile_rows;
  plan->threads = 32 * plan->warps;
  plan->step_x = plan->threads % plan->pitch;
  plan->step_y = plan->threads / plan->pitch % plan->tile_rows;
  plan->step_z = plan->threads / plan->pitch / plan->tile_rows;
  plan->phases = plan->folds * plan->width;
  plan->by_phases = 1.0f / plan->phases;
  plan->tap_bytes = (plan->row_warps * plan->most_taps * plan->phases * 2 + 15) / 16 * 16;
  plan->thread_channels = plan->rows / plan->phases;
  plan->row_shift = 0;
  while (1 << plan->row_shift < plan->row_lanes) ++plan->row_shift;
  plan->skew = plan->width == 8 ? 4 : 0;
  for (int i = 0; i < plan->kinds; ++i) {
    DirectKind& kind = plan->kind[i];
    reader.read(&kind.first_x);
    reader.read(&kind.columns);
    reader.read(&kind.firsts);
    reader.read(&kind.begin);
    reader.read(&kind.end);
    reader.read(&kind.taps);
  }
  for (int i = 0; i < plan->firsts; ++i) {
    reader.read(&plan->first[i].z);
    reader.read(&plan->first[i].y);
  }
  for (int i = 0; i < plan->offsets; ++i) reader.read(&plan->offset[i]);
  for (int i = 0; i < plan->taps; ++i) reader.read(&plan->tap[i]);
  return reader.whole();
}

cudaError_t direct_fprop(const DirectParams& plan, cudaStream_t stream) {
#define UPCONV_TRY(index, name) \
  if (plan.type == index) return direct_fprop_##name(plan, stream);
  UPCONV_TYPES(UPCONV_TRY)
#undef UPCONV_TRY
  return cudaErrorInvalidConfiguration;
}

}  // namespace upconv
