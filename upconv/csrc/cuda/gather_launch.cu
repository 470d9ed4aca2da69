// Plan integers -> GatherParams.
#include "gather_launch.h"

namespace upconv {

bool read_gather_plan(const int64_t* record, int64_t length, GatherParams* plan) {
  int64_t at = 0;
  auto take = [&]() { return at < length ? static_cast<int>(record[at++]) : (++at, 0); };
#define UPCONV_READ(name) plan->name = take();
  UPCONV_GATHER_FIELDS(UPCONV_READ)
#undef UPCONV_READ
  if (plan->jobs < 1 || plan->jobs > kGatherJobs) return false;
  for (int i = 0; i < plan->jobs; ++i) {
    GatherJob& job = plan->job[i];
#define UPCONV_READ(name) job.name = take();
    UPCONV_GATHER_JOB_FIELDS(UPCONV_READ)
#undef UPCONV_READ
    if (job.shares < 1 || job.count_z < 1 || job.count_y < 1 || job.taps_z < 1 || job.taps_y < 1)
      return false;
  }
  const int warps = plan->warps_m * plan->warps_n * plan->warps_k;
  if (at != length || warps < 1 || 32 * warps > kGatherThreads || plan->columns < 16 ||
      plan->columns % 16 != 0 || plan->out_block < 1 || plan->in_block < 1 || plan->tap_block < 1)
    return false;
  plan->in_plane = static_cast<int64_t>(plan->in_d) * plan->in_h * plan->in_w;
  plan->out_plane = static_cast<int64_t>(plan->out_d) * plan->out_h * plan->out_w;
  plan->out_blocks = (plan->out_channels + plan->out_block - 1) / plan->out_block;
  plan->in_blocks = (plan->in_channels + plan->in_block - 1) / plan->in_block;
  plan->tap_blocks = (plan->kernel_x + plan->tap_block - 1) / plan->tap_block;
  plan->sums = plan->warps_m * plan->tiles_m * 16 * plan->warps_n * plan->tiles_n * 8;
  return true;
}

int64_t gather_workspace_bytes(const GatherParams& plan) {
  return plan.by_weight ? static_cast<int64_t>(plan.blocks) * plan.sums * 4 : 0;
}

namespace {

// The widest copy up to `bytes` that the tensor's own place allows.
int vector_at(const void* tensor, int bytes) {
  const uintptr_t place = reinterpret_cast<uintptr_t>(tensor);
  while (bytes > 2 && place % bytes != 0) bytes /= 2;
  return bytes;
}

}  // namespace

GatherParams with_copies_that_fit(const GatherParams& plan) {
  GatherParams p = plan;
  p.gy_vector = vector_at(p.gy, p.gy_vector);
  if (p.by_weight) p.x_vector = vector_at(p.other, p.x_vector);
  return p;
}

}  // namespace upconv
