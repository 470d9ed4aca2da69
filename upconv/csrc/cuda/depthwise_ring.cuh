// What the kernels for the gradients of depthwise layers share: the way of grad_output from memory
// into a thread's registers.
//
// Both kernels do a handful of instructions for an element, so that what counts is that enough of
// grad_output is on its way: 25 KB a multiprocessor at any time. Each thread copies its own columns
// into its own places of a ring in shared memory, several steps ahead, and reads them back itself:
// no barrier, no registers for what is on its way, zeros for what lies outside.
#pragma once

#include "depthwise_params.h"
#include "direct_work.cuh"
#include "ptx.cuh"

namespace upconv::direct {

constexpr int kOwn = kDepthwiseColumns;

// Steps on their way, the one that is read included.
template <typename T>
constexpr int kIgradStages = sizeof(T) == 4 ? 3 : 5;
template <typename T>
constexpr int kWgradStages = sizeof(T) == 4 ? 4 : 8;

// A thread's columns of one row, from global to shared memory: `columns` of them are inside the
// tensor, none where the row is not `there`. Where rows begin on `kBytes`, each such piece is
// inside or outside as a whole; where no bytes are copied, the address does not count.
template <int kBytes, typename T>
__device__ __forceinline__ void bring(const T* source, T* target, bool there, int columns) {
  if constexpr (kBytes < 4) {  // asynchronous copies are of 4 bytes at least
    Vector<T, kOwn> found;
#pragma unroll
    for (int j = 0; j < kOwn; ++j) found.at[j] = there && j < columns ? source[j] : narrow<T>(0.f);
    *reinterpret_cast<Vector<T, kOwn>*>(target) = found;
  } else {
    constexpr int kPiece = kBytes / static_cast<int>(sizeof(T));
    const uint32_t place = ptx::shared_address(target);
#pragma unroll
    for (int j = 0; j < kOwn; j += kPiece) {
      const bool inside = there && j < columns;
      ptx::copy_async<kBytes>(place + j * sizeof(T), source + j, inside ? kBytes : 0);
    }
  }
}

// So many rows, each `step` elements after the one before, into places `apart` elements apart.
template <int kRows, typename T>
__device__ __forceinline__ void bring_rows(int vector, const T* source, int64_t step, T* target,
                                           int apart, const bool (&inside)[kRows], int columns) {
  const auto each = [&](auto bytes) {
    const T* from = source;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      bring<decltype(bytes)::value>(from, target + i * apart, inside[i], columns);
      from += step;
    }
  };
  constexpr int kAll = kOwn * static_cast<int>(sizeof(T));
  if (vector >= kAll) {
    each(std::integral_constant<int, kAll>());
  } else if (vector >= kAll / 2) {
    each(std::integral_constant<int, kAll / 2>());
  } else {
    each(std::integral_constant<int, kAll / 4>());
  }
}

// A bfloat16 is the upper half of its float: an instruction for each of the two in a word.
template <typename T>
__device__ __forceinline__ void read_own(const T* place, float (&columns)[kOwn]) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    const auto found = *reinterpret_cast<const Vector<uint32_t, kOwn / 2>*>(place);
#pragma unroll
    for (int j = 0; j < kOwn; j += 2) {
      columns[j] = __uint_as_float(found.at[j / 2] << 16);
      columns[j + 1] = __uint_as_float(found.at[j / 2] & 0xffff0000u);
    }
  } else {
    const auto found = *reinterpret_cast<const Vector<T, kOwn>*>(place);
#pragma unroll
    for (int j = 0; j < kOwn; ++j) columns[j] = widen(found.at[j]);
  }
}

}  // namespace upconv::direct
