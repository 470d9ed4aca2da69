// Host side of the Hopper kernel for the weight's gradient of patches: plan integers in, two
// launches out.
#include "sm90_wgrad_patch.cuh"

#include <cuda_runtime.h>

#include "sm90_wgrad_patch_launch.h"
#include "tensor_map.h"

namespace upconv {
namespace patch {

// Every form the planner may ask for: TILES in upconv/planner/sm90_patch_wgrad.py is the same list.
#define UPCONV_PATCH_WGRAD_TILES(X) X(128) X(64)
#define UPCONV_PATCH_WGRAD_OPERANDS(X) X(0, Tf32) X(1, Bf16) X(2, Fp16)

// A tensor as the TMA sees it: columns, rows, depths, channels, images. A box is `bytes` of a row
// of some channels.
template <typename Operand>
cudaError_t describe_rows(const void* tensor, const int (&size)[5], int bytes, int channels,
                          bool round, CUtensorMap* map) {
  const auto encode = tensor_map_encoder();
  if (!encode) return cudaErrorNotSupported;
  constexpr cuuint64_t kBytes = sizeof(typename Operand::Element);
  cuuint64_t sizes[5], strides[4], whole = kBytes;
  for (int i = 0; i < 5; ++i) sizes[i] = static_cast<cuuint64_t>(size[i]);
  for (int i = 0; i < 4; ++i) strides[i] = whole *= sizes[i];
  const cuuint32_t box[] = {static_cast<cuuint32_t>(bytes / kBytes), 1, 1,
                            static_cast<cuuint32_t>(channels), 1};
  const cuuint32_t steps[] = {1, 1, 1, 1, 1};
  const auto type = kBytes == 2 ? CU_TENSOR_MAP_DATA_TYPE_UINT16
                    : round     ? CU_TENSOR_MAP_DATA_TYPE_TFLOAT32
                                : CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
  const auto swizzle = bytes == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B;
  const CUresult result =
      encode(map, type, 5, const_cast<void*>(tensor), sizes, strides, box, steps,
             CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
             CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

template <typename Operand, int N>
cudaError_t launch_wgrad_tile(const PatchWgradParams& p, int multiprocessors, cudaStream_t stream) {
  auto kernel = sm90_wgrad_patch<Operand, N>;
  auto add = sm90_wgrad_patch_add<Operand>;
  const int bytes = shared_bytes(p), units = unit_count(p);
  cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return error;
  CUtensorMap gy{}, exact{}, x{};
  const int size[] = {p.in_w * kRowTaps, p.in_h * p.step_y, p.in_d * p.step_z, p.out_channels,
                      p.batch};
  error = describe_rows<Operand>(p.gy, size, kRowBytes, kGradRows, true, &gy);
  if (error != cudaSuccess) return error;
  error = describe_rows<Operand>(p.gy, size, kRowBytes, kGradRows, false, &exact);
  if (error != cudaSuccess) return error;
  error = describe_rows<Operand>(p.x, {p.in_w, p.in_h, p.in_d, p.in_channels, p.batch}, kInputBytes,
                                 N, true, &x);
  if (error != cudaSuccess) return error;
  const int blocks = units < multiprocessors ? units : multiprocessors;
  kernel<<<blocks, kThreads, bytes, stream>>>(p, gy, exact, x);
  error = cudaGetLastError();
  if (error != cudaSuccess) return error;
  const int threads = kTeamThreads * add_teams(p),
            shared = threads * static_cast<int>(sizeof(double));
  const unsigned all = static_cast<unsigned>(add_blocks(p)) + (p.sums ? p.out_channels : 0);
  add<<<all, threads, shared, stream>>>(p);
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
  int64_t at = 0;
  auto take = [&]() { return at < length ? static_cast<int>(record[at++]) : (++at, 0); };
#define UPCONV_READ(name) plan->name = take();
  UPCONV_PATCH_WGRAD_FIELDS(UPCONV_READ)
#undef UPCONV_READ
  return at == length && plan->tile_n > 0 && plan->workers > 0 &&
         plan->input_stages <= patch::kMaxStages && plan->box_stages <= patch::kMaxStages;
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
