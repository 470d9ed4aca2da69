// Runs the CUDA-core kernel's own source on the CPU. FLOAT_TILES, DOUBLE_TILES and LONG_TILES are
// the lists of direct_launch.cuh.
#include "direct_fprop.cuh"
#include "direct_launch.cu"

namespace upconv::direct {
constexpr int kMemory = 256 * 1024;
alignas(16) unsigned char raw_memory[kMemory];
}  // namespace upconv::direct

namespace upconv {
namespace {

bool descending = false;

template <typename T, int kRows, int kPoints, bool kTwoSteps = false>
cudaError_t run(const DirectParams& p) {
  const unsigned blocks = static_cast<unsigned>(p.groups) * p.row_blocks * p.blocks;
  host::body = [&p] { direct::direct_fprop_kernel<T, kRows, kPoints, kTwoSteps>(p); };
  for (unsigned block = 0; block < blocks; ++block) {
    std::memset(direct::raw_memory, 0xff, direct::kMemory);
    host::run_block(block, p.threads, descending);
    for (int i = p.shared_bytes; i < direct::kMemory; ++i) {
      if (direct::raw_memory[i] != 0xff) {
        std::fprintf(stderr, "shared memory was written at %d of %d\n", i, p.shared_bytes);
        std::abort();
      }
    }
  }
  return cudaSuccess;
}

}  // namespace

#define UPCONV_TRY_LONG(r, n) \
  if (p.set_aside >= 0 && p.rows == r) return run<float, r, n, true>(p);
#define UPCONV_TRY(r, n) \
  if (p.rows == r) return run<Type, r, n>(p);
#define UPCONV_DEFINE(name, type, tiles)                                 \
  cudaError_t direct_fprop_##name(const DirectParams& p, cudaStream_t) { \
    using Type = type;                                                   \
    LONG_TILES(UPCONV_TRY_LONG)                                          \
    tiles(UPCONV_TRY) return cudaErrorInvalidConfiguration;              \
  }
UPCONV_DEFINE(float32, float, FLOAT_TILES)
UPCONV_DEFINE(float64, double, DOUBLE_TILES)
UPCONV_DEFINE(bfloat16, __nv_bfloat16, FLOAT_TILES)
UPCONV_DEFINE(float16, __half, FLOAT_TILES)

}  // namespace upconv

extern "C" int run_direct(const int64_t* record, int64_t length, int reversed, const void* x,
                          const void* w, const void* bias, void* y) {
  static upconv::DirectParams plan;
  if (!upconv::read_direct_plan(record, length, &plan)) return -1;
  if (plan.shared_bytes > upconv::direct::kMemory) return -2;
  upconv::descending = reversed != 0;
  plan.x = x;
  plan.w = w;
  plan.bias = bias;
  plan.y = y;
  return upconv::direct_fprop(plan, nullptr);
}
