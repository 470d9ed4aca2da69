// The own source of the mma.sync kernels for the gradients on the CPU: plan integers and tensors
// in, gradient out.
#include "gather_igrad.cuh"
#include "gather_launch.cu"
#include "gather_launch.h"
#include "gather_wgrad.cuh"

namespace upconv {

template <typename Kernel>
void run_blocks(int blocks, int threads, int shared_bytes, bool backwards, const Kernel& kernel) {
  for (int i = 0; i < blocks; ++i) {
    cpu::block_index = {static_cast<unsigned>(backwards ? blocks - 1 - i : i), 0, 0};
    std::memset(memory, 0xff, sizeof(memory));  // NaN
    cpu::run_block(threads, kernel);
    for (size_t at = shared_bytes; at < sizeof(memory); ++at)
      if (memory[at] != 0xff) cpu::fail("wrote more shared memory than it asked for");
  }
}

template <typename Operand, bool kInput = true>
int run(const GatherParams& p, bool backwards) {
  const int threads = 32 * p.warps_m * p.warps_n * p.warps_k;
#define UPCONV_INPUT(n)                                              \
  if (!p.by_weight && p.tiles_n == n) {                              \
    run_blocks(p.blocks, threads, p.shared_bytes, backwards,         \
               [&] { gather::gather_igrad_kernel<Operand, n>(p); }); \
    return 0;                                                        \
  }
#define UPCONV_WEIGHT(m, n)                                             \
  if (p.by_weight && p.tiles_m == m && p.tiles_n == n) {                \
    run_blocks(p.blocks, threads, p.shared_bytes, backwards,            \
               [&] { gather::gather_wgrad_kernel<Operand, m, n>(p); }); \
    const gather::AddShape shape(p);                                    \
    const int wide = gather::kGatherAddThreads;                         \
    run_blocks(shape.blocks(p), wide, 4 * wide, backwards,              \
               [&] { gather::gather_wgrad_add<Operand>(p, shape); });   \
    return 0;                                                           \
  }
  if constexpr (kInput) {
    UPCONV_GATHER_IGRAD_TILES(UPCONV_INPUT)
  }
  UPCONV_GATHER_WGRAD_TILES(UPCONV_WEIGHT)
#undef UPCONV_WEIGHT
#undef UPCONV_INPUT
  return 2;
}

}  // namespace upconv

// `begin` to `end` is what may be read one element at a time.
extern "C" int gather_emulate(const int64_t* record, int64_t length, int backwards,
                              const void* other, const void* gy, void* result, float* workspace,
                              const void* begin, const void* end) {
  using namespace upconv;
  auto plan = std::make_unique<GatherParams>();
  if (!read_gather_plan(record, length, plan.get())) return 1;
  plan->other = other;
  plan->gy = gy;
  plan->result = result;
  plan->workspace = workspace;
  cpu::input_begin = static_cast<const char*>(begin);
  cpu::input_end = static_cast<const char*>(end);
  const GatherParams p = with_copies_that_fit(*plan);
  if (p.type == 0) return run<gather::Tf32>(p, backwards != 0);
  if (p.type == 1) return run<gather::Bf16>(p, backwards != 0);
  if (p.type == 2) return run<gather::Fp16>(p, backwards != 0);
  return run<gather::Split, false>(p, backwards != 0);
}

extern "C" int64_t gather_bytes(const int64_t* record, int64_t length) {
  auto plan = std::make_unique<upconv::GatherParams>();
  if (!upconv::read_gather_plan(record, length, plan.get())) return -1;
  return upconv::gather_workspace_bytes(*plan);
}
