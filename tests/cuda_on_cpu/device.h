// As much of CUDA as the Hopper kernel uses, on a CPU: threads are fibers that take turns, an
// asynchronous copy is done when it is started, a WGMMA when it is issued. Every number is computed
// by the kernel's own code; what cannot be seen here is timing, and a wait that is missing.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <map>
#include <utility>
#include <vector>

#define __device__
#define __host__
#define __global__
#define __shared__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))

using std::max;
using std::min;

struct Index {
  unsigned x = 0, y = 0, z = 0;
};
struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
extern Index threadIdx, blockIdx;
extern dim3 blockDim, gridDim;

void next_fiber();                  // lets the others go on
void meet(int first, int threads);  // waits for all threads of a warp or block
bool warp_agrees(bool mine);        // one answer for all threads of a warp
void fail(const char* why);

inline void __syncwarp() { meet(static_cast<int>(threadIdx.x) / 32 * 32, 32); }
inline void __syncthreads() { meet(0, static_cast<int>(blockDim.x)); }

struct uint2 {
  uint32_t x, y;
};
struct float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
struct int2 {
  int x, y;
};
struct alignas(16) int4 {
  int x, y, z, w;
};
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
inline uint32_t atomicMax(uint32_t* at, uint32_t v) { return std::exchange(*at, max(*at, v)); }
inline uint32_t atomicMin(uint32_t* at, uint32_t v) { return std::exchange(*at, min(*at, v)); }
uint32_t warp_most(uint32_t mine);  // of all threads of a warp
inline uint32_t __reduce_max_sync(uint32_t, uint32_t v) { return warp_most(v); }
inline uint32_t __reduce_min_sync(uint32_t, uint32_t v) { return ~warp_most(~v); }
inline int __popc(uint32_t v) { return __builtin_popcount(v); }
inline int __clz(uint32_t v) { return v ? __builtin_clz(v) : 32; }
inline uint32_t __byte_perm(uint32_t low, uint32_t high, uint32_t pick) {
  const uint64_t both = static_cast<uint64_t>(high) << 32 | low;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) result |= (both >> (8 * (pick >> (4 * i) & 7)) & 0xff) << (8 * i);
  return result;
}
// Global memory is checked: a position outside the tensors is an error.
struct Tensor {
  const void* begin;
  size_t bytes;
  bool written;
};
void begin_run(const std::vector<Tensor>& tensors, uint64_t seed);
const char* end_run();  // what went wrong, or an empty text
void check_global(const void* address, size_t bytes, bool write);
template <typename T>
T __ldg(const T* address) {
  check_global(address, sizeof(T), false);
  return *address;
}
template <typename T>
void __stcs(T* address, T value) {
  check_global(address, sizeof(T), true);
  if (reinterpret_cast<uintptr_t>(address) % sizeof(T)) fail("a store is not aligned");
  *address = value;
}

inline float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
inline uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}
inline float __uint_as_float(uint32_t bits) { return float_of(bits); }
inline uint32_t __float_as_uint(float value) { return bits_of(value); }
inline double __hiloint2double(int high, int low) {
  const uint64_t bits = uint64_t{static_cast<uint32_t>(high)} << 32 | static_cast<uint32_t>(low);
  double value;
  std::memcpy(&value, &bits, 8);
  return value;
}
inline uint64_t bits_of(double value) {
  uint64_t bits;
  std::memcpy(&bits, &value, 8);
  return bits;
}
inline int __double2loint(double value) { return static_cast<int>(bits_of(value)); }
inline int __double2hiint(double value) { return static_cast<int>(bits_of(value) >> 32); }

// --- The host's side -------------------------------------------------------------------------

using cudaError_t = int;
using cudaStream_t = void*;
using CUresult = int;
using cuuint64_t = uint64_t;
using cuuint32_t = uint32_t;
enum { cudaSuccess = 0, CUDA_SUCCESS = 0, cudaErrorInvalidValue = 1 };
enum { cudaErrorNotSupported = 801, cudaErrorInvalidConfiguration = 9 };
enum { cudaFuncAttributeMaxDynamicSharedMemorySize, cudaEnableDefault };
using cudaDriverEntryPointQueryResult = int;
enum CUtensorMapDataType {
  CU_TENSOR_MAP_DATA_TYPE_UINT16,
  CU_TENSOR_MAP_DATA_TYPE_UINT32,
  CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
  CU_TENSOR_MAP_DATA_TYPE_TFLOAT32,
};
enum { CU_TENSOR_MAP_INTERLEAVE_NONE };
enum {
  CU_TENSOR_MAP_SWIZZLE_NONE,
  CU_TENSOR_MAP_SWIZZLE_32B,
  CU_TENSOR_MAP_SWIZZLE_64B,
  CU_TENSOR_MAP_SWIZZLE_128B
};
// Shared memory in rows of 128 bytes, of which 16 bytes each change places within `span` bytes.
inline uint32_t swizzled(uint32_t address, uint32_t span) {
  return span < 32 ? address : address ^ (address >> 7 & (span / 16 - 1)) << 4;
}
enum { CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE };

struct CUtensorMap {
  const unsigned char* base;
  int element, rank;
  bool rounds;    // to TF32
  uint32_t span;  // bytes within which it swizzles
  uint64_t size[5], stride[5];
  uint32_t box[5], step[5];
};
CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType type, uint32_t rank,
                                void* base, const cuuint64_t* sizes, const cuuint64_t* strides,
                                const cuuint32_t* box, const cuuint32_t* steps, int, int, int, int);
inline void cudaGetDriverEntryPointByVersion(const char*, void** found, int, int, int*) {
  *found = reinterpret_cast<void*>(&cuTensorMapEncodeTiled);
}
inline cudaError_t cudaGetLastError() { return cudaSuccess; }

void run_block(int threads, void (*body)(void*), void* argument);
// kernel<<<grid, threads>>>(arguments...)
template <typename... Parameters, typename... Arguments>
void launch(void (*kernel)(Parameters...), dim3 grid, int threads, const Arguments&... arguments) {
  gridDim = grid;
  blockDim = dim3(threads);
  auto call = [&] { kernel(arguments...); };
  for (unsigned i = 0; i < grid.x * grid.y * grid.z; ++i) {
    blockIdx = {i % grid.x, i / grid.x % grid.y, i / grid.x / grid.y};
    run_block(threads, [](void* f) { (*static_cast<decltype(call)*>(f))(); }, &call);
  }
}

// --- 16-bit numbers --------------------------------------------------------------------------

struct __nv_bfloat16 {
  uint16_t bits;
};
inline float __bfloat162float(__nv_bfloat16 v) { return float_of(uint32_t{v.bits} << 16); }
inline __nv_bfloat16 __float2bfloat16(float v) {
  const uint32_t bits = bits_of(v);
  return {static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}
struct __half {
  uint16_t bits;
};
inline float __half2float(__half v) {
  _Float16 value;
  std::memcpy(&value, &v.bits, 2);
  return static_cast<float>(value);
}
inline __half __float2half_rn(float v) {
  const auto value = static_cast<_Float16>(v);
  __half result;
  std::memcpy(&result.bits, &value, 2);
  return result;
}
