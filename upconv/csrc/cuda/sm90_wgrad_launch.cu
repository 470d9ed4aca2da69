// Plan integers -> WgradParams, and the choice of the operand type.
#include "sm90_wgrad_launch.h"

#include <algorithm>

#include "plan_reader.h"
#include "sm90_wgrad_layout.cuh"

namespace upconv {

#define UPCONV_OPERANDS(X) X(0, tf32) X(1, bf16) X(2, fp16)
#define UPCONV_DECLARE(index, name) cudaError_t sm90_wgrad_##name(const WgradParams&, cudaStream_t);
UPCONV_OPERANDS(UPCONV_DECLARE)
#undef UPCONV_DECLARE

bool read_wgrad_plan(const int64_t* record, int64_t length, WgradParams* plan) {
  PlanReader reader(record, length);
#define UPCONV_READ(name) reader.read(&plan->name);
  UPCONV_WGRAD_FIELDS(UPCONV_READ)
#undef UPCONV_READ
  plan->sums = false;
  std::fill_n(plan->end_job, kWgradBlocks, int16_t{0});
  if (plan->jobs > kWgradJobs || plan->planes > kWgradPlanes || plan->stages > kWgradMaxStages)
    return false;
  for (int divisor : {plan->in_h, plan->in_d, plan->strips, plan->segment, plan->images,
                      plan->classes, plan->channel_blocks, plan->jobs, plan->workers})
    if (divisor < 1) return false;
  wgrad::describe_operand(plan);
  wgrad::describe_walk(plan);
  int more = 0;
  for (int i = 0; i < plan->jobs; ++i) {
    WgradJob& job = plan->job[i];
    for (int16_t* field :
         {&job.shift_y, &job.extra_rows, &job.planes, &job.consumers, &job.workers})
      reader.read(field);
    if (job.workers < plan->workers) return false;
    const int64_t rows = static_cast<int64_t>(plan->image_groups) * plan->strips * plan->in_h;
    job.rows = static_cast<int32_t>(rows / job.workers);
    job.longer = static_cast<int32_t>(rows % job.workers);
    job.sums = job.sum_channel = 0;
    job.more = static_cast<int16_t>(more);
    more += job.workers - plan->workers;
    for (WgradPlane& plane : job.plane) {
      for (int16_t* field :
           {&plane.channel, &plane.depth, &plane.phase_y, &plane.phase_x, &plane.start, &plane.sum})
        reader.read(field);
      if (plane.sum == 0) continue;
      // One register adds up all planes of a job.
      if (job.sums > 0 && job.sum_channel != plane.channel) return false;
      ++job.sums;
      job.sum_channel = plane.channel;
      plan->sums = true;
    }
    for (auto& warps : job.run) {
      for (WgradRun& run : warps) {
        for (int8_t* field : {&run.plane, &run.back, &run.offset, &run.skew, &run.high, &run.count})
          reader.read(field);
        reader.read(&run.channel);
        reader.read(&run.tap);
        const int block = run.channel / wgrad::kRows;
        if (run.count == 0 || block >= kWgradBlocks) continue;
        if (plan->end_job[block] == 0) plan->first_job[block] = static_cast<int16_t>(i);
        plan->end_job[block] = static_cast<int16_t>(i + 1);
      }
    }
  }
  const int64_t sums = plan->groups * plan->run * (plan->tile_n / 2) * 128;
  plan->bias_at = wgrad_blocks(*plan) * plan->consumers * sums;
  // The producers add up what lies in shared memory in the TMA's order.
  return reader.whole() && (!plan->sums || wgrad::slabs(*plan));
}

int64_t wgrad_workspace_bytes(const WgradParams& plan) {
  const int64_t bias = plan.sums ? wgrad_blocks(plan) * wgrad::kProducers : 0;
  return (plan.bias_at + bias) * static_cast<int64_t>(sizeof(float));
}

cudaError_t sm90_wgrad(const WgradParams& plan, cudaStream_t stream) {
#define UPCONV_TRY(index, name) \
  if (plan.operand == index) return sm90_wgrad_##name(plan, stream);
  UPCONV_OPERANDS(UPCONV_TRY)
#undef UPCONV_TRY
  return cudaErrorInvalidConfiguration;
}

}  // namespace upconv
