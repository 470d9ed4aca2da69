// Runs the own source of the CUDA-core kernel for the weight's gradient on the CPU. FLOAT_TILES and
// DOUBLE_TILES are the lists of direct_wgrad_launch.cuh.
#include "direct_wgrad.cuh"
#include "direct_wgrad_launch.cu"
#include "host_cuda.h"

namespace upconv::direct {
constexpr int kMemory = 64 * 1024;
alignas(16) unsigned char raw_memory[kMemory];
}  // namespace upconv::direct

namespace upconv {
namespace {

bool descending = false;

template <typename T, int kInputs, int kColumns>
cudaError_t run(const DirectWgradParams& p) {
  const unsigned tiles = static_cast<unsigned>(p.groups) * p.tiles;
  host::body = [&p] { direct::direct_wgrad_kernel<T, kInputs, kColumns>(p); };
  for (unsigned i = 0; i < tiles * p.shares; ++i) {
    const unsigned block = descending ? tiles * p.shares - 1 - i : i;
    for (int warp = 0; warp < p.warps; ++warp) {
      host::run_block(block, 32, descending, 32 * static_cast<unsigned>(warp));
    }
  }
  host::body = [&p] { direct::direct_wgrad_add<T>(p); };
  for (unsigned block = 0; block < tiles * ((p.sums + 31) / 32); ++block) {
    std::memset(direct::raw_memory, 0xff, direct::kMemory);
    host::run_block(block, 32 * direct::kWgradAddRows, descending);
  }
  return cudaSuccess;
}

}  // namespace

#define UPCONV_TRY(a, c) \
  if (p.inputs == a && p.columns == c) return run<Type, a, c>(p);
#define UPCONV_DEFINE(name, type, tiles)                                      \
  cudaError_t direct_wgrad_##name(const DirectWgradParams& p, cudaStream_t) { \
    using Type = type;                                                        \
    tiles(UPCONV_TRY) return cudaErrorInvalidConfiguration;                   \
  }
UPCONV_DEFINE(float32, float, FLOAT_TILES)
UPCONV_DEFINE(float64, double, DOUBLE_TILES)
UPCONV_DEFINE(bfloat16, __nv_bfloat16, FLOAT_TILES)
UPCONV_DEFINE(float16, __half, FLOAT_TILES)

}  // namespace upconv

extern "C" int64_t direct_wgrad_bytes(const int64_t* record, int64_t length) {
  static upconv::DirectWgradParams plan;
  if (!upconv::read_direct_wgrad_plan(record, length, &plan)) return -1;
  return upconv::direct_wgrad_workspace_bytes(plan);
}

extern "C" int run_direct_wgrad(const int64_t* record, int64_t length, int reversed, const void* x,
                                const void* gy, void* gw, void* workspace) {
  static upconv::DirectWgradParams plan;
  if (!upconv::read_direct_wgrad_plan(record, length, &plan)) return -1;
  upconv::descending = reversed != 0;
  plan.x = x;
  plan.gy = gy;
  plan.gw = gw;
  plan.workspace = workspace;
  return upconv::direct_wgrad(plan, nullptr);
}
