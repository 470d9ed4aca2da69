// The forward kernel on mma.sync for few output channels: the last layers of generators, vocoders
// and networks for super-resolution.
//
// Few output channels leave most of a product empty, and reading the input once for each tap costs
// more than the products. Here the rows of the product are neighbouring pixels, its columns output
// channels x phases of depth and height x all taps of the width, and K is input channels x shifted
// rows: no pixel is read at a second column, so that pixels are operands as they lie in the
// contiguous layout. What the taps of the width have to say to an output is added up behind the
// products, through shared memory: out[b * stride + phase] is the sum over the phase's taps of
// column (sum, tap) at pixel b + shift.
//
// Pipeline: boxes of some channels (input rows x columns with margins, zeros outside) come into
// slots. By TMA where rows begin on 16 bytes (float32 arrives rounded): every warp waits for a box
// and hands its slot back by itself, and the warps take turns to have a slot filled again; with one
// warp for that, and a barrier of the block for each box, all waited for its 100 instructions (24 %
// of the time). Else by cp.async, with one __syncthreads a box. Each warp multiplies one row of
// places; its sums are its own, so that adding up needs no barrier. A block walks through the units
// of one group.
#pragma once

#include <type_traits>

#include "gather_stage.cuh"
#include "overlap_params.h"

// Older GPUs have no TMA; plans for them have no boxes.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define UPCONV_OVERLAP_TMA 1
#else
#define UPCONV_OVERLAP_TMA 0
#endif

namespace upconv::overlap {

using gather::Fragment;
using gather::Row;
using gather::Source;
using gather::split_off;

template <typename Operand>
constexpr int kBytes = sizeof(typename Operand::Element);

template <typename Operand>
constexpr int kStep = Operand::kStep;  // channels of a product

// --- Shared memory ---------------------------------------------------------------------------

// An output row of a warp: where it lies in the output (-1: nowhere), where its sums do, in bytes
// (-1: it has none).
struct alignas(16) OutputRow {
  int offset, sums;
  float bias;
  int unused;
};

// A shift and a step of K as the products see them: bytes into the box, and which tiles of 8
// columns they concern.
struct BoxStep {
  int offset, tiles;
};

// [boxes][weights][sums of each warp][output rows of each warp][steps][rows of boxes][barriers].
struct Shared {
  unsigned char *boxes, *weights;
  float* sums;         // of this warp
  OutputRow* outputs;  // of this warp
  BoxStep* steps;
  Row* lines;         // none where the TMA brings the boxes
  uint32_t barriers;  // of each slot: it is full, it is empty

  __device__ Shared(const OverlapParams& p, unsigned char* memory) {
    const int warp = threadIdx.x / 32;
    boxes = memory;
    weights = boxes + p.stages * p.box_bytes;
    float* const all = reinterpret_cast<float*>(weights + p.weight_bytes);
    sums = all + warp * p.sum_rows * p.sum_pitch;
    OutputRow* const rows = reinterpret_cast<OutputRow*>(all + p.warps * p.sum_rows * p.sum_pitch);
    outputs = rows + warp * p.sums;
    steps = reinterpret_cast<BoxStep*>(rows + p.warps * p.sums);
    lines = reinterpret_cast<Row*>(steps + p.shifts * p.steps);
    barriers = mma_ptx::shared_address(memory) + p.shared_bytes - 16 * p.stages;
  }

  __device__ __forceinline__ uint32_t full(int slot) const { return barriers + 16 * slot; }
  __device__ __forceinline__ uint32_t empty(int slot) const { return barriers + 16 * slot + 8; }
};

// --- Units -----------------------------------------------------------------------------------

// Places of one image: some rows, and the columns of a block.
struct Unit {
  int image, z, y, tile;  // the first row of places, counted from the first of all

  __device__ Unit(const OverlapParams& p, int index) {
    tile = split_off(index, p.by_tiles_x, p.tiles_x);
    y = split_off(index, p.by_units_y, p.units_y) * p.rows;
    z = split_off(index, p.by_count_z, p.count_z);
    image = index;
  }

