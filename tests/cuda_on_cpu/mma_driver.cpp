// The mma.sync kernel's own source on the CPU: plan integers and tensors in, output out.
#include "mma_fprop.cuh"
#include "mma_launch.h"

namespace upconv {

template <typename Operand>
void run(MmaPlan& plan, const void* weight, uint32_t* packed) {
  MmaParams& p = plan.params;
  for (int z = 0; z < p.groups * p.chunks; ++z)
    for (int y = 0; y < p.slices; ++y)
      for (int x = 0; x < p.steps; ++x) {
        cpu::block_index = {static_cast<unsigned>(x), static_cast<unsigned>(y),
                            static_cast<unsigned>(z)};
        cpu::run_block(32 * Operand::kTiles * p.warps_n, [&] {
          mma_pack_weights<Operand>(p, plan.pack,
                                    static_cast<const typename Operand::Element*>(weight), packed);
        });
      }
  p.w = reinterpret_cast<const uint4*>(packed);
  const int blocks = p.tiles_o * p.tiles_z * p.tiles_y * p.tiles_x * p.groups * p.chunks * p.kinds;
  for (int i = 0; i < blocks; ++i) {
    cpu::block_index = {static_cast<unsigned>(i), 0, 0};
    std::memset(memory, 0xff, sizeof(memory));  // NaN
    cpu::run_block(32 * p.warps_m * p.warps_n, [&] {
      p.warp_pixels == 64 ? mma_fprop_kernel<Operand, 4>(p) : mma_fprop_kernel<Operand, 2>(p);
    });
  }
}

}  // namespace upconv

extern "C" int emulate(const int64_t* record, int64_t length, const void* x, int64_t x_bytes,
                       const void* weight, const void* bias, void* y) {
  using namespace upconv;
  auto plan = std::make_unique<MmaPlan>();
  if (!read_mma_plan(record, length, plan.get())) return 1;
  MmaParams& p = plan->params;
  if (p.shared_bytes > static_cast<int>(sizeof(memory))) return 2;
  std::vector<uint4> packed(mma_packed_bytes(*plan) / 16);
  uint32_t* words = reinterpret_cast<uint32_t*>(packed.data());
  std::memset(words, 0xff, packed.size() * 16);
  cpu::input_begin = static_cast<const char*>(x);
  cpu::input_end = cpu::input_begin + x_bytes;
  p.x = x;
  p.bias = bias;
  p.y = y;
  if (p.operand == 0) run<MmaTf32>(*plan, weight, words);
  if (p.operand == 1) run<MmaBf16>(*plan, weight, words);
  if (p.operand == 2) run<MmaFp16>(*plan, weight, words);
  if (p.operand == 3) run<MmaSplit>(*plan, weight, words);
  return 0;
}

// read_mma_plan and mma_packed_bytes; its launches are not called.
#include "mma_launch.cu"

namespace upconv {
#define UPCONV_NEVER(name)                                                                  \
  cudaError_t mma_fprop_##name(const MmaParams&, cudaStream_t) { return cudaErrorUnknown; } \
  cudaError_t mma_pack_##name(const MmaPlan&, const void*, void*, cudaStream_t) {           \
    return cudaErrorUnknown;                                                                \
  }
UPCONV_NEVER(tf32)
UPCONV_NEVER(bf16)
UPCONV_NEVER(fp16)
UPCONV_NEVER(split)
}  // namespace upconv
