// The wrappers of csrc/cuda/ptx.cuh and wgmma.cuh, on a CPU.
#pragma once

#include "device.h"

namespace upconv {

extern unsigned char memory[];
constexpr uint32_t kMemoryBytes = 227 * 1024;

namespace ptx {

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};
inline float widened(BFloat16 v) { return float_of(uint32_t{v.bits} << 16); }
inline float widened(Float16 v) { return __half2float({v.bits}); }
inline BFloat16 to_bfloat16(float v) { return {__float2bfloat16(v).bits}; }
inline Float16 to_float16(float v) { return {__float2half_rn(v).bits}; }
inline uint32_t bounded_halves(uint32_t v, uint32_t low, uint32_t high) {
  const auto bound = [&](int shift) {
    const auto half = [&](uint32_t of) { return widened(Float16{uint16_t(of >> shift)}); };
    const float most = std::fmin(half(v), half(high));  // the number where one is NaN
    return uint32_t{to_float16(std::fmax(most, half(low))).bits} << shift;
  };
  return bound(0) | bound(16);
}
inline uint32_t to_halves(float low, float high) {
  return to_float16(low).bits | static_cast<uint32_t>(to_float16(high).bits) << 16;
}
inline uint32_t to_bfloat16s(float low, float high) {
  return to_bfloat16(low).bits | static_cast<uint32_t>(to_bfloat16(high).bits) << 16;
}

inline uint32_t most_of_four(uint32_t v) {
  static uint32_t shown[1024];
  shown[threadIdx.x] = v;
  __syncwarp();
  const uint32_t* of = shown + threadIdx.x / 4 * 4;
  v = max(max(of[0], of[1]), max(of[2], of[3]));
  __syncwarp();
  return v;
}

// Shared addresses are offsets, from 1024 on: 0 would hide a mistake.
constexpr uint32_t kBase = 1024;
inline unsigned char* shared_pointer(uint32_t address, uint32_t bytes) {
  if (address < kBase || address + bytes > kBase + kMemoryBytes) fail("outside shared memory");
  if (address % bytes && bytes <= 16) fail("shared memory, not aligned");
  return memory + (address - kBase);
}
inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(static_cast<const unsigned char*>(pointer) - memory) + kBase;
}

struct Barrier {
  uint32_t arrivals = 0, pending = 0;
  int64_t bytes = 0;
  uint64_t phase = 0;
  void settle() {
    if (pending || bytes) return;
    pending = arrivals;
    ++phase;
  }
};
extern std::map<uint32_t, Barrier> barriers;

inline void barrier_init(uint32_t at, uint32_t arrivals) {
  barriers[at] = {};
  barriers[at].arrivals = barriers[at].pending = arrivals;
}
inline void barrier_init_fence() {}
inline void barrier_arrive(uint32_t at) {
  Barrier& barrier = barriers.at(at);
  if (barrier.pending == 0) fail("more arrivals than a barrier waits for");
  --barrier.pending;
  barrier.settle();
}
inline void barrier_arrive_if(bool on, uint32_t at) {
  if (on) barrier_arrive(at);
}
inline void barrier_arrive_expect(uint32_t at, uint32_t bytes) {
  barriers.at(at).bytes += bytes;
  barrier_arrive(at);
}
inline bool passed(uint32_t at, uint32_t parity) {
  next_fiber();
  return (barriers.at(at).phase - 1) % 2 == parity;
}
// The threads of a warp test together and get one answer; the feeder is a thread by itself.
inline bool barrier_test(uint32_t at, uint32_t parity) {
  const bool mine = passed(at, parity);
  return threadIdx.x / 32 == 3 ? mine : warp_agrees(mine);
}
inline void barrier_wait(uint32_t at, uint32_t parity) {
  while (!passed(at, parity)) {
  }
}
inline void complete(uint32_t at, uint32_t bytes) {
  barriers.at(at).bytes -= bytes;
  barriers.at(at).settle();
}

inline void bulk_copy(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
  check_global(from, bytes, false);
  std::memcpy(shared_pointer(to, bytes), from, bytes);
  complete(barrier, bytes);
}
template <int kBytes>
void copy_async(uint32_t to, const void* from, int valid) {
  if (valid) check_global(from, valid, false);
  if (valid && reinterpret_cast<uintptr_t>(from) % kBytes) fail("an unaligned copy");
  unsigned char* target = shared_pointer(to, kBytes);
  std::memset(target, 0, kBytes);
  if (valid) std::memcpy(target, from, valid);
}
inline void copy_async_commit() {}
inline void copy_async_arrive(uint32_t at) { barrier_arrive(at); }
template <int kPending>
void copy_async_wait() {}

void box_copy(uint32_t to, const CUtensorMap& map, int c0, int c1, int c2, int c3, int c4,
              uint32_t barrier);

template <typename T>
void load_shared(T& v, uint32_t at) {
  std::memcpy(&v, shared_pointer(at, sizeof(T)), sizeof(T));
}
inline void load_shared(float& first, float& second, uint32_t at) {
  uint2 both;
  load_shared(both, at);
  first = float_of(both.x), second = float_of(both.y);
}
template <typename T>
void store_shared(uint32_t at, T v) {
  std::memcpy(shared_pointer(at, sizeof(T)), &v, sizeof(T));
}
inline void store_shared_if(bool on, uint32_t at, uint4 v) {
  if (on) store_shared(at, v);
}
inline void fence_async_proxy() {}
inline bool elected() { return threadIdx.x % 32 == 0; }

