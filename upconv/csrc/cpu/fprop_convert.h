// Rows of tensors to and from the computing type, for one instruction set. Part of fprop_kernel.h,
// which see.

namespace upconv {
namespace UPCONV_ISA {

static inline float half_to_float(uint16_t bits) {
#if defined(__F16C__) || defined(UPCONV_F16C)
  return _cvtsh_ss(bits);
#else
  // Shift the exponent and the fraction into place and correct the exponent's bias by a product,
  // which also turns subnormal halves into normal floats; infinity and NaN keep a full exponent.
  union {
    uint32_t u;
    float f;
  } value = {static_cast<uint32_t>(bits & 0x7fff) << 13}, scale = {0x77800000u};
  value.f *= scale.f;
  if ((bits & 0x7c00) == 0x7c00) value.u |= 0x7f800000u;
  value.u |= static_cast<uint32_t>(bits & 0x8000) << 16;
  return value.f;
#endif
}

static inline uint16_t float_to_half(float number) {
#if defined(__F16C__) || defined(UPCONV_F16C)
  return static_cast<uint16_t>(_cvtss_sh(number, 0));
#else
  union {
    float f;
    uint32_t u;
  } value = {number};
  const uint32_t sign = value.u >> 16 & 0x8000;
  value.u &= 0x7fffffff;
  if (value.u >= 0x7f800000) return sign | (value.u > 0x7f800000 ? 0x7e00 : 0x7c00);
  if (value.u >= 0x477ff000) return sign | 0x7c00;  // rounds to 65536 or above
  if (value.u < 0x38800000) {                       // below 2^-14: let the adder round at 2^-24
    value.f += 0.5f;
    return sign | (value.u - 0x3f000000);
  }
  return sign | ((value.u + 0xc8000fff + (value.u >> 13 & 1)) >> 13);
#endif
}

static inline float bfloat_to_float(uint16_t bits) {
  union {
    uint32_t u;
    float f;
  } value = {static_cast<uint32_t>(bits) << 16};
  return value.f;
}

static inline uint16_t float_to_bfloat(float number) {
  union {
    float f;
    uint32_t u;
  } value = {number};
  const uint32_t rounded = (value.u + 0x7fff + (value.u >> 16 & 1)) >> 16;
  return (value.u & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded;
}

// `length` elements of a tensor from element `at`, as the computing type.
static void read_row(DType dtype, const void* from, int64_t at, float* to, int64_t length) {
  if (dtype == DType::f32) {
    memcpy(to, static_cast<const float*>(from) + at, length * sizeof(float));
  } else if (dtype == DType::bf16) {
    const uint16_t* source = static_cast<const uint16_t*>(from) + at;
    for (int64_t i = 0; i < length; ++i) to[i] = bfloat_to_float(source[i]);
  } else {
    const uint16_t* source = static_cast<const uint16_t*>(from) + at;
    for (int64_t i = 0; i < length; ++i) to[i] = half_to_float(source[i]);
  }
}
static void read_row(DType, const void* from, int64_t at, double* to, int64_t length) {
  memcpy(to, static_cast<const double*>(from) + at, length * sizeof(double));
}

static void write_row(DType dtype, const float* from, void* to, int64_t at, int64_t length) {
  uint16_t* target = static_cast<uint16_t*>(to) + at;
  if (dtype == DType::bf16)
    for (int64_t i = 0; i < length; ++i) target[i] = float_to_bfloat(from[i]);
  else
    for (int64_t i = 0; i < length; ++i) target[i] = float_to_half(from[i]);
}
static void write_row(DType, const double*, void*, int64_t, int64_t) {}

// Is none of the numbers from element `at` infinite or NaN? Those have an exponent of all ones, and
// one more in its lowest bit carries into the sign's place. Integers, which vectors take well: 0.1
// cycles a float.
template <class Bits>
static bool all_finite(const void* from, int64_t at, int64_t length, Bits exponent) {
  const Bits lowest = exponent & -exponent;
  Bits carried = 0;
  for (int64_t i = 0; i < length; ++i) {
    Bits number;
    memcpy(&number, static_cast<const char*>(from) + (at + i) * sizeof(Bits), sizeof(Bits));
    carried |= (number & exponent) + lowest;
  }
  return carried >> (8 * sizeof(Bits) - 1) == 0;
}

static bool all_finite(DType dtype, const void* from, int64_t at, int64_t length) {
  if (dtype == DType::f32) return all_finite<uint32_t>(from, at, length, 0x7f800000u);
  if (dtype == DType::f64) return all_finite<uint64_t>(from, at, length, 0x7ff0000000000000u);
  return all_finite<uint16_t>(from, at, length, dtype == DType::bf16 ? 0x7f80 : 0x7c00);
}

}  // namespace UPCONV_ISA
}  // namespace upconv