  __device__ __forceinline__ void advance(const OverlapParams& p) {
    if (++tile < p.tiles_x) return;
    tile = 0;
    y += p.rows;
    if (y < p.count_y) return;
    y = 0;
    if (++z < p.count_z) return;
    z = 0;
    ++image;
  }

  // The first input column of a block.
  __device__ __forceinline__ int column(const OverlapParams& p) const {
    return p.first_x + tile * p.warps_x * p.valid;
  }
};

// Which row of places and which columns a warp has in its block's unit.
struct Warp {
  int y, x;

  __device__ explicit Warp(const OverlapParams& p) {
    int column = threadIdx.x / 32;
    x = split_off(column, p.by_warps_x, p.warps_x);
    y = column;
  }
};

// --- Set-up ----------------------------------------------------------------------------------

// Rows of a box: channels next to each other, so that a product's K lies one pitch apart.
__device__ __forceinline__ void list_box(const OverlapParams& p, Row* lines) {
  const int total = p.planes * p.box_rows * p.channels, shift = 31 - __clz(p.channels);
  for (int i = threadIdx.x; i < total; i += blockDim.x) {
    int z = i >> shift;
    const int y = split_off(z, p.by_rows, p.box_rows), channel = i & (p.channels - 1);
    lines[i].offset = static_cast<int>(channel * p.in_plane + (z * p.in_h + y) * p.in_w);
    lines[i].z = static_cast<short>(z);
    lines[i].y = static_cast<short>(y);
  }
}

template <typename Operand>
__device__ __forceinline__ void list_steps(const OverlapParams& p, const Shared& shared) {
  const int channel_bytes = p.pitch * kBytes<Operand>, shift = 31 - __clz(p.steps);
  for (int i = threadIdx.x; i < p.shifts << shift; i += blockDim.x) {
    const OverlapShift& at = p.shift[i >> shift];
    const int line = (at.z - p.low_z) * p.box_rows + at.y - p.low_y;
    const int channel = (i & (p.steps - 1)) * kStep<Operand>;
    shared.steps[i] = {(line * p.channels + channel) * channel_bytes, at.tiles};
  }
}

__device__ __forceinline__ void load_weights(const OverlapParams& p, const Shared& shared,
                                             int group) {
  const unsigned char* const from =
      static_cast<const unsigned char*>(p.w) + static_cast<int64_t>(group) * p.weight_bytes;
  const uint32_t to = mma_ptx::shared_address(shared.weights);
  for (int at = threadIdx.x * 16; at < p.weight_bytes; at += blockDim.x * 16) {
    mma_ptx::copy_async16(to + at, from + at);
  }
}

// --- Boxes -----------------------------------------------------------------------------------

// The TMA has the input as columns, channels of a group, rows, planes, groups of all images.
template <bool kBoxes, typename Operand>
__device__ __forceinline__ void load_box(const OverlapParams& p, const OverlapBoxes& boxes,
                                         const Shared& shared, int group, const Unit& unit,
                                         int chunk, int slot) {
  using Element = typename Operand::Element;
  const int first = chunk * p.channels, z = unit.z + p.first_z + p.low_z;
  const int x = unit.column(p), y = unit.y + p.first_y + p.low_y;
  unsigned char* const box = shared.boxes + slot * p.box_bytes;
  if constexpr (kBoxes) {
#if UPCONV_OVERLAP_TMA
    if (threadIdx.x % 32 != 0) return;
    const uint32_t barrier = shared.full(slot);
    mma_ptx::barrier_arrive_expect(barrier,
                                   p.box_rows * p.planes * p.channels * p.pitch * kBytes<Operand>);
    mma_ptx::tensor_copy(mma_ptx::shared_address(box), &boxes, x, first, y, z,
                         unit.image * p.groups + group, barrier);
#endif
  } else {
    const int64_t all = static_cast<int64_t>(p.groups) * p.in_channels * p.in_plane;
    const int64_t before = (static_cast<int64_t>(group) * p.in_channels + first) * p.in_plane;
    const Source<Element> source{static_cast<const Element*>(p.x) + before, all, p.in_d, p.in_h,
                                 p.in_w};
    const gather::Channels channels{p.channels - 1, p.in_channels - first};
    gather::stage(source, shared.lines, p.planes * p.box_rows * p.channels, unit.image, z, y, x,
                  p.box_columns, p.vector, box, p.pitch * kBytes<Operand>, channels);
    mma_ptx::copy_async_commit();
  }
}

// Which slot a loop over boxes is at, and how often it has been there.
struct Slot {
  int index = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void advance(const OverlapParams& p) {
    if (++index == p.stages) index = 0, parity ^= 1;
  }
};

// Until a box has come; by copies also: for all, and until nobody reads the one before.
template <bool kBoxes>
__device__ __forceinline__ void wait_for_box(const OverlapParams& p, const Shared& shared,
                                             const Slot& slot) {
  if constexpr (kBoxes) {
#if UPCONV_OVERLAP_TMA
    mma_ptx::barrier_wait(shared.full(slot.index), slot.parity);
#endif
  } else {
    if (p.stages == 2) {
      mma_ptx::copy_async_wait<0>();
    } else {
      mma_ptx::copy_async_wait<1>();
    }
    __syncthreads();
  }
}

// This warp has read a box.
template <bool kBoxes>
__device__ __forceinline__ void hand_back(const Shared& shared, const Slot& slot) {
#if UPCONV_OVERLAP_TMA
  if constexpr (kBoxes) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) mma_ptx::barrier_arrive(shared.empty(slot.index));
  }
