// Host side of the Hopper kernel that walks: plan integers in, two launches out. One file has all
// of its forms, whose compilation several threads share.
#include "sm90_walk.cuh"

#include <cuda_runtime.h>

#include <numeric>

#include "operands.h"
#include "plan_reader.h"
#include "shared_memory.h"
#include "sm90_walk_launch.h"
#include "sm90_walk_pack.cuh"
#include "tensor_map.h"

namespace upconv {
namespace walk {

// Every form the planner may ask for: TILES in upconv/planner/sm90_walk.py has the same list,
// channels, taps of the walk, blocks of 64 pixels, taps of a row.
#define UPCONV_WALK_TILES(X) \
  UPCONV_WALK_THREE(X)       \
  UPCONV_WALK_NARROW(X) UPCONV_WALK_FLAT(X) UPCONV_WALK_SEVEN(X)
#define UPCONV_WALK_THREE(X) \
  X(64, 3, 1, 3) X(48, 3, 1, 3) X(48, 3, 2, 3) X(32, 3, 1, 3) X(32, 3, 2, 3)
#define UPCONV_WALK_NARROW(X) X(24, 3, 2, 3) X(24, 3, 4, 3) X(16, 3, 2, 3) X(16, 3, 4, 3)
#define UPCONV_WALK_FLAT(X) X(128, 1, 1, 3) X(128, 1, 2, 3) X(64, 1, 1, 3) X(64, 1, 2, 3)
#define UPCONV_WALK_SEVEN(X) X(32, 3, 2, 7)
#define UPCONV_WALK_OPERANDS(X) X(0, Tf32) X(1, Bf16) X(2, Fp16)

// What TMA reads as it sees it: columns, rows, planes, channels, images.
template <typename Operand>
cudaError_t describe(const WalkParams& p, CUtensorMap* map) {
  using Element = typename Operand::Element;
  const auto encode = tensor_map_encoder();
  if (!encode) return cudaErrorNotSupported;
  const auto size = [](int value) { return static_cast<cuuint64_t>(value); };
  const auto part = [](int value) { return static_cast<cuuint32_t>(value); };
  const cuuint64_t sizes[] = {size(p.in_w), size(p.in_h), size(p.in_d), size(p.in_channels),
                              size(p.batch)};
  const cuuint32_t box[] = {part(p.box_w), part(p.box_h), 1, part(box_channels(p)), 1};
  const cuuint32_t steps[] = {1, 1, 1, 1, 1};
  cuuint64_t strides[4], bytes = sizeof(Element);
  for (int i = 0; i < 4; ++i) strides[i] = bytes *= sizes[i];
  const auto type =
      sizeof(Element) == 4 ? CU_TENSOR_MAP_DATA_TYPE_TFLOAT32 : CU_TENSOR_MAP_DATA_TYPE_UINT16;
  const CUresult result =
      encode(map, type, 5, const_cast<void*>(p.source), sizes, strides, box, steps,
             CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE,
             CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

template <typename Consumer>
cudaError_t launch_tile(const WalkParams& p, int multiprocessors, cudaStream_t stream) {
  auto kernel = sm90_walk<Consumer>;
  const int bytes = shared_bytes(p), units = p.shape.units;
  cudaError_t error = allow_shared(kernel, bytes);
  if (error != cudaSuccess) return error;
  CUtensorMap map{};
  error = describe<typename Consumer::Operand>(p, &map);
  if (error != cudaSuccess) return error;
  int grid = units < multiprocessors ? units : multiprocessors;
  // The units of a thread block are so many apart, and then all of the same channels.
  if (p.resident) grid -= grid % p.shape.groups;
  if (grid == 0) return cudaErrorInvalidConfiguration;
  kernel<<<grid, kThreads, bytes, stream>>>(p, map);
  return cudaGetLastError();
}

template <typename Operand>
cudaError_t launch(const WalkParams& p, int multiprocessors, cudaStream_t stream) {
#define UPCONV_TRY(c, walk, many, taps)                                                     \
  if (p.tile_c == c && p.kernel_z == walk && p.blocks == many && p.kernel_x == taps) {      \
    return launch_tile<Consumer<Operand, c, walk, many, taps>>(p, multiprocessors, stream); \
  }
  UPCONV_WALK_TILES(UPCONV_TRY)
#undef UPCONV_TRY
  return cudaErrorInvalidConfiguration;
}

template <typename Operand>
cudaError_t pack(const WalkParams& p, const void* weight, void* packed, cudaStream_t stream) {
  auto kernel = sm90_walk_pack<Operand>;
  const int64_t blocks = (piece_count(p) + kPackThreads - 1) / kPackThreads;
  const int bytes = 0;
  const dim3 grid(static_cast<unsigned>(blocks));
  kernel<<<grid, kPackThreads, bytes, stream>>>(
      p, static_cast<const typename Operand::Element*>(weight), static_cast<uint4*>(packed));
  return cudaGetLastError();
}

}  // namespace walk

bool read_walk_plan(const int64_t* record, int64_t length, WalkParams* plan) {
  PlanReader reader(record, length);
#define UPCONV_READ(name) reader.read(&plan->name);
  UPCONV_WALK_FIELDS(UPCONV_READ)
#undef UPCONV_READ
  const WalkParams& p = *plan;
  const bool sizes = reader.whole() && p.batch > 0 && p.in_channels > 0 && p.out_channels > 0 &&
                     p.tile_c > 0 && p.blocks > 0 && p.chunk > 0 && p.strip > 0;
  if (!sizes) return false;
  plan->shape = walk::shape_of(*plan);
  const int run = p.blocks * walk::kBlock / walk::kOctet, all_stages = p.shape.depth * p.kernel_y;
  return p.weight_stages <= rings::kMaxStages &&
         (p.resident ? p.weight_stages == all_stages : p.weight_stages > 1) &&
         // A stage is handed back when the next one's products have begun.
         p.box_stages > 1 && p.box_stages <= rings::kMaxStages && p.stage_pieces > 0 &&
         p.stage_pieces <= staging::kMaxPieces &&
         // What a box must have for the windows of a strip's pixels, in as many rows as a run
         // touches.
         p.lead >= 0 && p.lead % 2 == 0 && p.step_y > 0 &&
         p.box_w >= p.lead + p.strip * walk::kOctet + p.kernel_x - 1 &&
         p.box_h >
             (p.strip - std::gcd(p.strip, run) + run - 1) / p.strip + (p.kernel_y - 1) * p.step_y;
}

int64_t walk_packed_bytes(const WalkParams& plan) { return walk::piece_count(plan) * 16; }

cudaError_t walk_pack(const WalkParams& plan, const void* weight, void* packed,
                      cudaStream_t stream) {
#define UPCONV_TRY(index, name)                                                       \
  if constexpr (is_here(index)) {                                                     \
    if (plan.operand == index) return walk::pack<name>(plan, weight, packed, stream); \
  }
  UPCONV_WALK_OPERANDS(UPCONV_TRY)
#undef UPCONV_TRY
  return cudaErrorInvalidConfiguration;
}

cudaError_t walk_run(const WalkParams& plan, int multiprocessors, cudaStream_t stream) {
#define UPCONV_TRY(index, name)                                                          \
  if constexpr (is_here(index)) {                                                        \
    if (plan.operand == index) return walk::launch<name>(plan, multiprocessors, stream); \
  }
  UPCONV_WALK_OPERANDS(UPCONV_TRY)
#undef UPCONV_TRY
  return cudaErrorInvalidConfiguration;
}

}  // namespace upconv
