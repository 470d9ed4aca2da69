// Runs CUDA kernels on the CPU, for tests: a block's threads are coroutines, barriers and warp-wide
// instructions are where they change. Slow and simple. Copies that a kernel starts happen when it
// waits for them, not before, so that a missing wait shows.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>
#include <ucontext.h>
#include <vector_functions.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#define __CUDA_ARCH__ EMULATED_ARCH
#undef __device__
#undef __global__
#undef __forceinline__
#undef __shared__
#undef __launch_bounds__
#undef __grid_constant__
#undef __align__
#define __device__
#define __global__
#define __forceinline__ inline
#define __shared__
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n)

using std::max;
using std::min;

namespace cpu {

struct Dim {
  unsigned x = 1, y = 1, z = 1;
};

// Where a warp or a block meets. The last one to arrive acts for all.
struct Meeting {
  int arrived = 0;
  uint64_t generation = 0;
};

struct Deposit {  // what a lane brings to a warp-wide instruction
  uint32_t address;
  uint32_t* out;
  float* d;
  const uint32_t* a;
  uint32_t b[2];
};

struct Copy {
  void* to;
  const void* from;
  size_t bytes;
};

struct Fiber {
  ucontext_t context;
  std::vector<char> stack = std::vector<char>(128 << 10);
  bool done = false;
  Dim thread;
  std::vector<Copy> open;                 // asynchronous copies since the last commit
  std::vector<std::vector<Copy>> groups;  // committed
};

inline Fiber* current;
inline ucontext_t scheduler;
inline Dim block_index, block_size;
inline std::vector<Meeting> warps;
inline std::vector<std::vector<Deposit>> deposits;
inline Meeting whole;
inline std::function<void()> body;
inline const char *input_begin, *input_end;  // what __ldg may read

inline void fail(const char* why) {
  std::fprintf(stderr, "emulated kernel: %s\n", why);
  std::abort();
}

inline void meet(Meeting& meeting, int count, const std::function<void()>& act) {
  const uint64_t generation = meeting.generation;
  if (++meeting.arrived == count) {
    act();
    meeting.arrived = 0;
    ++meeting.generation;
    return;
  }
  while (meeting.generation == generation) swapcontext(&current->context, &scheduler);
}

inline void finish(std::vector<Copy>& copies) {
  for (const Copy& copy : copies) std::memcpy(copy.to, copy.from, copy.bytes);
  copies.clear();
}

inline void entry() {
  body();
  current->done = true;
  swapcontext(&current->context, &scheduler);
}

// One block of `threads` threads.
inline void run_block(int threads, const std::function<void()>& kernel) {
  static std::vector<std::unique_ptr<Fiber>> fibers;
  body = kernel;
  block_size = Dim{static_cast<unsigned>(threads), 1, 1};
  warps.assign(threads / 32, Meeting());
  deposits.assign(threads / 32, std::vector<Deposit>(32));
  whole = Meeting();
  while (static_cast<int>(fibers.size()) < threads) fibers.push_back(std::make_unique<Fiber>());
  for (int i = 0; i < threads; ++i) {
    Fiber& fiber = *fibers[i];
    fiber.done = false;
    fiber.thread = Dim{static_cast<unsigned>(i), 0, 0};
    fiber.open.clear();
    fiber.groups.clear();
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.data();
    fiber.context.uc_stack.ss_size = fiber.stack.size();
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, entry, 0);
  }
  for (int left = threads, rounds = 0; left > 0; ++rounds) {
    if (rounds > 100000000) fail("the block hangs");
    left = 0;
    for (int i = 0; i < threads; ++i) {
      if (fibers[i]->done) continue;
      current = fibers[i].get();
      swapcontext(&scheduler, &current->context);
      left += !current->done;
    }
  }
}

}  // namespace cpu

#define threadIdx (cpu::current->thread)
#define blockIdx (cpu::block_index)
#define blockDim (cpu::block_size)

inline void __syncwarp() {
  cpu::meet(cpu::warps[cpu::current->thread.x / 32], 32, [] {});
}
inline void __syncthreads() {
  cpu::meet(cpu::whole, static_cast<int>(cpu::block_size.x), [] {});
}

template <typename T>
T __ldg(const T* at) {
  const char* bytes = reinterpret_cast<const char*>(at);
  if (bytes < cpu::input_begin || bytes + sizeof(T) > cpu::input_end) cpu::fail("read outside");
  if (reinterpret_cast<uintptr_t>(at) % alignof(T)) cpu::fail("misaligned read");
  return *at;
}

inline uint32_t __umulhi(uint32_t a, uint32_t b) {
  return static_cast<uint32_t>(static_cast<uint64_t>(a) * b >> 32);
}
inline int __clz(int v) { return v ? __builtin_clz(static_cast<uint32_t>(v)) : 32; }
inline int __popc(uint32_t v) { return __builtin_popcount(v); }
inline int __ffs(int v) { return __builtin_ffs(v); }
template <typename To, typename From>
To cast_bits(From v) {
  To result;
  std::memcpy(&result, &v, 4);
  return result;
}
inline float __uint_as_float(uint32_t v) { return cast_bits<float>(v); }
inline float __int_as_float(int v) { return cast_bits<float>(v); }
inline uint32_t __float_as_uint(float v) { return cast_bits<uint32_t>(v); }
inline uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t both = static_cast<uint64_t>(b) << 32 | a;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i)
    result |= static_cast<uint32_t>(both >> (selector >> 4 * i & 7) * 8 & 0xff) << 8 * i;
  return result;
}
