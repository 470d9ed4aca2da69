// CUDA C++ on the CPU, as far as the kernels that are tested this way need it.
//
// The threads of a block are coroutines. Each runs until a barrier, then the next one does: in
// ascending or in descending order, so that a missing barrier shows as a difference. Shared memory
// starts as NaNs. Asynchronous copies happen when they are waited for, not before. The lanes of a
// warp exchange values at a barrier; a kernel that does so runs warp by warp.
#pragma once

#include <ucontext.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <type_traits>
#include <vector>

#define __device__
#define __global__
#define __shared__
#define __grid_constant__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(n)

struct Index {
  unsigned x = 0;
};
inline Index threadIdx, blockIdx;

struct float2 {
  float x, y;
};
struct float4 {
  float x, y, z, w;
};

inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }

inline float __uint_as_float(unsigned bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

namespace host {

struct Copy {
  unsigned char* target;
  const void* source;
  int bytes, valid, group;
};

struct Thread {
  ucontext_t context;
  std::vector<unsigned char> stack = std::vector<unsigned char>(1 << 16);
  std::vector<Copy> copies;
  int groups = 0;  // of copies, so far
  bool done = false;
};

inline std::vector<Thread> threads;
inline unsigned first_thread = 0;  // of the warp that runs, where warps run by themselves
inline ucontext_t scheduler;
inline std::function<void()> body;

inline Thread& this_thread() { return threads[threadIdx.x - first_thread]; }

inline void barrier() { swapcontext(&this_thread().context, &scheduler); }

inline void enter() {
  body();
  this_thread().done = true;
  barrier();
}

// One block: every round takes each thread to its next barrier, and they must all come to one.
inline void run_block(unsigned block, unsigned count, bool descending, unsigned first = 0) {
  blockIdx.x = block;
  first_thread = first;
  threads.resize(count);
  for (Thread& thread : threads) {
    thread.done = false;
    thread.copies.clear();
    thread.groups = 0;
    getcontext(&thread.context);
    thread.context.uc_stack.ss_sp = thread.stack.data();
    thread.context.uc_stack.ss_size = thread.stack.size();
    thread.context.uc_link = nullptr;
    makecontext(&thread.context, enter, 0);
  }
  for (unsigned done = 0; done < count;) {
    for (unsigned i = 0; i < count; ++i) {
      const unsigned index = descending ? count - 1 - i : i;
      threadIdx.x = first + index;
      swapcontext(&scheduler, &threads[index].context);
      done += threads[index].done;
    }
    if (done != 0 && done != count) {
      std::fprintf(stderr, "%u of %u threads ended while others wait at a barrier\n", done, count);
      std::abort();
    }
  }
}

// What lane `from` of the warp brought; nobody brings the next value before all have read this one.
template <typename T>
T exchanged(T mine, int from) {
  static T values[32];
  values[threadIdx.x % 32] = mine;
  barrier();
  const T result = values[from];
  barrier();
  return result;
}

}  // namespace host

template <typename T>
T __shfl_sync(unsigned, T value, int lane) {
  return host::exchanged(value, lane % 32);
}
template <typename T>
T __shfl_down_sync(unsigned, T value, int by) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  return host::exchanged(value, lane + by < 32 ? lane + by : lane);
}
inline unsigned __ballot_sync(unsigned, bool mine) {
  static unsigned votes;
  static int arrived;
  if (arrived++ == 0) votes = 0;
  votes |= static_cast<unsigned>(mine) << threadIdx.x % 32;
  host::barrier();
  arrived = 0;
  const unsigned result = votes;
  host::barrier();
  return result;
}

inline void __syncwarp() { host::barrier(); }
inline void __syncthreads() { host::barrier(); }