template <typename T>
inline T pinned(T value) {
  return value;
}
inline uint32_t round_to_tf32(uint32_t bits) {
  return std::min((bits & 0x7fffffffu) + 0x1000u, 0x7fffffffu) | (bits & 0x80000000u);
}
inline uint32_t nearly_tf32(uint32_t bits) {
  return bits_of(float_of(bits) * (1.f + 0x1p-11f * 0.72f));
}
template <int>
void give_registers() {}
template <int>
void take_registers() {}
inline int this_thread() { return static_cast<int>(threadIdx.x); }
template <typename T>
inline T* computed_here(T* pointer) {
  return pointer;
}
inline uint32_t computed_here(uint32_t value) { return value; }
inline void warpgroup_sync(int) { meet(static_cast<int>(threadIdx.x) / 128 * 128, 128); }
inline void warp_pair_sync(int id) { meet(id, 64); }
inline void wgmma_fence() { warpgroup_sync(0); }  // the four warps of a warpgroup issue together
// A WGMMA is the four warps' together: it is over for one when it is over for all of them.
inline void wgmma_commit() { warpgroup_sync(0); }
template <int>
void wgmma_wait() {}
inline float unknown(float value) { return value; }
inline void keep_after_wait(float&) {}

}  // namespace ptx

struct Tf32;
struct Fp16;
struct Split;

// A sum as the tensor core keeps it: what does not fit is cut off.
inline float truncated(double sum) {
  const float nearest = static_cast<float>(sum);
  const bool above = std::isfinite(nearest) && std::fabs(nearest) > std::fabs(sum);
  return above ? std::nextafterf(nearest, 0.f) : nearest;
}

// d[64 x N] += A[64 x K] * B[N x K]^T: this thread's part, which is two rows of each 8 columns.
template <typename Operand, int N>
struct Product {
  static constexpr bool kHalves = std::is_same_v<Operand, Fp16> || std::is_same_v<Operand, Split>;
  static constexpr int kBytes = std::is_same_v<Operand, Tf32> ? 4 : 2, kBlock = 16 / kBytes;

  static float number(uint32_t bits) {
    if (kHalves) return ptx::widened(ptx::Float16{static_cast<uint16_t>(bits)});
    return float_of(kBytes == 2 ? bits << 16 : bits & 0xffffe000);
  }
  static float read(uint64_t descriptor, int row, int k) {
    const uint32_t low = static_cast<uint32_t>(descriptor);
    const uint32_t rows = static_cast<uint32_t>(descriptor >> 32 & 0x3fff) << 4;
    const uint32_t mode = descriptor >> 62, span = mode ? 256 >> mode : 16;
    const uint32_t next = mode ? 16 : low >> 16 << 4;  // the next 16 bytes along K
    const uint32_t at = ((low & 0x3fff) << 4) + row / 8 * rows + row % 8 * span +
                        k / kBlock * next + k % kBlock * kBytes;
    const unsigned char* from = ptx::shared_pointer(swizzled(at, span), kBytes);
    uint32_t bits = 0;
    std::memcpy(&bits, from, kBytes);
    return number(bits);
  }
  static void add(float (&d)[N / 2], const float (&left)[2][2 * kBlock], uint64_t b) {
    const int lane = threadIdx.x % 32;
    for (int column = 0; column < N / 4; ++column) {
      const int n = column / 2 * 8 + lane % 4 * 2 + column % 2;
      double sum[2] = {};
      for (int k = 0; k < 2 * kBlock; ++k) {
        const float right = read(b, n, k);
        for (int half = 0; half < 2; ++half)
          sum[half] += static_cast<double>(left[half][k]) * right;
      }
      for (int half = 0; half < 2; ++half) {
        float& to = d[column / 2 * 4 + half * 2 + column % 2];
        to = truncated(to + sum[half]);
      }
    }
  }
};

template <typename Operand, int N>
struct Wgmma : Product<Operand, N> {
  using Base = Product<Operand, N>;
  static void run(float (&d)[N / 2], uint64_t a, uint64_t b, bool adds = true) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
    if (!adds) std::fill(d, d + N / 2, 0.f);
    float left[2][2 * Base::kBlock];
    for (int half = 0; half < 2; ++half)
      for (int k = 0; k < 2 * Base::kBlock; ++k)
        left[half][k] = Base::read(a, warp * 16 + lane / 4 + 8 * half, k);
    Base::add(d, left, b);
  }
};

// The same with A from registers, which the four threads of a row hold together.
template <typename Operand, int N>
struct WgmmaRegisters : Product<Operand, N> {
  using Base = Product<Operand, N>;
  static void run(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b, bool adds = true) {
    static uint32_t shown[1024][4];
    if (!adds) std::fill(d, d + N / 2, 0.f);
    std::copy(a, a + 4, shown[threadIdx.x]);
    __syncwarp();
    constexpr int kEach = 4 / Base::kBytes;  // numbers of a register
    float left[2][2 * Base::kBlock];
    for (int half = 0; half < 2; ++half)
      for (int k = 0; k < 2 * Base::kBlock; ++k) {
        const uint32_t* of = shown[threadIdx.x / 4 * 4 + k % Base::kBlock / kEach];
        const uint32_t bits = of[half + k / Base::kBlock * 2] >> k % kEach * 16;
        left[half][k] = Base::number(Base::kBytes == 2 ? bits & 0xffff : bits);
      }
    __syncwarp();
    Base::add(d, left, b);
  }
};

}  // namespace upconv
