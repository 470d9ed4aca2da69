// Entry points of an exported file with the Hopper kernel.
#include "cuda/sm90_launch.h"
#include "export/entry.h"

// The planner's integers as the kernel takes them; null when they do not make a plan. A plan is
// made once for each input shape and lives as long as the process.
UPCONV_ENTRY void* upconv_plan(const int64_t* record, int64_t length) {
  auto* plan = new upconv::Sm90Params();
  if (upconv::read_sm90_plan(record, length, plan)) return plan;
  delete plan;
  return nullptr;
}

// Scratch memory that a call needs: the packed weights, then what the kernel itself asks for.
UPCONV_ENTRY int64_t upconv_scratch_bytes(const void* plan) {
  const auto& params = *static_cast<const upconv::Sm90Params*>(plan);
  return upconv::sm90_packed_bytes(params) + upconv::sm90_workspace_bytes(params);
}

// Packs the weights, then computes y. `bias` may be null. Returns null, or what went wrong.
UPCONV_ENTRY const char* upconv_forward(const void* plan, const void* x, const void* weight,
                                        const void* bias, void* y, void* scratch, int device,
                                        void* stream) {
  const upconv::DeviceGuard guard(device);
  const auto on = static_cast<cudaStream_t>(stream);
  auto params = *static_cast<const upconv::Sm90Params*>(plan);
  if (cudaError_t error = upconv::sm90_pack(params, weight, scratch, on)) {
    return upconv::reason(error);
  }
  params.x = x;
  params.w = static_cast<const uint4*>(scratch);
  params.bias = bias;
  params.y = y;
  params.ranges =
      reinterpret_cast<uint2*>(static_cast<char*>(scratch) + upconv::sm90_packed_bytes(params));
  int multiprocessors = 0;
  cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  return upconv::reason(upconv::sm90_fprop(params, multiprocessors, on));
}
