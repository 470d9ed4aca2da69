// Host side of the Hopper kernel for the weight's gradient of patches: plan integers in, two
// launches out.
#include "sm90_wgrad_patch.cuh"

#include <cuda_runtime.h>

#include "plan_reader.h"
#include "shared_memory.h"
#include "sm90_wgrad_boxes.h"
#include "sm90_wgrad_patch_launch.h"

namespace upconv {
namespace patch {

// Every form the planner may ask for: TILES in upconv/planner/sm90_patch_wgrad.py is the same list.
#define UPCONV_PATCH_WGRAD_TILES(X) X(128) X(64)
#define UPCONV_PATCH_WGRAD_OPERANDS(X) X(0, Tf32) X(1, Bf16) X(2, Fp16)

template <typename Operand, int N>
cudaError_t launch_wgrad_tile(const PatchWgradParams& p, int multiprocessors, cudaStream_t stream) {
  auto kernel = sm90_wgrad_patch<Operand, N>;
  const int bytes = shared_bytes(p), units = unit_count(p);
  cudaError_t error = allow_shared(kernel, bytes);
  if (error != cudaSuccess) return error;
  CUtensorMap gy{}, exact{}, x{};
  const int size[] = {p.in_w * kRowTaps, p.in_h * p.step_y, p.in_d * p.step_z, p.out_channels,
                      p.batch};
  error = describe_rows<Operand>(p.gy, size, kRowBytes, kGradRows, true, &gy);
  if (error != cudaSuccess) return error;
  error = describe_rows<Operand>(p.gy, size, kRowBytes, kGradRows, false, &exact);
  if (error != cudaSuccess) return error;
  const int pixels = p.in_d * p.in_h * p.in_w;  // one row, where rows begin on no 16 bytes
  const int by_rows[] = {p.in_w, p.in_h, p.in_d, p.in_channels, p.batch},
            one[] = {pixels, 1, 1, p.in_channels, p.batch};
  error = describe_rows<Operand>(p.x, p.shape.lead ? one : by_rows, kInputBytes, N, true, &x);
  if (error != cudaSuccess) return error;
  const int blocks = units < multiprocessors ? units : multiprocessors;
  kernel<<<blocks, kThreads, bytes, stream>>>(p, gy, exact, x);
  error = cudaGetLastError();
  if (error != cudaSuccess) return error;
  const int teams = teams_of(p.workers);
  const int rows = p.in_channels * p.out_channels * p.shape.rows;
  const int all = add_blocks(rows, teams) + (p.sums ? p.out_channels : 0);
  constexpr int kShared = kAddThreads * sizeof(double);
  auto add =
      teams > 1 ? sm90_wgrad_patch_add<Operand, kMostTeams> : sm90_wgrad_patch_add<Operand, 1>;
  add<<<all, kAddThreads, kShared, stream>>>(p);
  return cudaGetLastError();
}

template <typename Operand>
cudaError_t launch_wgrad(const PatchWgradParams& p, int multiprocessors, cudaStream_t stream) {
#define UPCONV_TRY(n) \
  if (p.tile_n == n) return launch_wgrad_tile<Operand, n>(p, multiprocessors, stream);
  UPCONV_PATCH_WGRAD_TILES(UPCONV_TRY)
#undef UPCONV_TRY
  return cudaErrorInvalidConfiguration;
}

}  // namespace patch

bool read_patch_wgrad_plan(const int64_t* record, int64_t length, PatchWgradParams* plan) {
  PlanReader reader(record, length);
#define UPCONV_READ(name) reader.read(&plan->name);
  UPCONV_PATCH_WGRAD_FIELDS(UPCONV_READ)
#undef UPCONV_READ
  const bool fits = reader.whole() && plan->tile_n > 0 && plan->workers > 0 &&
                    plan->input_stages <= patch::kMaxStages &&
                    plan->box_stages <= patch::kMaxStages && patch::job_count(*plan) > 0 &&
                    plan->in_w > 0 && plan->in_h > 0 && plan->in_d > 0;
  if (fits) plan->shape = patch::shape_of(*plan);
  return fits;
}

int64_t patch_wgrad_workspace_bytes(const PatchWgradParams& plan) {
  return patch::workspace_bytes(plan);
}

cudaError_t patch_wgrad(const PatchWgradParams& plan, int multiprocessors, cudaStream_t stream) {
#define UPCONV_TRY(index, name) \
  if (plan.operand == index) return patch::launch_wgrad<name>(plan, multiprocessors, stream);
  UPCONV_PATCH_WGRAD_OPERANDS(UPCONV_TRY)
#undef UPCONV_TRY
  return cudaErrorInvalidConfiguration;
}

}  // namespace upconv
