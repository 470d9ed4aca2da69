// Host side of the Hopper kernel for both phases of a row: plan integers in, two launches out. One
// file has all of its forms, whose compilation several threads share.
#include "sm90_phases.cuh"

#include <cuda_runtime.h>

#include "operands.h"
#include "plan_reader.h"
#include "shared_memory.h"
#include "sm90_phases_launch.h"
#include "sm90_phases_pack.cuh"
#include "tensor_map.h"

namespace upconv {
namespace phases {

// Every form the planner may ask for: TILES in upconv/planner/sm90_phases.py has the same lists,
// channels and blocks of 64 pixels.
#define UPCONV_PHASES_FORWARD_TILES(X) X(128, 1) X(64, 2) X(64, 1)
#define UPCONV_PHASES_BACKWARD_TILES(X) X(256, 1) X(128, 2) X(128, 1)
#define UPCONV_PHASES_TAPS(X) X(3) X(4)
#define UPCONV_PHASES_OPERANDS(X) X(0, Tf32) X(1, Bf16) X(2, Fp16)

// What TMA reads as it sees it: columns, rows, depths, channels, images.
template <typename Way>
cudaError_t describe(const PhasesParams& p, CUtensorMap* map) {
  const auto encode = tensor_map_encoder();
  if (!encode) return cudaErrorNotSupported;
  const auto size = [](int value) { return static_cast<cuuint64_t>(value); };
  const auto part = [](int value) { return static_cast<cuuint32_t>(value); };
  const bool back = p.backward;
  cuuint64_t sizes[] = {size(back ? p.out_w : p.in_w), size(back ? p.out_h : p.in_h),
                        size(back ? p.out_d : p.in_d), size(back ? p.out_channels : p.in_channels),
                        size(p.batch)};
  if (p.flat) sizes[0] *= sizes[1], sizes[1] = 1;
  const cuuint32_t box[] = {part(p.box_w), part(p.box_h), part(p.box_d), part(Way::kChannels), 1};
  const cuuint32_t steps[] = {1, 1, 1, 1, 1};
  cuuint64_t strides[4], bytes = sizeof(typename Way::Element);
  for (int i = 0; i < 4; ++i) strides[i] = bytes *= sizes[i];
  const auto type = Way::kWide ? CU_TENSOR_MAP_DATA_TYPE_TFLOAT32 : CU_TENSOR_MAP_DATA_TYPE_UINT16;
  const CUresult result =
      encode(map, type, 5, const_cast<void*>(p.source), sizes, strides, box, steps,
             CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE,
             CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

template <typename Way>
cudaError_t launch_tile(const PhasesParams& p, int multiprocessors, cudaStream_t stream) {
  auto kernel = sm90_phases<Way>;
  const int bytes = shared_bytes(p), units = p.shape.units;
  cudaError_t error = allow_shared(kernel, bytes);
  if (error != cudaSuccess) return error;
  CUtensorMap map{};
  error = describe<Way>(p, &map);
  if (error != cudaSuccess) return error;
  int grid = units < multiprocessors ? units : multiprocessors;
  // The units of a thread block are so many apart, and then all of the same channels and phase.
  const int kinds = p.shape.groups * p.shape.row_phases;
  if (p.resident) grid -= grid % kinds;
  if (grid == 0) return cudaErrorInvalidConfiguration;
  PhasesParams params = p;
  params.shape.by_apart = Divider(grid > kinds ? grid / kinds : 1);
  kernel<<<grid, kThreads, bytes, stream>>>(params, map);
  return cudaGetLastError();
}

// Groups of 16 bytes of K that a column has.
inline int64_t piece_count(const PhasesParams& p) {
  const PhasesShape& s = p.shape;
  return static_cast<int64_t>(s.row_phases) * s.depth * s.most_z * s.most_y * steps_of(p) *
         p.kernel_x * 2;
}

template <typename Way>
cudaError_t launch_pack(const PhasesParams& p, const void* weight, void* packed,
                        cudaStream_t stream) {
  auto kernel = sm90_phases_pack<Way>;
  const int bytes = Packer<Way>::bytes(p), steps = p.shape.depth * Way::kSteps;
  const dim3 grid(p.shape.groups * steps * p.shape.pack_parts, p.tile_n / kPackColumns);
  kernel<<<grid, kPackThreads, bytes, stream>>>(
      p, static_cast<const typename Way::Element*>(weight), static_cast<uint4*>(packed));
  return cudaGetLastError();
}

template <typename Operand>
cudaError_t launch(const PhasesParams& p, int multiprocessors, cudaStream_t stream) {
#define UPCONV_TRY_TAPS(way, n, many, taps)                                      \
  if (p.kernel_x == taps && p.tile_n == n && p.blocks == many) {                 \
    return launch_tile<way<Operand, n, many, taps>>(p, multiprocessors, stream); \
  }
#define UPCONV_TRY_FORWARD(n, many) \
  UPCONV_TRY_TAPS(Forward, n, many, 3) UPCONV_TRY_TAPS(Forward, n, many, 4)
#define UPCONV_TRY_BACKWARD(n, many) \
  UPCONV_TRY_TAPS(Backward, n, many, 3) UPCONV_TRY_TAPS(Backward, n, many, 4)
  if (p.backward) {
    UPCONV_PHASES_BACKWARD_TILES(UPCONV_TRY_BACKWARD)
  } else {
    UPCONV_PHASES_FORWARD_TILES(UPCONV_TRY_FORWARD)
  }
#undef UPCONV_TRY_BACKWARD
#undef UPCONV_TRY_FORWARD
#undef UPCONV_TRY_TAPS
  return cudaErrorInvalidConfiguration;
}

// The size of a tile does not matter for what is asked of the ways here.
template <typename Operand>
cudaError_t pack(const PhasesParams& p, const void* weight, void* packed, cudaStream_t stream) {
#define UPCONV_TRY(taps)                                                                           \
  if (p.kernel_x == taps) {                                                                        \
    if (p.backward) return launch_pack<Backward<Operand, 64, 1, taps>>(p, weight, packed, stream); \
    return launch_pack<Forward<Operand, 64, 1, taps>>(p, weight, packed, stream);                  \
  }
  UPCONV_PHASES_TAPS(UPCONV_TRY)
#undef UPCONV_TRY
  return cudaErrorInvalidConfiguration;
}

}  // namespace phases

bool read_phases_plan(const int64_t* record, int64_t length, PhasesParams* plan) {
  PlanReader reader(record, length);
#define UPCONV_READ(name) reader.read(&plan->name);
  UPCONV_PHASES_FIELDS(UPCONV_READ)
#undef UPCONV_READ
  const int octets = plan->octets;
  const bool fits = reader.whole() && plan->weight_stages <= rings::kMaxStages &&
                    plan->box_stages <= rings::kMaxStages && plan->tile_n > 0 && plan->blocks > 0 &&
                    octets > 0 && octets <= 8 * plan->blocks && (octets & (octets - 1)) == 0 &&
                    plan->stride_z > 0 && plan->stride_y > 0 && plan->kernel_z > 0 &&
                    plan->kernel_y > 0 &&
                    // Flat, outputs are of as many pixels in a row as the input has.
                    (!plan->flat || (!plan->backward && (plan->out_w + 1) / 2 == plan->in_w));
  if (fits) plan->shape = phases::shape_of(*plan);
  return fits;
}

int64_t phases_packed_bytes(const PhasesParams& plan) {
  return phases::piece_count(plan) * plan.shape.groups * plan.tile_n * 16;
}

cudaError_t phases_pack(const PhasesParams& plan, const void* weight, void* packed,
                        cudaStream_t stream) {
#define UPCONV_TRY(index, name)                                                         \
  if constexpr (is_here(index)) {                                                       \
    if (plan.operand == index) return phases::pack<name>(plan, weight, packed, stream); \
  }
  UPCONV_PHASES_OPERANDS(UPCONV_TRY)
#undef UPCONV_TRY
  return cudaErrorInvalidConfiguration;
}

cudaError_t phases_run(const PhasesParams& plan, int multiprocessors, cudaStream_t stream) {
#define UPCONV_TRY(index, name)                                                            \
  if constexpr (is_here(index)) {                                                          \
    if (plan.operand == index) return phases::launch<name>(plan, multiprocessors, stream); \
  }
  UPCONV_PHASES_OPERANDS(UPCONV_TRY)
#undef UPCONV_TRY
  return cudaErrorInvalidConfiguration;
}

}  // namespace upconv
