// Entry points of an exported file with the mma.sync kernel.
#include "cuda/mma_launch.h"
#include "export/entry.h"

// The planner's integers as the kernel takes them; null when they do not make a plan. A plan is
// made once for each input shape and lives as long as the process.
UPCONV_ENTRY void* upconv_plan(const int64_t* record, int64_t length) {
  auto* plan = new upconv::MmaPlan();
  if (upconv::read_mma_plan(record, length, plan)) return plan;
  delete plan;
  return nullptr;
}

// Scratch memory that a call needs: the packed weights.
UPCONV_ENTRY int64_t upconv_scratch_bytes(const void* plan) {
  return upconv::mma_packed_bytes(*static_cast<const upconv::MmaPlan*>(plan));
}

// Packs the weights, then computes y. `bias` may be null. Returns null, or what went wrong.
UPCONV_ENTRY const char* upconv_forward(const void* plan, const void* x, const void* weight,
                                        const void* bias, void* y, void* scratch, int device,
                                        void* stream) {
  const upconv::DeviceGuard guard(device);
  const auto on = static_cast<cudaStream_t>(stream);
  const auto& planned = *static_cast<const upconv::MmaPlan*>(plan);
  if (cudaError_t error = upconv::mma_pack(planned, weight, scratch, on)) {
    return upconv::reason(error);
  }
  upconv::MmaParams params = planned.params;
  params.x = x;
  params.w = static_cast<decltype(params.w)>(scratch);
  params.bias = bias;
  params.y = y;
  return upconv::reason(upconv::mma_fprop(params, on));
}