#endif
}

// --- Multiply --------------------------------------------------------------------------------

// Where this lane reads a warp's pixels in a box, for the first channel of its K and the first
// shift. 4-byte pixels: two neighbours, which are rows g and g + 8 of the product; 16-bit pixels:
// the row of 8 pixels whose address it gives for a transposed load.
template <typename Operand>
__device__ __forceinline__ int lane_place(const OverlapParams& p, const Warp& warp) {
  const int lane = threadIdx.x % 32;
  const bool wide = kBytes<Operand> == 4;
  const int channel = wide ? lane % 4 : lane / 16 * 8 + lane % 8;
  const int pixel = wide ? lane / 4 * 2 : lane / 8 % 2 * 8;
  return ((warp.y * p.channels + channel) * p.pitch + warp.x * p.valid + pixel) * kBytes<Operand>;
}

// The rows of one step of K: 16 pixels.
template <typename Operand>
__device__ __forceinline__ void load_pixels(uint32_t from, uint32_t channel_bytes,
                                            uint32_t (&a)[4]) {
  if constexpr (kBytes<Operand> == 4) {
    uint32_t low[2], high[2];
    mma_ptx::load_shared(from, low);
    mma_ptx::load_shared(from + 4 * channel_bytes, high);
    a[0] = low[0], a[1] = low[1], a[2] = high[0], a[3] = high[1];
  } else {
    mma_ptx::load_matrices_transposed(from, a);
  }
}

// One step of K for all pixels of a warp. `kAll`: every tile of columns has a tap there.
template <typename Operand, bool kRounded, bool kAll, int kM, int kN>
__device__ __forceinline__ void multiply_step(uint32_t from, uint32_t channel_bytes,
                                              uint32_t weights, int tiles,
                                              float (&sums)[kM][kN][4]) {
  constexpr bool kReady = kRounded && !Operand::kSplit;
  typename std::conditional_t<kReady, Fragment<4>, typename Operand::template Prepared<4>> a[kM];
#pragma unroll
  for (int m = 0; m < kM; ++m) {
    uint32_t read[4];
    load_pixels<Operand>(from + m * 16 * kBytes<Operand>, channel_bytes, read);
    if constexpr (kReady) {
#pragma unroll
      for (int i = 0; i < 4; ++i) a[m].words[i] = read[i];
    } else {
      a[m] = Operand::prepared(read);
    }
  }
#pragma unroll
  for (int n = 0; n < kN; ++n) {
    if (!kAll && !(tiles >> n & 1)) continue;
    uint32_t words[2];
    mma_ptx::load_shared(weights + n * 256, words);
    const auto b = gather::packed<Operand>(words);
#pragma unroll
    for (int m = 0; m < kM; ++m) Operand::multiply(sums[m][n], a[m], b);
  }
}

