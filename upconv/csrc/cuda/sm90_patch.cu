// Host side of the Hopper kernel for patches: plan integers in, two launches out. One file has all
// of its forms, 18 s of compilation that several threads share.
#include "sm90_patch.cuh"

#include <cuda_runtime.h>

#include "operands.h"
#include "plan_reader.h"
#include "shared_memory.h"
#include "sm90_patch_launch.h"
#include "tensor_map.h"

namespace upconv {
namespace patch {

// Every form the planner may ask for: TILES in upconv/planner/sm90_patch.py is the same list.
#define UPCONV_PATCH_TILES(X) X(256) X(128) X(64)
template <typename Operand>
constexpr int kMostColumns = Operand::kSplit ? 128 : 256;
#define UPCONV_PATCH_OPERANDS(X) X(0, Tf32) X(1, Bf16) X(2, Fp16) X(3, Split)

// Boxes with rows of 128 bytes, swizzled. Rows that are shorter (what is left over of an image) TMA
// does not swizzle.
template <typename Way>
cudaError_t encode_boxes(const PatchParams& p, const cuuint64_t (&sizes)[5],
                         const cuuint64_t (&strides)[4], const cuuint32_t (&box)[5],
                         CUtensorMap* map) {
  const auto encode = tensor_map_encoder();
  if (!encode) return cudaErrorNotSupported;
  constexpr cuuint32_t kBytes = sizeof(typename Way::Element);
  const cuuint32_t steps[] = {1, 1, 1, 1, 1};
  const auto type = Way::Operand::kSplit ? CU_TENSOR_MAP_DATA_TYPE_UINT32
                    : kBytes == 4        ? CU_TENSOR_MAP_DATA_TYPE_TFLOAT32
                                         : CU_TENSOR_MAP_DATA_TYPE_UINT16;
  const auto swizzle = box[0] * kBytes == static_cast<cuuint32_t>(kRowBytes)
                           ? CU_TENSOR_MAP_SWIZZLE_128B
                           : CU_TENSOR_MAP_SWIZZLE_NONE;
  const CUresult result =
      encode(map, type, 5, const_cast<void*>(p.source), sizes, strides, box, steps,
             CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
             CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

// The input as the TMA sees it: pixels, images, channels.
template <typename Way>
cudaError_t describe_input(const PatchParams& p, bool whole, CUtensorMap* map) {
  const auto size = [](int64_t value) { return static_cast<cuuint64_t>(value); };
  const auto part = [](int value) { return static_cast<cuuint32_t>(value); };
  const int pixels = whole || p.rest_pixels > Way::kPart ? Way::kPart : p.rest_pixels;
  const cuuint64_t channel = size(pixels_of(p)) * sizeof(typename Way::Element);
  const cuuint64_t image = channel * size(p.in_channels), all = image * size(p.batch);
  return encode_boxes<Way>(
      p, {size(pixels_of(p)), size(p.batch), size(p.in_channels), 1, 1}, {image, channel, all, all},
      {part(pixels), part(Way::kPart / pixels), part(Way::kChannels), 1, 1}, map);
}

// The same where two channels are one row.
template <typename Way>
cudaError_t describe_pairs(const PatchParams& p, bool whole, CUtensorMap* map) {
  const auto size = [](int64_t value) { return static_cast<cuuint64_t>(value); };
  const auto part = [](int value) { return static_cast<cuuint32_t>(value); };
  const bool alone = whole || p.rest_pixels == kBlock;  // an image
  const cuuint64_t pair = 2 * size(pixels_of(p)) * sizeof(typename Way::Element);
  const cuuint64_t image = pair * size(p.in_channels / 2), all = image * size(p.batch);
  return encode_boxes<Way>(
      p, {2 * size(pixels_of(p)), size(p.batch), size(p.in_channels / 2), 1, 1},
      {image, pair, all, all},
      {part(alone ? Way::kPart : p.rest_pixels), part(alone ? 1 : kBlock / p.rest_pixels),
       part(alone ? Way::kPairs : Way::kRestPairs), 1, 1},
      map);
}

// The input on channels_last: channels, pixels of all images.
template <typename Way>
cudaError_t describe_pixels(const PatchParams& p, CUtensorMap* map) {
  const auto size = [](int64_t value) { return static_cast<cuuint64_t>(value); };
  const cuuint64_t pixel = size(p.in_channels) * sizeof(typename Way::Element);
  const cuuint64_t pixels = size(p.batch) * size(pixels_of(p)), all = pixel * pixels;
  return encode_boxes<Way>(p, {size(p.in_channels), pixels, 1, 1, 1}, {pixel, all, all, all},
                           {static_cast<cuuint32_t>(Way::kChannels), kBlock, 1, 1, 1}, map);
}

// grad_output as the TMA sees it: columns, rows, depths, channels, images.
template <typename Way>
cudaError_t describe_gradient(const PatchParams& p, CUtensorMap* map) {
  const auto size = [](int64_t value) { return static_cast<cuuint64_t>(value); };
  const auto part = [](int value) { return static_cast<cuuint32_t>(value); };
  const cuuint64_t sizes[] = {size(p.in_w) * size(p.step_x), size(p.in_h) * size(p.step_y),
                              size(p.in_d) * size(p.step_z), size(p.out_channels), size(p.batch)};
  cuuint64_t strides[4];
  cuuint64_t bytes = sizeof(typename Way::Element);
  for (int i = 0; i < 4; ++i) strides[i] = bytes *= sizes[i];
  return encode_boxes<Way>(p, sizes, strides,
                           {part(Way::kPart * p.step_x), 1, 1, part(Way::kChannels), 1}, map);
}

// The same with short rows: outputs of a slice, slices, channels, images.
template <typename Way>
cudaError_t describe_slices(const PatchParams& p, CUtensorMap* map) {
  const auto size = [](int64_t value) { return static_cast<cuuint64_t>(value); };
  const auto part = [](int value) { return static_cast<cuuint32_t>(value); };
  const cuuint64_t sizes[] = {size(p.in_h) * size(p.in_w) * Way::kTaps,
                              size(p.in_d) * size(p.step_z), size(p.out_channels), size(p.batch),
                              1};
  cuuint64_t strides[4];
  cuuint64_t bytes = sizeof(typename Way::Element);
  for (int i = 0; i < 4; ++i) strides[i] = bytes *= sizes[i];
  return encode_boxes<Way>(p, sizes, strides,
                           {part(Way::kPart * Way::kTaps), 1, part(Way::kChannels), 1, 1}, map);
}

// The boxes of each way; `rest` where it takes what is left over of several images.
template <typename Operand, int N>
cudaError_t describe(ForwardLast<Operand, N> way, CUtensorMap* whole, CUtensorMap*) {
  return describe_pixels<decltype(way)>(way.p, whole);
}
template <typename Operand, int N>
cudaError_t describe(Backward<Operand, N> way, CUtensorMap* whole, CUtensorMap*) {
  return describe_gradient<decltype(way)>(way.p, whole);
}
template <typename Operand, int N>
cudaError_t describe(BackwardShort<Operand, N> way, CUtensorMap* whole, CUtensorMap*) {
  return describe_slices<decltype(way)>(way.p, whole);
}
template <typename Operand, int N>
cudaError_t describe(Forward<Operand, N> way, CUtensorMap* whole, CUtensorMap* rest) {
  const cudaError_t error = describe_input<decltype(way)>(way.p, true, whole);
  return error == cudaSuccess ? describe_input<decltype(way)>(way.p, false, rest) : error;
}
template <typename Operand, int N>
cudaError_t describe(ForwardPaired<Operand, N> way, CUtensorMap* whole, CUtensorMap* rest) {
  const cudaError_t error = describe_pairs<decltype(way)>(way.p, true, whole);
  return error == cudaSuccess ? describe_pairs<decltype(way)>(way.p, false, rest) : error;
}

template <typename Way, int N>
cudaError_t launch_tile(const PatchParams& p, int multiprocessors, cudaStream_t stream) {
  auto kernel = sm90_patch<Way, N>;
  const int bytes = shared_bytes(p, Way::kBytes), units = unit_count<Way>(p);
  cudaError_t error = allow_shared(kernel, bytes);
  if (error != cudaSuccess) return error;
  CUtensorMap whole{}, rest{};
  error = describe(Way{p}, &whole, &rest);
  if (error != cudaSuccess) return error;
  int blocks = units < multiprocessors ? units : multiprocessors;
  // The units of a thread block are so many apart, and then all of the same columns.
  if (p.resident) blocks -= blocks % column_groups(p);
  if (blocks == 0) return cudaErrorInvalidConfiguration;
  kernel<<<blocks, kThreads, bytes, stream>>>(p, whole, rest);
  return cudaGetLastError();
}

constexpr int kPackThreads = 256, kNoBytes = 0;

template <typename Way>
cudaError_t launch_pack(const PatchParams& p, const typename Way::Element* weight, uint4* packed,
                        cudaStream_t stream) {
  const unsigned wide = (column_groups(p) * p.tile_n + kPackThreads - 1) / kPackThreads;
  const dim3 grid(wide, Way::depth(p) * kSteps * 2);
  auto kernel = sm90_patch_pack<Way>;
  kernel<<<grid, kPackThreads, kNoBytes, stream>>>(p, weight, packed);
  return cudaGetLastError();
}

template <typename Way>
cudaError_t launch_pack_strict(const PatchParams& p, const float* weight, uint4* packed,
                               cudaStream_t stream) {
  constexpr int kWarps = kPackThreads / 32;
  const int columns = column_groups(p) * p.tile_n;
  float* factors = column_factors(p, packed, Way::depth(p));
  auto scale = sm90_patch_scale<Way>;
  const dim3 blocks((columns + kWarps - 1) / kWarps);
  scale<<<blocks, kPackThreads, kNoBytes, stream>>>(p, weight, factors);
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) return error;
  const unsigned wide = (columns + kPackThreads - 1) / kPackThreads;
  const dim3 grid(wide, Way::depth(p) * kSplitSteps * 2);
  auto kernel = sm90_patch_pack_strict<Way>;
  kernel<<<grid, kPackThreads, kNoBytes, stream>>>(p, weight, packed, factors);
  return cudaGetLastError();
}

// Calls `act` with the way of a plan.
template <typename Operand, int N, typename Act>
auto with_way(const PatchParams& p, Act act) {
  if constexpr (sizeof(typename Operand::Element) == 2) {
    if (p.short_rows) return act(BackwardShort<Operand, N>{p});
    if (p.paired) return act(ForwardPaired<Operand, N>{p});
  }
  if (p.backward) return act(Backward<Operand, N>{p});
  if constexpr (!Operand::kSplit) {
    if (p.channels_last) return act(ForwardLast<Operand, N>{p});
  }
  return act(Forward<Operand, N>{p});
}

template <typename Operand>
cudaError_t launch(const PatchParams& p, int multiprocessors, cudaStream_t stream) {
#define UPCONV_TRY(n)                                                                              \
  if constexpr (n <= kMostColumns<Operand>) {                                                      \
    if (p.tile_n == n)                                                                             \
      return with_way<Operand, n>(                                                                 \
          p, [&](auto way) { return launch_tile<decltype(way), n>(p, multiprocessors, stream); }); \
  }
  UPCONV_PATCH_TILES(UPCONV_TRY)
#undef UPCONV_TRY
  return cudaErrorInvalidConfiguration;
}

// The width of a tile does not matter for what is asked of the ways here.
template <typename Operand>
int64_t packed_bytes(const PatchParams& p) {
  const int64_t depth = with_way<Operand, 64>(p, [&](auto way) { return way.depth(p); });
  const int factors = Operand::kSplit ? p.tile_n * static_cast<int>(sizeof(float)) : 0;
  return column_groups(p) * (depth * weight_bytes(p) + factors);
}

template <typename Operand>
cudaError_t pack(const PatchParams& p, const void* weight, void* packed, cudaStream_t stream) {
  const auto* from = static_cast<const typename Operand::Element*>(weight);
  auto* to = static_cast<uint4*>(packed);
  return with_way<Operand, 64>(p, [&](auto way) {
    using Way = decltype(way);
    if constexpr (Operand::kSplit)
      return launch_pack_strict<Way>(p, from, to, stream);
    else
      return launch_pack<Way>(p, from, to, stream);
  });
}

// Whether short rows fit into parts, and pairs of channels into rows of TMA's.
bool fits_in_16_bits(const PatchParams& p) {
  const bool wide = is_wide(p);
  const bool is_short = p.backward && !wide && p.step_y == 2 && p.in_w % 2 == 0 &&
                        p.short_rows > 0 && p.in_w <= BackwardShort<Bf16, 64>::kPart / p.short_rows;
  const bool is_paired = !p.backward && !p.channels_last && !wide && p.in_channels % 2 == 0 &&
                         pixels_of(p) % 8 == ForwardPaired<Bf16, 64>::kEarly;
  return (!p.short_rows || is_short) && (!p.paired || is_paired);
}

}  // namespace patch

bool read_patch_plan(const int64_t* record, int64_t length, PatchParams* plan) {
  PlanReader reader(record, length);
#define UPCONV_READ(name) reader.read(&plan->name);
  UPCONV_PATCH_FIELDS(UPCONV_READ)
#undef UPCONV_READ
  const int rest = plan->rest_pixels;
  const bool fits = reader.whole() && plan->weight_stages <= patch::kMaxStages &&
                    plan->box_stages <= patch::kMaxStages && plan->tile_n > 0 && rest > 0 &&
                    rest <= patch::kBlock && (rest & (rest - 1)) == 0 &&
                    (plan->channels_last || plan->span == 2 || plan->span == 4) &&
                    (plan->channels_last || plan->step_x % plan->span == 0) &&
                    !(plan->channels_last && (plan->backward || patch::is_split(*plan))) &&
                    (!plan->backward || plan->step_x == 2) && patch::fits_in_16_bits(*plan);
  if (fits) plan->shape = patch::shape_of(*plan);
  return fits;
}

int64_t patch_packed_bytes(const PatchParams& plan) {
#define UPCONV_TRY(index, name)                                        \
  if constexpr (is_here(index)) {                                      \
    if (plan.operand == index) return patch::packed_bytes<name>(plan); \
  }
  UPCONV_PATCH_OPERANDS(UPCONV_TRY)
#undef UPCONV_TRY
  return 0;
}

cudaError_t patch_pack(const PatchParams& plan, const void* weight, void* packed,
                       cudaStream_t stream) {
#define UPCONV_TRY(index, name)                                                        \
  if constexpr (is_here(index)) {                                                      \
    if (plan.operand == index) return patch::pack<name>(plan, weight, packed, stream); \
  }
  UPCONV_PATCH_OPERANDS(UPCONV_TRY)
#undef UPCONV_TRY
  return cudaErrorInvalidConfiguration;
}

cudaError_t patch_run(const PatchParams& plan, int multiprocessors, cudaStream_t stream) {
#define UPCONV_TRY(index, name)                                                           \
  if constexpr (is_here(index)) {                                                         \
    if (plan.operand == index) return patch::launch<name>(plan, multiprocessors, stream); \
  }
  UPCONV_PATCH_OPERANDS(UPCONV_TRY)
#undef UPCONV_TRY
  return cudaErrorInvalidConfiguration;
}

}  // namespace upconv
