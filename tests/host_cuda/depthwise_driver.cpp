// Runs the own source of the kernels for the gradients of depthwise layers on the CPU. IGRAD_FORMS
// and WGRAD_FORMS are the lists of depthwise_launch.cuh.
#include "depthwise_igrad.cuh"
#include "depthwise_launch.cu"
#include "depthwise_wgrad.cuh"
#include "host_cuda.h"

namespace upconv::direct {
constexpr int kMemory = 232 * 1024;
alignas(16) unsigned char raw_memory[kMemory];
}  // namespace upconv::direct

namespace upconv {
namespace {

bool descending = false;

void run_blocks(int blocks, int threads, int bytes) {
  for (int i = 0; i < blocks; ++i) {
    std::memset(direct::raw_memory, 0xff, direct::kMemory);
    host::run_block(descending ? blocks - 1 - i : i, threads, descending);
    for (int byte = bytes; byte < direct::kMemory; ++byte) {
      if (direct::raw_memory[byte] != 0xff) {
        std::fprintf(stderr, "shared memory was written at %d, after its %d bytes\n", byte, bytes);
        std::abort();
      }
    }
  }
}

template <typename T>
cudaError_t run(const DepthwiseParams& p) {
#define UPCONV_TRY_INPUT(y, x)                          \
  if (!p.by_weight && p.reach_y == y && p.reach_x == x) \
    host::body = [&p] { direct::depthwise_igrad_kernel<T, y, x>(p); };
#define UPCONV_TRY_WEIGHT(r, y, x)                                    \
  if (p.by_weight && p.rows == r && p.reach_y == y && p.reach_x == x) \
    host::body = [&p] { direct::depthwise_wgrad_kernel<T, r, y, x>(p); };
  host::body = nullptr;
  IGRAD_FORMS(UPCONV_TRY_INPUT)
  WGRAD_FORMS(UPCONV_TRY_WEIGHT)
  if (!host::body) return cudaErrorInvalidConfiguration;
  run_blocks(p.blocks, p.threads, p.shared_bytes);
  if (depthwise_workspace_bytes(p) == 0) return cudaSuccess;
  host::body = [&p] { direct::depthwise_wgrad_add<T>(p); };
  const int sums = p.channels * (p.kernel_z * p.taps + p.sums), each = direct::kDepthwiseAddThreads;
  run_blocks((sums + each - 1) / each, each, 0);
  return cudaSuccess;
}

}  // namespace

cudaError_t depthwise_grad_float32(const DepthwiseParams& p, cudaStream_t) { return run<float>(p); }
cudaError_t depthwise_grad_bfloat16(const DepthwiseParams& p, cudaStream_t) {
  return run<__nv_bfloat16>(p);
}
cudaError_t depthwise_grad_float16(const DepthwiseParams& p, cudaStream_t) {
  return run<__half>(p);
}

}  // namespace upconv

extern "C" int64_t depthwise_bytes(const int64_t* record, int64_t length, int shared) {
  static upconv::DepthwiseParams plan;
  if (!upconv::read_depthwise_plan(record, length, &plan)) return -1;
  return shared ? plan.shared_bytes : upconv::depthwise_workspace_bytes(plan);
}

extern "C" int run_depthwise(const int64_t* record, int64_t length, int reversed, const void* other,
                             const void* gy, void* result, void* bias, void* workspace) {
  static upconv::DepthwiseParams plan;
  if (!upconv::read_depthwise_plan(record, length, &plan)) return -1;
  upconv::descending = reversed != 0;
  plan.other = other;
  plan.gy = gy;
  plan.result = result;
  plan.bias = bias;
  plan.workspace = workspace;
  return upconv::depthwise_grad(plan, nullptr);
}