// The steps of a box from `begin` to `end`.
template <typename Operand, bool kRounded, bool kAll, int kM, int kN>
__device__ __forceinline__ void multiply_steps(const BoxStep* steps, int begin, int end,
                                               uint32_t box, uint32_t channel_bytes,
                                               uint32_t weights, float (&sums)[kM][kN][4]) {
  weights += begin * kN * 256;
#pragma unroll 1
  for (int i = begin; i < end; ++i, weights += kN * 256) {
    const BoxStep step = steps[i];
    multiply_step<Operand, kRounded, kAll, kM, kN>(box + step.offset, channel_bytes, weights,
                                                   step.tiles, sums);
  }
}

// --- Add up and store ------------------------------------------------------------------------

// Columns of the product from `begin` to `end` as rows of pixels.
template <typename Operand, int kM, int kN>
__device__ __forceinline__ void lay_down(const OverlapParams& p, int begin, int end, float* to,
                                         const float (&sums)[kM][kN][4]) {
  const int lane = threadIdx.x % 32;
  to += lane / 4 * (kBytes<Operand> == 4 ? 2 : 1);
#pragma unroll
  for (int i = 0; i < 2 * kN; ++i) {
    const int n = i / 2, e = i % 2, column = n * 8 + lane % 4 * 2 + e;
    if (column < begin || column >= end) continue;
    float* const at = to + (column - begin) * p.sum_pitch;
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      if constexpr (kBytes<Operand> == 4) {
        *reinterpret_cast<float2*>(at + 16 * m) = make_float2(sums[m][n][e], sums[m][n][e + 2]);
      } else {
        at[16 * m] = sums[m][n][e];
        at[16 * m + 8] = sums[m][n][e + 2];
      }
    }
  }
}

// The output rows of this warp's row of places: one for each sum.
template <typename Operand>
__device__ __forceinline__ void list_outputs(const OverlapParams& p, const Shared& shared,
                                             int group, const Unit& unit, int row) {
  using Element = typename Operand::Element;
  for (int i = threadIdx.x % 32; i < p.sums; i += 32) {
    const OverlapSum& sum = p.sum[i];
    const int z = (unit.z + p.first_z) * p.stride_z + sum.z - p.padding_z;
    const int y = (row + p.first_y) * p.stride_y + sum.y - p.padding_y;
    const bool exists = row < p.count_y && z >= 0 && z < p.out_d && y >= 0 && y < p.out_h;
    OutputRow at{-1, sum.line < 0 ? -1 : sum.line * p.sum_pitch, 0.f, 0};
    if (exists) {
      at.offset = static_cast<int>(sum.channel * p.out_plane + (z * p.out_h + y) * p.out_w);
    }
    if (p.bias != nullptr) {
      at.bias = Operand::to_float(
          static_cast<const Element*>(p.bias)[group * p.out_channels + sum.channel]);
    }
    shared.outputs[i] = at;
  }
}

// What the taps of a phase of the width have for an output, added to `sum`. With kTaps a phase has
// so many or one less, else any number.
template <int kTaps>
__device__ __forceinline__ float added(const float* at, int tap_pitch, int taps, float sum) {
  if constexpr (kTaps > 0) {
#pragma unroll
    for (int tap = 0; tap < kTaps; ++tap) {
      if (tap < kTaps - 1 || taps == kTaps) sum += at[tap * tap_pitch];
    }
  } else {
    for (int tap = 0; tap < taps; ++tap) sum += at[tap * tap_pitch];
  }
  return sum;
}

