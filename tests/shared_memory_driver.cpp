// Threads that launch one kernel in sizes of their own, with a CUDA runtime that counts: each
// allows its size, and then launches, for which the size has to be allowed still.
#include <atomic>
#include <thread>
#include <vector>

#include "shared_memory.h"

namespace {

constexpr int kDevices = 2, kRounds = 20000;
std::atomic<int> limit[kDevices];  // what the runtime would let the kernel have
std::atomic<int> calls, refused;
thread_local int current;

void kernel(int) {}

}  // namespace

extern "C" {
cudaError_t cudaGetDevice(int* device) {
  *device = current;
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int bytes) {
  ++calls;
  if (bytes > 200 * 1024) return cudaErrorInvalidValue;
  limit[current] = bytes;
  return cudaSuccess;
}

// How many launches would have failed; `changes` gets how often the runtime was asked.
int race(int* changes) {
  std::vector<std::thread> threads;
  for (int i = 0; i < 8; ++i) {
    threads.emplace_back([i] {
      current = i % kDevices;
      for (int round = 0; round < kRounds; ++round) {
        const int bytes = (50 + 10 * ((i + round) % 8)) * 1024;
        if (upconv::allow_shared(kernel, bytes) != cudaSuccess || limit[current] < bytes) ++refused;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  *changes = calls;
  return refused;
}

// What allow_shared says of a size on a device.
int ask(int device, int bytes) {
  current = device;
  return upconv::allow_shared(kernel, bytes);
}
int limit_of(int device) { return limit[device]; }
}
