// Entry points of an exported file with the CUDA-core kernel.
#include "cuda/direct_launch.h"
#include "export/entry.h"

// The planner's integers as the kernel takes them; null when they do not make a plan. A plan is
// made once for each input shape and lives as long as the process.
UPCONV_ENTRY void* upconv_plan(const int64_t* record, int64_t length) {
  auto* plan = new upconv::DirectParams();
  if (upconv::read_direct_plan(record, length, plan)) return plan;
  delete plan;
  return nullptr;
}

// Scratch memory that a call needs: none, the kernel reads the weights as they are.
UPCONV_ENTRY int64_t upconv_scratch_bytes(const void*) { return 0; }

// Computes y. `bias` may be null. Returns null, or what went wrong.
UPCONV_ENTRY const char* upconv_forward(const void* plan, const void* x, const void* weight,
                                        const void* bias, void* y, void*, int device,
                                        void* stream) {
  const upconv::DeviceGuard guard(device);
  auto params = *static_cast<const upconv::DirectParams*>(plan);
  params.x = x;
  params.w = weight;
  params.bias = bias;
  params.y = y;
  return upconv::reason(upconv::direct_fprop(params, static_cast<cudaStream_t>(stream)));
}
