// Division by a number that is known before the launch, of one that is not negative: a
// multiplication and a shift, some 10 cycles. By a number that the compiler does not know it takes
// 120, one after the other for every part of a unit of work.
#pragma once

#include <cstdint>

#ifndef __CUDACC__
#define UPCONV_BOTH
#else
#define UPCONV_BOTH __host__ __device__ __forceinline__
#endif

namespace upconv {

struct Divider {
  uint32_t multiplier = 1u << 31;
  int shift = 31;

  Divider() = default;
  // 2^shift / by, rounded up: too large by less than by / 2^shift for each unit of the dividend,
  // which is less than 2^31, so that the sum is off by less than 1 / by.
  explicit Divider(int by) {
    int bits = 0;
    while ((int64_t{1} << bits) < by) ++bits;
    shift = 31 + bits;
    multiplier = static_cast<uint32_t>(((uint64_t{1} << shift) + by - 1) / by);
  }
  UPCONV_BOTH int operator()(int dividend) const {
    return static_cast<int>(static_cast<uint64_t>(static_cast<uint32_t>(dividend)) * multiplier >>
                            shift);
  }
};

}  // namespace upconv

#undef UPCONV_BOTH
