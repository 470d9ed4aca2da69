// The gradient of the input on mma.sync, for groups of few channels, few channels on either side
// and depthwise layers.
//
// gx[ci][pixel] is a sum over output channels and taps of w[ci][co][tap] * gy[co][place of (pixel,
// tap)]: a matrix product with pixels as rows, input channels as columns, and output channels and
// taps as K. A list tells for each of K how far its element lies from the pixel's own place in the
// box of grad_output: a register of the product is gathered by one load and one addition for each
// number, whatever stride and dilation are. Blocks keep the weights of their group in shared
// memory, in the order in which the products take them, and go from unit to unit.
#pragma once

#include "gather_stage.cuh"

namespace upconv::gather {

constexpr int kPixelTiles = kGatherPixels / 16;  // of 16 pixels: rows of the product
constexpr int kPlaces = 2 * kPixelTiles;         // pixels of a lane

// --- Set-up ----------------------------------------------------------------------------------

// Element `k` of the sum: output channel and tap.
struct SumPlace {
  int channel, z, y, x;

  __device__ SumPlace(const GatherParams& p, int k) {
    x = split_off(k, p.by_kernel_x, p.kernel_x);
    y = split_off(k, p.by_kernel_y, p.kernel_y);
    z = split_off(k, p.by_kernel_z, p.kernel_z);
    channel = k;
  }
};

// Where each of K lies in the box, from a pixel's place on. Past the last are the first once more:
// their weights are zero, and nothing but what the pixel meets anyway is multiplied by these.
template <typename Operand>
__device__ __forceinline__ void list_sum(const GatherParams& p, int sum, int padded, int* list) {
  for (int k = threadIdx.x; k < padded; k += blockDim.x) {
    const SumPlace at(p, k < sum ? k : 0);
    const int line = (at.channel * p.kernel_z + at.z) * p.gy_rows + at.y * p.gy_tap_rows;
    list[k] = (line * p.gy_pitch + at.x * p.dilation_x) *
              static_cast<int>(sizeof(typename Operand::Element));
  }
}

// The weights of a group as [tile of 8 input channels][step of K][lane][two registers]. Threads
// take neighbouring weights, several before the first one is written: a warp for each channel, and
// one load after the other, took 55 us for 512 channels of 8 weights.
template <typename Operand>
__device__ __forceinline__ void pack_weights(const GatherParams& p, int group, int sum, int padded,
                                             unsigned char* packed) {
  using Element = typename Operand::Element;
  constexpr int kTogether = 8;
  const Element* const weights =
      static_cast<const Element*>(p.other) + static_cast<int64_t>(group) * p.in_channels * sum;
  Element* const to = reinterpret_cast<Element*>(packed);
  const int total = p.in_block * padded;
  for (int first = threadIdx.x; first < total; first += kTogether * blockDim.x) {
    Element weight[kTogether];
    int place[kTogether];
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      int channel = first + i * blockDim.x;
      const int k = split_off(channel, p.by_padded, padded);
      const bool exists = k < sum && channel < p.in_channels;
      weight[i] = exists ? weights[channel * sum + k] : Operand::from_float(0.f);
      place[i] = channel / 8 * padded * 8 + channel % 8 * 4 * Operand::kPixels +
                 k / Operand::kStep * 32 * Operand::kPixels + k % Operand::kStep;
    }
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      if (first + i * blockDim.x >= total) break;
      if constexpr (sizeof(Element) == 4) {
        weight[i] = __uint_as_float(MmaTf32::prepare(__float_as_uint(weight[i])));
      }
      to[place[i]] = weight[i];
    }
  }
}

// --- Multiply --------------------------------------------------------------------------------

// The pixels of a lane within a unit: 4 neighbours, then 4 more 8 runs further on; or every eighth
// one, where strides would have the lanes' loads meet in a bank.
__device__ __forceinline__ int pixel_of(const GatherParams& p, int segment, int place) {
  const int run = threadIdx.x % 32 / 4, first = segment * kGatherPixels;
  return first + (p.run == 4 ? place / 4 * 32 + run * 4 + place % 4 : place * 8 + run);
}

