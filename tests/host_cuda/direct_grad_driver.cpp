// Runs the own source of the CUDA-core kernels for the gradients on the CPU. FLOAT_TILES,
// NARROW_TILES, DOUBLE_TILES and COLUMNS are the lists of direct_grad_launch.cuh.
#include "direct_grad_launch.cu"
#include "direct_igrad.cuh"
#include "direct_wgrad.cuh"
#include "host_cuda.h"

namespace upconv::direct {
constexpr int kMemory = 96 * 1024;
alignas(16) unsigned char raw_memory[kMemory];
}  // namespace upconv::direct

namespace upconv {
namespace {

bool descending = false;

// Warps have nothing to do with each other; each has its own part of shared memory.
void run_warps(unsigned blocks, unsigned warps, size_t bytes) {
  for (unsigned i = 0; i < blocks; ++i) {
    for (unsigned warp = 0; warp < warps; ++warp) {
      std::memset(direct::raw_memory, 0xff, direct::kMemory);
      host::run_block(descending ? blocks - 1 - i : i, 32, descending, 32 * warp);
      for (size_t byte = 0; byte < direct::kMemory; ++byte) {
        if (byte / bytes != warp && direct::raw_memory[byte] != 0xff) {
          std::fprintf(stderr, "warp %u wrote to shared memory at %zu\n", warp, byte);
          std::abort();
        }
      }
    }
  }
}

template <typename T, int kColumns>
cudaError_t run_input(const DirectGradParams& p) {
  host::body = [&p] { direct::direct_igrad_kernel<T, kColumns>(p); };
  run_warps(static_cast<unsigned>(p.groups) * p.shares, p.warps,
            kColumns * kGradOutputs * sizeof(direct::Sum<T>));
  return cudaSuccess;
}

template <typename T, int kInputs, int kColumns>
cudaError_t run(const DirectGradParams& p) {
  const unsigned tiles = static_cast<unsigned>(p.groups) * p.tiles;
  host::body = [&p] { direct::direct_wgrad_kernel<T, kInputs, kColumns>(p); };
  run_warps(tiles * p.shares, p.warps,
            direct::kWgradStage<kInputs, kColumns> * sizeof(direct::Sum<T>));
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
#define UPCONV_TRY_INPUT(c) \
  if (p.inputs == 0 && p.columns == c) return run_input<Type, c>(p);
#define UPCONV_DEFINE(name, type, tiles, inputs)                                     \
  cudaError_t direct_grad_##name(const DirectGradParams& p, cudaStream_t) {          \
    using Type = type;                                                               \
    inputs(UPCONV_TRY_INPUT) tiles(UPCONV_TRY) return cudaErrorInvalidConfiguration; \
  }
#define NO_COLUMNS(X)
UPCONV_DEFINE(float32, float, FLOAT_TILES, COLUMNS)
UPCONV_DEFINE(float64, double, DOUBLE_TILES, COLUMNS)
UPCONV_DEFINE(bfloat16, __nv_bfloat16, NARROW_TILES, NO_COLUMNS)
UPCONV_DEFINE(float16, __half, NARROW_TILES, NO_COLUMNS)

}  // namespace upconv

extern "C" int64_t direct_grad_bytes(const int64_t* record, int64_t length) {
  static upconv::DirectGradParams plan;
  if (!upconv::read_direct_grad_plan(record, length, &plan)) return -1;
  return upconv::direct_grad_workspace_bytes(plan);
}

extern "C" int run_direct_grad(const int64_t* record, int64_t length, int reversed, const void* x,
                               const void* gy, void* gw, void* workspace) {
  static upconv::DirectGradParams plan;
  if (!upconv::read_direct_grad_plan(record, length, &plan)) return -1;
  upconv::descending = reversed != 0;
  plan.x = x;
  plan.gy = gy;
  plan.result = gw;
  plan.workspace = workspace;
  return upconv::direct_grad(plan, nullptr);
}
