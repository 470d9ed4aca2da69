// The most that each kernel has been allowed, by device. In a file of its own, because <map> and
// <mutex> would cost each of the launchers half a second of the compiler's.
#include "shared_memory.h"

#include <map>
#include <mutex>
#include <utility>

namespace upconv {

constexpr int kAllowedByDefault = 48 * 1024;

cudaError_t allow_shared(const void* kernel, int bytes) {
  if (bytes <= kAllowedByDefault) return cudaSuccess;
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  static std::mutex mutex;
  static std::map<std::pair<int, const void*>, int> allowed;
  const std::lock_guard<std::mutex> lock(mutex);
  int& most = allowed[{device, kernel}];
  if (bytes <= most) return cudaSuccess;
  error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error == cudaSuccess) most = bytes;
  return error;
}

}  // namespace upconv
