// Plan integers -> WgradParams, and the choice of the operand type.
#include "sm90_wgrad_launch.h"

#include "sm90_wgrad_layout.cuh"

namespace upconv {

#define UPCONV_OPERANDS(X) X(0, tf32) X(1, bf16) X(2, fp16)
#define UPCONV_DECLARE(index, name) cudaError_t sm90_wgrad_##name(const WgradParams&, cudaStream_t);
UPCONV_OPERANDS(UPCONV_DECLARE)
#undef UPCONV_DECLARE

bool read_wgrad_plan(const int64_t* record, int64_t length, WgradParams* plan) {
  int64_t at = 0;
  auto take = [&]() { return at < length ? static_cast<int>(record[at++]) : (++at, 0); };
#define UPCONV_READ(name) plan->name = take();
  UPCONV_WGRAD_FIELDS(UPCONV_READ)
#undef UPCONV_READ
  if (plan->jobs > kWgradJobs || plan->planes > kWgradPlanes || plan->stages > kWgradMaxStages)
    return false;
  wgrad::describe_operand(plan);
  int more = 0;
  for (int i = 0; i < plan->jobs; ++i) {
    WgradJob& job = plan->job[i];
    for (int16_t* field :
         {&job.shift_y, &job.extra_rows, &job.planes, &job.consumers, &job.workers})
      *field = static_cast<int16_t>(take());
    if (job.workers < plan->workers) return false;
    job.more = static_cast<int16_t>(more);
    more += job.workers - plan->workers;
    for (WgradPlane& plane : job.plane) {
      for (int16_t* field :
           {&plane.channel, &plane.depth, &plane.phase_y, &plane.phase_x, &plane.start})
        *field = static_cast<int16_t>(take());
    }
    for (auto& warps : job.run) {
      for (WgradRun& run : warps) {
        for (int8_t* field : {&run.plane, &run.back, &run.offset, &run.skew, &run.high, &run.count})
          *field = static_cast<int8_t>(take());
        run.channel = static_cast<int16_t>(take());
        run.tap = static_cast<int16_t>(take());
      }
    }
  }
  return at == length;
}

int64_t wgrad_workspace_bytes(const WgradParams& plan) {
  const int64_t blocks = wgrad_blocks(plan);
  const int64_t sums = plan.groups * plan.run * (plan.tile_n / 2) * 128;
  return blocks * plan.consumers * sums * static_cast<int64_t>(sizeof(float));
}

cudaError_t sm90_wgrad(const WgradParams& plan, cudaStream_t stream) {
#define UPCONV_TRY(index, name) \
  if (plan.operand == index) return sm90_wgrad_##name(plan, stream);
  UPCONV_OPERANDS(UPCONV_TRY)
#undef UPCONV_TRY
  return cudaErrorInvalidConfiguration;
}

}  // namespace upconv