template <typename Operand, int kCount>
__device__ __forceinline__ void store_outputs(typename Operand::Element* to,
                                              const float (&v)[kCount]) {
  using Element = typename Operand::Element;
  struct alignas(kCount * sizeof(Element)) Outputs {
    Element each[kCount];
  } outputs;
#pragma unroll
  for (int i = 0; i < kCount; ++i) outputs.each[i] = Operand::from_float(v[i]);
  *reinterpret_cast<Outputs*>(to) = outputs;
}

// Outputs of the sums from `begin` to `end`: a lane has all phases of a place, kVector at a time,
// so that which taps there are is the same for all lanes.
template <typename Operand, int kM, int kVector, int kTaps>
__device__ __forceinline__ void add_up(const OverlapParams& p, const Shared& shared, int place,
                                       int begin, int end, typename Operand::Element* image) {
  constexpr int kPlaces = kM / 2;  // of a lane, 32 apart
  const int lane = threadIdx.x % 32, tap_pitch = p.tap_pitch;
  const int first = (place + lane) * p.stride_x;
  for (int s = begin; s < end; ++s) {
    const OutputRow row = shared.outputs[s];
    if (row.offset < 0) continue;
    typename Operand::Element* const to = image + row.offset + first;
    const float* const from = shared.sums + row.sums + lane;
    for (int phase = 0; phase < p.stride_x; phase += kVector) {
      float sums[kPlaces][kVector];
#pragma unroll
      for (int e = 0; e < kVector; ++e) {
        const OverlapPhase& taps = p.phase[phase + e];
#pragma unroll
        for (int i = 0; i < kPlaces; ++i) {
          const float* const at = from + taps.place + 32 * i;
          sums[i][e] = row.sums < 0 ? row.bias : added<kTaps>(at, tap_pitch, taps.taps, row.bias);
        }
      }
#pragma unroll
      for (int i = 0; i < kPlaces; ++i) {
        const int column = first + 32 * i * p.stride_x + phase;
        if (place + lane + 32 * i >= 0 && lane + 32 * i < p.valid && column < p.out_w) {
          store_outputs<Operand, kVector>(to + (column - first), sums[i]);
        }
      }
    }
  }
}

template <typename Operand, int kM, int kVector>
__device__ __forceinline__ void add_up_by(const OverlapParams& p, const Shared& shared, int place,
                                          int begin, int end, typename Operand::Element* image) {
  switch (p.even_taps) {
    case 1:
      return add_up<Operand, kM, kVector, 1>(p, shared, place, begin, end, image);
    case 2:
      return add_up<Operand, kM, kVector, 2>(p, shared, place, begin, end, image);
    case 3:
      return add_up<Operand, kM, kVector, 3>(p, shared, place, begin, end, image);
    default:
      return add_up<Operand, kM, kVector, 0>(p, shared, place, begin, end, image);
  }
}

template <typename Operand, int kM, int kN>
__device__ __forceinline__ void store_unit(const OverlapParams& p, const Shared& shared, int group,
                                           const Unit& unit, const Warp& warp,
                                           float (&sums)[kM][kN][4]) {
  using Element = typename Operand::Element;
  const int place = unit.column(p) + warp.x * p.valid - p.low_x;  // the first
  const int64_t before = (static_cast<int64_t>(unit.image) * p.groups + group) * p.out_channels;
  Element* const image = static_cast<Element*>(p.y) + before * p.out_plane;
  list_outputs<Operand>(p, shared, group, unit, unit.y + warp.y);
  for (int begin = 0; begin < p.sums; begin += p.together) {
    const int end = min(begin + p.together, p.sums), column = p.sum[begin].column;
    if (column >= 0) {
      lay_down<Operand, kM, kN>(p, column, column + p.sum_rows, shared.sums, sums);
    }
    __syncwarp();
    switch (p.store) {
      case 4:
        add_up_by<Operand, kM, 4>(p, shared, place, begin, end, image);
        break;
      case 2:
        add_up_by<Operand, kM, 2>(p, shared, place, begin, end, image);
        break;
      default:
        add_up_by<Operand, kM, 1>(p, shared, place, begin, end, image);
    }
    __syncwarp();
  }
#pragma unroll
  for (int i = 0; i < kM * kN * 4; ++i) sums[i / (4 * kN)][i / 4 % kN][i % 4] = 0.f;
}