template <typename Operand, int kN>
__device__ __forceinline__ void multiply_pixels(const uint32_t (&places)[kPlaces], uint32_t list,
                                                uint32_t packed, int steps,
                                                float (&sums)[kPixelTiles][kN][4]) {
  constexpr int kOffsets = Operand::kPixels;
  list += threadIdx.x % 4 * kOffsets * 4;
  uint32_t weights = packed + threadIdx.x % 32 * 8;
  uint32_t next[kOffsets];
  mma_ptx::load_shared(list, next);
#pragma unroll(kN <= 2 ? 2 : 1)
  for (int step = 0; step < steps; ++step, weights += 256) {
    uint32_t offsets[kOffsets];
#pragma unroll
    for (int i = 0; i < kOffsets; ++i) offsets[i] = next[i];
    list += kOffsets * 16;
    mma_ptx::load_shared(list, next);  // past the last: weights, which are not used as offsets
    Fragment<4> a[kPixelTiles];
#pragma unroll
    for (int m = 0; m < kPixelTiles; ++m) {
      uint32_t read[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t place = places[2 * m + i % 2];
        const int first = i / 2 * Operand::kPer;
        read[i] =
            gathered<Operand>(place + offsets[first], place + offsets[first + Operand::kPer - 1]);
      }
      a[m] = Operand::prepared(read);
    }
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      Fragment<2> b;  // prepared when they were packed
      mma_ptx::load_shared(weights + n * steps * 256, b.words);
#pragma unroll
      for (int m = 0; m < kPixelTiles; ++m) Operand::multiply(sums[m][n], a[m], b);
    }
  }
}

// --- Store -----------------------------------------------------------------------------------

__device__ __forceinline__ void store_four(float* to, const float (&v)[4]) {
  *reinterpret_cast<float4*>(to) = make_float4(v[0], v[1], v[2], v[3]);
}

template <typename Two>
__device__ __forceinline__ void store_pairs(void* to, Two low, Two high) {
  *reinterpret_cast<uint2*>(to) =
      make_uint2(reinterpret_cast<uint32_t&>(low), reinterpret_cast<uint32_t&>(high));
}

__device__ __forceinline__ void store_four(__nv_bfloat16* to, const float (&v)[4]) {
  store_pairs(to, __floats2bfloat162_rn(v[0], v[1]), __floats2bfloat162_rn(v[2], v[3]));
}

__device__ __forceinline__ void store_four(__half* to, const float (&v)[4]) {
  store_pairs(to, __floats2half2_rn(v[0], v[1]), __floats2half2_rn(v[2], v[3]));
}

// Input channels from `channel` on. `corner` is the unit's first pixel in the group's first
// channel.
template <typename Operand, int kN>
__device__ __forceinline__ void store_pixels(const GatherParams& p, const Unit& unit, int segment,
                                             int channel, int vector,
                                             typename Operand::Element* corner,
                                             const float (&sums)[kPixelTiles][kN][4]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int half = 0; half < kPlaces; half += 4) {
#pragma unroll
    for (int each = 0; each < 4; ++each) {
      if (vector && each) break;
      const int pixel = pixel_of(p, segment, half + each);
      const int row = static_cast<int>(__umulhi(pixel, p.inverse_columns));
      const int column = pixel - row * p.columns;
      if (row >= p.rows || unit.y + row >= p.in_h || unit.x + column >= p.in_w) continue;
      typename Operand::Element* const to = corner + static_cast<int64_t>(row) * p.in_w + column;
#pragma unroll
      for (int i = 0; i < 2 * kN; ++i) {
        const int in = channel + i / 2 * 8 + lane % 4 * 2 + i % 2;
        if (in >= p.in_channels) continue;
        typename Operand::Element* const place = to + in * p.in_plane;
        if (vector) {
          float four[4];
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const int at = half + j;
            four[j] = sums[at / 2][i / 2][at % 2 * 2 + i % 2];
          }
          store_four(place, four);
        } else {
          const int at = half + each;
          *place = Operand::from_float(sums[at / 2][i / 2][at % 2 * 2 + i % 2]);
        }
      }
    }
  }
}

// --- The kernel ------------------------------------------------------------------------------

