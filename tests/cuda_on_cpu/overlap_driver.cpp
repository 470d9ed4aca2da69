// The own source of the kernel for few output channels on the CPU: plan integers and tensors in,
// output out.
#include "overlap_fprop.cuh"

#include "overlap_launch.cu"

namespace upconv {

#define UPCONV_TYPES_HERE(X) X(tf32, Tf32) X(bf16, Bf16) X(fp16, Fp16)
bool backwards;

template <typename Kernel>
cudaError_t run_blocks(const OverlapParams& p, const Kernel& kernel) {
  const int blocks = p.shares * p.groups;
  for (int i = 0; i < blocks; ++i) {
    cpu::block_index = {static_cast<unsigned>(backwards ? blocks - 1 - i : i), 0, 0};
    std::memset(memory, 0xff, sizeof(memory));  // NaN
    cpu::run_block(32 * p.warps, kernel);
    for (size_t at = p.shared_bytes; at < sizeof(memory); ++at)
      if (memory[at] != 0xff) cpu::fail("wrote more shared memory than it asked for");
  }
  return cudaSuccess;
}

// The input as the TMA would be told of it; see overlap_launch.cuh.
OverlapBoxes described(const OverlapParams& p) {
  const int64_t bytes = p.type == 1 || p.type == 2 ? 2 : 4, row = bytes * p.in_w;
  const int64_t plane = row * p.in_h, channel = plane * p.in_d;
  mma_ptx::TensorMap map{static_cast<const char*>(p.x),
                         {p.in_w, p.in_channels, p.in_h, p.in_d, int64_t{p.batch} * p.groups},
                         {bytes, channel, row, plane, channel * p.in_channels},
                         {p.pitch, p.channels, p.box_rows, p.planes, 1},
                         p.type == 0};
  OverlapBoxes boxes;
  static_assert(sizeof(map) <= sizeof(boxes), "does not fit");
  std::memcpy(&boxes, &map, sizeof(map));
  return boxes;
}

#define UPCONV_TILE(boxes_, m, n)                            \
  if (p.boxes == boxes_ && p.tiles_m == m && p.tiles_n == n) \
    return run_blocks(                                       \
        p, [&] { overlap::overlap_fprop_kernel<Operand, boxes_ != 0, m, n>(p, boxes); });
#define UPCONV_BOX_TILE(m, n) UPCONV_TILE(1, m, n)
#define UPCONV_COPY_TILE(m, n) UPCONV_TILE(0, m, n)

#define UPCONV_PACK(name, operand)                                                               \
  cudaError_t overlap_pack_##name(const OverlapParams& p, const void* weight, void* packed,      \
                                  cudaStream_t) {                                                \
    const int wide = kOverlapPackThreads, blocks = (p.weight_bytes / 4 + wide - 1) / wide;       \
    for (int i = 0; i < blocks * p.groups; ++i) {                                                \
      cpu::block_index = {static_cast<unsigned>(i % blocks), static_cast<unsigned>(i / blocks)}; \
      cpu::run_block(wide,                                                                       \
                     [&] { overlap::overlap_pack_kernel<gather::operand>(p, weight, packed); }); \
    }                                                                                            \
    return cudaSuccess;                                                                          \
  }
UPCONV_TYPES_HERE(UPCONV_PACK)
UPCONV_PACK(split, Split)

#define UPCONV_TYPE(name, operand)                                         \
  cudaError_t overlap_fprop_##name(const OverlapParams& p, cudaStream_t) { \
    using Operand = gather::operand;                                       \
    const OverlapBoxes boxes = described(p);                               \
    UPCONV_OVERLAP_BOX_TILES(UPCONV_BOX_TILE)                              \
    UPCONV_OVERLAP_COPY_TILES(UPCONV_COPY_TILE)                            \
    return cudaErrorInvalidConfiguration;                                  \
  }
UPCONV_TYPES_HERE(UPCONV_TYPE)

cudaError_t overlap_fprop_split(const OverlapParams& p, cudaStream_t) {
  using Operand = gather::Split;
  const OverlapBoxes boxes = described(p);
  UPCONV_OVERLAP_SPLIT_TILES(UPCONV_BOX_TILE)
  return cudaErrorInvalidConfiguration;
}

}  // namespace upconv

// `begin` to `end` is what may be read one element at a time.
extern "C" int overlap_emulate(const int64_t* record, int64_t length, int backwards, const void* x,
                               const void* w, const void* bias, void* y, const void* begin,
                               const void* end) {
  using namespace upconv;
  auto plan = std::make_unique<OverlapParams>();
  if (!read_overlap_plan(record, length, plan.get())) return 1;
  const int64_t bytes = overlap_packed_bytes(*plan);
  std::vector<uint4> packed(bytes / 16 + 1, uint4{~0u, ~0u, ~0u, ~0u});
  if (overlap_pack(*plan, w, packed.data(), nullptr) != cudaSuccess) return 3;
  plan->x = x;
  plan->w = packed.data();
  plan->bias = bias;
  plan->y = y;
  cpu::input_begin = static_cast<const char*>(begin);
  cpu::input_end = static_cast<const char*>(end);
  upconv::backwards = backwards != 0;
  return overlap_fprop(*plan, nullptr) == cudaSuccess ? 0 : 2;
}