// --- Packing ---------------------------------------------------------------------------------

// The tap of a dimension that leads from a phase to a shift; -1: none.
__device__ __forceinline__ int tap_at(int phase, int shift, int stride, int dilation, Divider by,
                                      int kernel) {
  const int reach = phase - shift * stride;
  if (reach < 0) return -1;
  const int tap = by(reach);
  return tap * dilation == reach && tap < kernel ? tap : -1;
}

// Where the weights of a column of the product are for a shift, in those of an input channel; -1:
// nowhere.
__device__ __forceinline__ int place_of(const OverlapParams& p, const OverlapShift& at,
                                        int column) {
  int found = -1;
  for (int i = 0; i < p.sums; ++i) {
    const OverlapSum& sum = p.sum[i];
    const int tap = column - sum.column;
    if (sum.column < 0 || tap < 0 || tap >= p.kernel_x) continue;
    const int z = tap_at(sum.z, at.z, p.stride_z, p.dilation_z, p.by_dilation_z, p.kernel_z);
    const int y = tap_at(sum.y, at.y, p.stride_y, p.dilation_y, p.by_dilation_y, p.kernel_y);
    if (z < 0 || y < 0) continue;
    found = ((sum.channel * p.kernel_z + z) * p.kernel_y + y) * p.kernel_x + tap;
  }
  return found;
}

// The weights of each group as [box][shift][step of K][tile of 8 columns][lane][two registers]: a
// thread has a register, blockIdx.y is the group.
template <typename Operand>
__global__ void __launch_bounds__(kOverlapPackThreads)
    overlap_pack_kernel(const __grid_constant__ OverlapParams p, const void* weight, void* packed) {
  using Element = typename Operand::Element;
  constexpr int kPer = Operand::kPer;
  const int word = blockIdx.x * kOverlapPackThreads + threadIdx.x, lane = word >> 1 & 31;
  if (word * 4 >= p.weight_bytes) return;
  int step = word >> 6;
  const int tile = split_off(step, p.by_tiles_n, p.tiles_n);
  int shift = step >> (31 - __clz(p.steps));
  step &= p.steps - 1;
  int chunk = shift;
  shift = split_off(chunk, p.by_shifts, p.shifts);
  const int channel =
      chunk * p.channels + step * kStep<Operand> + ((word & 1) * 4 + (lane & 3)) * kPer;
  const int place = place_of(p, p.shift[shift], tile * 8 + lane / 4);
  const int each = p.out_channels * p.kernel_z * p.kernel_y * p.kernel_x;
  const Element* const from =
      static_cast<const Element*>(weight) + static_cast<int64_t>(blockIdx.y) * p.in_channels * each;
  Element read[kPer];
#pragma unroll
  for (int e = 0; e < kPer; ++e) {
    const bool exists = place >= 0 && channel + e < p.in_channels;
    read[e] = exists ? from[(channel + e) * each + place] : Operand::from_float(0.f);
  }
  uint32_t bits;
  if constexpr (kPer == 1) {
    bits = Operand::prepare(__float_as_uint(read[0]));
  } else {
    bits = static_cast<uint32_t>(reinterpret_cast<const uint16_t&>(read[1])) << 16 |
           reinterpret_cast<const uint16_t&>(read[0]);
  }
  static_cast<uint32_t*>(packed)[static_cast<int64_t>(blockIdx.y) * (p.weight_bytes / 4) + word] =
      bits;
}

