// float16 as the kernels use it: three conversions.
#pragma once

#include "host_cuda.h"

struct __half {
  _Float16 value;
};

inline float __half2float(__half half) { return static_cast<float>(half.value); }
inline __half __float2half_rn(float value) { return {static_cast<_Float16>(value)}; }

struct __half2 {
  __half x, y;
};

inline __half2 __floats2half2_rn(float x, float y) {
  return {__float2half_rn(x), __float2half_rn(y)};
}
