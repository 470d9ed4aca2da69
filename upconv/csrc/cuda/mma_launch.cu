// Plan integers -> MmaPlan, and the choice of the operand type.
#include "mma_launch.h"

#include "operands.h"
#include "plan_reader.h"

namespace upconv {

#define UPCONV_OPERANDS(X) X(0, tf32) X(1, bf16) X(2, fp16) X(3, split)
#define UPCONV_DECLARE(index, name)                             \
  cudaError_t mma_fprop_##name(const MmaParams&, cudaStream_t); \
  cudaError_t mma_pack_##name(const MmaPlan&, const void*, void*, cudaStream_t);
UPCONV_OPERANDS(UPCONV_DECLARE)
#undef UPCONV_DECLARE

// For n < 2^31: the multiplier exceeds 2^(31 + shift) / divisor by less than 2^shift / divisor.
static MmaDivisor divisor_of(int divisor) {
  MmaDivisor result{0, 0};
  while ((1u << result.shift) < static_cast<uint32_t>(divisor)) ++result.shift;
  const uint64_t power = uint64_t{1} << (31 + result.shift);
  result.multiplier = static_cast<uint32_t>((power + divisor - 1) / divisor);
  return result;
}

// Sets how many pixels are read at a time. Words of an item: 4 channels of 32 bits, 8 of 16.
static void read_by(int pixels, MmaParams* params) {
  MmaParams& p = *params;
  const bool wide = p.operand == 0 || p.operand == 3;
  const int words = wide ? 4 * pixels : 8 * ((pixels + 1) / 2);
  const int each = kMmaChunkWords / words * 32 * p.warps_m * p.warps_n;
  p.copy = pixels;
  p.items = p.tile_o * p.fill_z * p.fill_y * p.fill_x / pixels;
  p.slice_items = p.slice_blocks * p.items;
  p.chunks_a_slice = (p.slice_items + each - 1) / each;
  p.by_items = divisor_of(p.items);
}

static int element_bytes(const MmaParams& p) { return p.operand == 0 || p.operand == 3 ? 4 : 2; }

bool read_mma_plan(const int64_t* record, int64_t length, MmaPlan* plan) {
  MmaParams& p = plan->params;
  PlanReader reader(record, length);
#define UPCONV_READ(name) reader.read(&p.name);
  UPCONV_MMA_FIELDS(UPCONV_READ)
#undef UPCONV_READ
  if (p.kinds > kMmaMaxKinds || p.rows > kMmaMaxRows || p.phases > kMmaMaxPhases ||
      p.steps > kMmaMaxSteps || p.stages > kMmaMaxStages || p.taps > kMmaMaxTaps)
    return false;
  if (p.warp_pixels != 64 && (p.warp_pixels != 32 || p.slices != 1)) return false;
  const struct {
    int divisor;
    MmaDivisor* by;
  } divisors[] = {{p.kinds, &p.by_kinds},         {p.chunks, &p.by_chunks},
                  {p.groups, &p.by_groups},       {p.tiles_x, &p.by_tiles_x},
                  {p.tiles_y, &p.by_tiles_y},     {p.tiles_z, &p.by_tiles_z},
                  {p.tile_x, &p.by_tile_x},       {p.tile_y, &p.by_tile_y},
                  {p.tile_z, &p.by_tile_z},       {p.fill_x, &p.by_fill_x},
                  {p.fill_y, &p.by_fill_y},       {p.fill_z, &p.by_fill_z},
                  {p.in_step_x, &p.by_in_step_x}, {p.phase_columns, &p.by_phase_columns}};
  for (const auto& each : divisors) {
    if (each.divisor < 1) return false;
    *each.by = divisor_of(each.divisor);
  }
  if (p.copy != 1 && p.copy != 2 && p.copy != 4) return false;
  read_by(p.copy, &p);
  for (int i = 0; i < p.kinds; ++i) {
    MmaKind& kind = p.kind[i];
    for (int* field : {&kind.row_begin, &kind.row_end, &kind.phase_begin, &kind.phase_end,
                       &kind.step_begin, &kind.step_end, &kind.stage_begin, &kind.stage_end,
                       &kind.uniform, &kind.taps, &kind.prefill, &kind.slice_tiles, &kind.weights})
      reader.read(field);
  }
  for (int i = 0; i < p.rows; ++i) {
    reader.read(&p.row[i].first_z);
    reader.read(&p.row[i].first_y);
    reader.read(&p.row[i].base);
  }
  for (int i = 0; i < p.phases; ++i) reader.read(&p.phase_base[i]);
  for (int i = 0; i < p.steps; ++i) {
    MmaPack::Source& source = plan->pack.source[i];
    for (uint16_t& offset : p.step[i].offset) reader.read(&offset);
    reader.read(&p.step[i].tiles);
    for (int16_t& shift : source.shift) reader.read(&shift);
    for (int8_t& block : source.block) reader.read(&block);
    reader.read(&source.first);
  }
  for (int i = 0; i < p.stages; ++i) {
    uint32_t first = 0, vectors = 0, begin = 0, end = 0;
    for (uint32_t* field : {&first, &vectors, &begin, &end}) reader.read(field);
    if (first >> 28 || vectors >> 16 || (end - begin) >> 16) return false;
    p.stage[i].first = 16 * first;
    p.stage[i].bytes_steps = vectors | (end - begin) << 16;
  }
  for (int i = 0; i < p.taps; ++i) reader.read(&plan->pack.tap[i]);
  return reader.whole();
}

int64_t mma_packed_bytes(const MmaPlan& plan) {
  const MmaParams& p = plan.params;
  const int tile_bytes = p.operand == 3 ? 512 : 256;
  int64_t tiles = 1;  // a plan without taps still gets a pointer
  for (int i = 0; i < p.kinds; ++i) {
    const int64_t units = static_cast<int64_t>(p.groups) * p.chunks * p.slices;
    const int64_t end = p.kind[i].weights + units * p.kind[i].slice_tiles;
    if (end > tiles) tiles = end;
  }
  return tiles * tile_bytes;
}

cudaError_t mma_pack(const MmaPlan& plan, const void* weight, void* packed, cudaStream_t stream) {
#define UPCONV_TRY(index, name)                                                             \
  if constexpr (is_here(index)) {                                                           \
    if (plan.params.operand == index) return mma_pack_##name(plan, weight, packed, stream); \
  }
  UPCONV_OPERANDS(UPCONV_TRY)
#undef UPCONV_TRY
  return cudaErrorInvalidConfiguration;
}

cudaError_t mma_fprop(const MmaParams& planned, cudaStream_t stream) {
  MmaParams params = planned;
  // Inputs at odd storage offsets are read pixel by pixel.
  const int group = params.copy * element_bytes(params);
  if (reinterpret_cast<uintptr_t>(params.x) % group != 0) read_by(1, &params);
#define UPCONV_TRY(index, name)                                           \
  if constexpr (is_here(index)) {                                         \
    if (params.operand == index) return mma_fprop_##name(params, stream); \
  }
  UPCONV_OPERANDS(UPCONV_TRY)
#undef UPCONV_TRY
  return cudaErrorInvalidConfiguration;
}

}  // namespace upconv