// --- The kernel ------------------------------------------------------------------------------

template <typename Operand, bool kBoxes, int kM, int kN>
__global__ void __launch_bounds__(kOverlapThreads, 1)
    overlap_fprop_kernel(const __grid_constant__ OverlapParams p,
                         const __grid_constant__ OverlapBoxes boxes) {
  const Shared shared(p, shared_memory());
  int group = blockIdx.x;
  const int share = split_off(group, p.by_shares, p.shares);
  const int first = share * p.each + min(share, p.more), units = p.each + (share < p.more);
  if constexpr (kBoxes) {
#if UPCONV_OVERLAP_TMA
    if (threadIdx.x == 0) {
      for (int i = 0; i < p.stages; ++i) {
        mma_ptx::barrier_init(shared.full(i), 1);
        mma_ptx::barrier_init(shared.empty(i), p.warps);
      }
      mma_ptx::barrier_init_fence();
    }
#endif
  } else {
    list_box(p, shared.lines);
  }
  load_weights(p, shared, group);
  list_steps<Operand>(p, shared);
  __syncthreads();

  // Box `index`, into a slot that has been handed back as often as `slot` says. Of boxes by TMA
  // one warp has it brought, each in its turn.
  const int total = units * p.chunks;
  Unit next(p, first), now = next;
  int next_chunk = 0, turn = threadIdx.x / 32;
  const auto load = [&](int index, const Slot& slot, bool used) {
    const bool mine = !kBoxes || turn == 0;
    turn = turn == 0 ? p.warps - 1 : turn - 1;
    if (index >= total) {
      if (!kBoxes) mma_ptx::copy_async_commit();  // what is waited for are numbers of commits
      return;
    }
    if (mine) {
#if UPCONV_OVERLAP_TMA
      if (kBoxes && used) mma_ptx::barrier_wait(shared.empty(slot.index), slot.parity);
#endif
      load_box<kBoxes, Operand>(p, boxes, shared, group, next, next_chunk, slot.index);
    }
    if (++next_chunk == p.chunks) next_chunk = 0, next.advance(p);
  };
  Slot before;  // of the box before this one
  for (int i = 0; i < p.stages - 1; ++i, before.advance(p)) load(i, before, false);
  if constexpr (kBoxes) {  // else the weights belong to what the first box is waited for with
    mma_ptx::copy_async_commit();
    mma_ptx::copy_async_wait<0>();
    __syncthreads();
  }

  float sums[kM][kN][4] = {};
  const Warp warp(p);
  const uint32_t pixels = mma_ptx::shared_address(shared.boxes) + lane_place<Operand>(p, warp);
  const uint32_t weights = mma_ptx::shared_address(shared.weights) + threadIdx.x % 32 * 8;
  const uint32_t channel_bytes = p.pitch * kBytes<Operand>;
  const int steps = p.shifts * p.steps, steps_all = p.shifts_all * p.steps;
  int chunk = 0;
  before.parity = 1;  // its first turn fills a slot that nobody has had
  Slot slot;
  for (int index = 0; index < total; ++index, slot.advance(p)) {
    wait_for_box<kBoxes>(p, shared, slot);
    load(index + p.stages - 1, before, index > 0);
    before.advance(p);
    const uint32_t box = pixels + slot.index * p.box_bytes;
    const uint32_t packed = weights + chunk * steps * kN * 256;
    multiply_steps<Operand, kBoxes, true>(shared.steps, 0, steps_all, box, channel_bytes, packed,
                                          sums);
    multiply_steps<Operand, kBoxes, false>(shared.steps, steps_all, steps, box, channel_bytes,
                                           packed, sums);
    hand_back<kBoxes>(shared, slot);
    if (++chunk < p.chunks) continue;
    chunk = 0;
    store_unit<Operand, kM, kN>(p, shared, group, now, warp, sums);
    now.advance(p);
  }
}

}  // namespace upconv::overlap
