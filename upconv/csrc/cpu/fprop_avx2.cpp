// The forward kernel for AVX2 with FMA: 16 registers of 8 floats.
#if defined(__x86_64__)

#include <immintrin.h>
#include <string.h>

#include "fprop_job.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif

#define UPCONV_ISA avx2
#define UPCONV_VECTOR_BYTES 32
#define UPCONV_REGISTERS 16
#define UPCONV_F16C
#include "fprop_kernel.h"

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

namespace upconv {
const Kernels& avx2_kernels(bool is_double) { return is_double ? avx2::kDouble : avx2::kFloat; }
}  // namespace upconv

#endif
