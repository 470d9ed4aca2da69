// Plan integers -> GatherParams.
#include "gather_launch.h"

#include "plan_reader.h"

namespace upconv {

namespace {

// What kernels divide by; false where that is nothing.
bool divide(GatherParams* plan) {
  GatherParams& p = *plan;
  if (p.rows < 1) return false;
  p.row_warps = p.rows < p.warps_k ? p.rows : p.warps_k;
  p.column_warps = p.warps_k / p.row_warps;
  // Input's gradient: what a block adds up, in whole steps of its products.
  const int sum = p.out_channels * p.kernel_z * p.kernel_y * p.kernel_x, step = p.type ? 16 : 8;
  p.by_padded = Divider(p.by_weight ? 1 : (sum + step - 1) / step * step);
  p.inverse_columns = static_cast<uint32_t>(((uint64_t{1} << 32) + p.columns - 1) / p.columns);
  for (int i = 0; i < p.jobs; ++i)
    p.job[i].by_down = Divider((p.job[i].count_y + p.rows - 1) / p.rows);
  const struct {
    int divisor;
    Divider* by;
  } divisors[] = {{p.out_blocks, &p.by_out_blocks},
                  {p.in_blocks, &p.by_in_blocks},
                  {p.tap_blocks, &p.by_tap_blocks},
                  {p.tap_block, &p.by_tap_block},
                  {p.gy_rows, &p.by_gy_rows},
                  {p.by_weight ? p.x_rows : 1, &p.by_x_rows},
                  {p.kernel_z, &p.by_kernel_z},
                  {p.kernel_y, &p.by_kernel_y},
                  {p.kernel_x, &p.by_kernel_x},
                  {(p.in_w + p.columns - 1) / p.columns, &p.by_across},
                  {p.warps_n * p.tiles_n * 8, &p.by_sums_wide},
                  {p.warps_m, &p.by_warps_m},
                  {p.warps_n, &p.by_warps_n},
                  {p.row_warps, &p.by_row_warps}};
  for (const auto& each : divisors) {
    if (each.divisor < 1) return false;
    *each.by = Divider(each.divisor);
  }
  return true;
}

}  // namespace

bool read_gather_plan(const int64_t* record, int64_t length, GatherParams* plan) {
  PlanReader reader(record, length);
#define UPCONV_READ(name) reader.read(&plan->name);
  UPCONV_GATHER_FIELDS(UPCONV_READ)
#undef UPCONV_READ
  if (plan->jobs < 1 || plan->jobs > kGatherJobs) return false;
  for (int i = 0; i < plan->jobs; ++i) {
    GatherJob& job = plan->job[i];
#define UPCONV_READ(name) reader.read(&job.name);
    UPCONV_GATHER_JOB_FIELDS(UPCONV_READ)
#undef UPCONV_READ
    if (job.shares < 1 || job.count_z < 1 || job.count_y < 1 || job.taps_z < 1 || job.taps_y < 1)
      return false;
    job.by_shares = Divider(job.shares);
    job.by_taps_z = Divider(job.taps_z);
    job.by_taps_y = Divider(job.taps_y);
    job.by_count_z = Divider(job.count_z);
  }
  const int warps = plan->warps_m * plan->warps_n * plan->warps_k;
  if (!reader.whole() || warps < 1 || 32 * warps > kGatherThreads || plan->columns < 16 ||
      plan->columns % 16 != 0 || plan->out_block < 1 || plan->in_block < 1 || plan->tap_block < 1)
    return false;
  plan->in_plane = static_cast<int64_t>(plan->in_d) * plan->in_h * plan->in_w;
  plan->out_plane = static_cast<int64_t>(plan->out_d) * plan->out_h * plan->out_w;
  plan->out_blocks = (plan->out_channels + plan->out_block - 1) / plan->out_block;
  plan->in_blocks = (plan->in_channels + plan->in_block - 1) / plan->in_block;
  plan->tap_blocks = (plan->kernel_x + plan->tap_block - 1) / plan->tap_block;
  plan->sums = plan->warps_m * plan->tiles_m * 16 * plan->warps_n * plan->tiles_n * 8;
  return divide(plan);
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