template <typename Operand, int kN>
__global__ void __launch_bounds__(kGatherThreads, kN > 4 ? 1 : 2)
    gather_igrad_kernel(const __grid_constant__ GatherParams p) {
  using Element = typename Operand::Element;
  constexpr int kBytes = sizeof(Element);
  unsigned char* const memory = shared_memory();
  const GatherJob& job = p.job[0];
  int group = blockIdx.x;
  const int share = split_off(group, job.by_shares, job.shares);
  const int warp = threadIdx.x / 32, warps = blockDim.x / 32;

  const int sum = p.out_channels * p.kernel_z * p.kernel_y * p.kernel_x;
  const int steps = (sum + Operand::kStep - 1) / Operand::kStep, padded = steps * Operand::kStep;
  int* const list = reinterpret_cast<int*>(memory);
  unsigned char* const packed = memory + padded * 4;
  Row* const lines = reinterpret_cast<Row*>(packed + p.in_block * padded * kBytes);
  const int gy_lines = p.out_channels * p.kernel_z * p.gy_rows;
  list_rows(lines, p.out_channels, p.kernel_z, p.by_kernel_z, p.gy_rows, p.by_gy_rows,
            p.gy_plane_step, p.gy_row_step, p.out_plane, p.out_h, p.out_w);

  const int64_t all_out = static_cast<int64_t>(p.groups) * p.out_channels * p.out_plane;
  const Source<Element> outputs{static_cast<const Element*>(p.gy) +
                                    static_cast<int64_t>(group) * p.out_channels * p.out_plane,
                                all_out, p.out_d, p.out_h, p.out_w};
  const int skip = first_output(p, 0, 0) & (p.gy_vector / kBytes - 1);
  const int out_columns = (p.columns - 1) * p.stride_x + (p.kernel_x - 1) * p.dilation_x + 1;
  const auto load = [&](const Unit& unit, int slot) {
    stage(outputs, lines, gy_lines, unit.image, unit.z * p.stride_z + job.gy_z,
          unit.y * p.stride_y + job.gy_y, first_output(p, unit.x, 0), out_columns, p.gy_vector,
          memory + p.table_bytes + slot * p.gy_bytes, p.gy_pitch * kBytes);
  };

  const int segments = (p.rows * p.columns + kGatherPixels - 1) / kGatherPixels;
  const int vector =
      p.run == 4 && p.in_w % 4 == 0 && reinterpret_cast<uintptr_t>(p.result) % (4 * kBytes) == 0;
  const int units = job.by_shares(job.units + job.shares - 1);
  const int begin = min(share * units, job.units), end = min(begin + units, job.units);
  Unit next(p, job, begin), now = next;
  __syncthreads();
  for (int index = begin - 1; index < end; ++index) {
    if (index >= begin) wait_for_unit();
    if (index + 1 < end) load(next, (index + 1) & 1);
    next.advance(p, job);
    mma_ptx::copy_async_commit();
    if (index < begin) {  // the weights, while the first unit is on its way
      list_sum<Operand>(p, sum, padded, list);
      pack_weights<Operand>(p, group, sum, padded, packed);
      continue;
    }
    const uint32_t box = mma_ptx::shared_address(memory) + p.table_bytes + (index & 1) * p.gy_bytes;
    Element* const corner =
        static_cast<Element*>(p.result) +
        (static_cast<int64_t>(now.image) * p.groups + group) * p.in_channels * p.in_plane +
        (static_cast<int64_t>(now.z) * p.in_h + now.y) * p.in_w + now.x;
    for (int segment = warp; segment < segments; segment += warps) {
      uint32_t places[kPlaces];
#pragma unroll
      for (int i = 0; i < kPlaces; ++i) {
        const int pixel = pixel_of(p, segment, i);
        const int row = static_cast<int>(__umulhi(pixel, p.inverse_columns));
        const int column = pixel - row * p.columns;
        const int line = row * p.gy_row_advance * p.gy_pitch;
        // Past the last row nothing is stored; the box's first pixel stands in.
        places[i] = box + (row < p.rows ? line + column * p.stride_x + skip : 0) * kBytes;
      }
      for (int tile = 0; tile < p.in_block / 8; tile += kN) {
        float sums[kPixelTiles][kN][4];
#pragma unroll
        for (int i = 0; i < kPixelTiles * kN * 4; ++i) {
          sums[i / (4 * kN)][i / 4 % kN][i % 4] = 0.f;
        }
        const uint32_t weights = mma_ptx::shared_address(packed) + tile * 8 * padded * kBytes;
        multiply_pixels<Operand, kN>(places, mma_ptx::shared_address(list), weights, steps, sums);
        store_pixels<Operand, kN>(p, now, segment, tile * 8, vector, corner, sums);
      }
    }
    now.advance(p, job);
  }
}

}  // namespace upconv::gather
