// CUDA C++ on the CPU, as far as the kernels that are tested this way need it.
//
// The threads of a block are coroutines. Each runs until a barrier, then the next one does: in
// ascending or in descending order, so that a missing barrier shows as a difference. Shared memory
// starts as NaNs. Asynchronous copies happen when they are waited for, not before.
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

inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }

namespace host {

struct Copy {
  unsigned char* target;
  const void* source;
  int bytes, valid;
};

struct Thread {
  ucontext_t context;
  std::vector<unsigned char> stack = std::vector<unsigned char>(1 << 16);
  std::vector<Copy> copies;
  bool done = false;
};

inline std::vector<Thread> threads;
inline ucontext_t scheduler;
inline std::function<void()> body;

inline void enter() {
  body();
  threads[threadIdx.x].done = true;
  swapcontext(&threads[threadIdx.x].context, &scheduler);
}

inline void barrier() { swapcontext(&threads[threadIdx.x].context, &scheduler); }

// One block: every round takes each thread to its next barrier, and they must all come to one.
inline void run_block(unsigned block, unsigned count, bool descending) {
  blockIdx.x = block;
  threads.resize(count);
  for (Thread& thread : threads) {
    thread.done = false;
    thread.copies.clear();
    getcontext(&thread.context);
    thread.context.uc_stack.ss_sp = thread.stack.data();
    thread.context.uc_stack.ss_size = thread.stack.size();
    thread.context.uc_link = nullptr;
    makecontext(&thread.context, enter, 0);
  }
  for (unsigned done = 0; done < count;) {
    for (unsigned i = 0; i < count; ++i) {
      threadIdx.x = descending ? count - 1 - i : i;
      swapcontext(&scheduler, &threads[threadIdx.x].context);
      done += threads[threadIdx.x].done;
    }
    if (done != 0 && done != count) {
      std::fprintf(stderr, "%u of %u threads ended while others wait at a barrier\n", done, count);
      std::abort();
    }
  }
}

}  // namespace host

inline void __syncthreads() { host::barrier(); }
