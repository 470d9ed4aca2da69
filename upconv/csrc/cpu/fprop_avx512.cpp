// The forward kernel for AVX-512: 32 registers of 16 floats.
#if defined(__x86_64__)

#include <immintrin.h>
#include <string.h>

#include "fprop_job.h"

#if defined(__clang__)
#pragma clang attribute push(                                                    \
    __attribute__((target("avx512f,avx512vl,avx512dq,avx512bw,avx2,fma,f16c"))), \
    apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512vl,avx512dq,avx512bw,avx2,fma,f16c")
#endif

#define UPCONV_ISA avx512
#define UPCONV_VECTOR_BYTES 64
#define UPCONV_REGISTERS 32
#define UPCONV_F16C
#include "fprop_kernel.h"

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

namespace upconv {
const Kernels& avx512_kernels(bool is_double) {
  return is_double ? avx512::kDouble : avx512::kFloat;
}
}  // namespace upconv

#endif
