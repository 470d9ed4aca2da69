// The instructions of upconv/csrc/cuda/ptx.cuh that the kernels tested on the CPU use.
#pragma once

#include "host_cuda.h"

namespace upconv::direct {
extern unsigned char raw_memory[];
}

namespace upconv::ptx {

inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(static_cast<const unsigned char*>(pointer) - direct::raw_memory);
}

template <int kBytes>
void copy_async(uint32_t destination, const void* source, int valid) {
  static_assert(kBytes == 4 || kBytes == 8 || kBytes == 16, "cp.async takes 4, 8 or 16 bytes");
  if (destination % kBytes != 0 || reinterpret_cast<uintptr_t>(source) % kBytes != 0) {
    std::fprintf(stderr, "an asynchronous copy of %d bytes is not aligned\n", kBytes);
    std::abort();
  }
  host::this_thread().copies.push_back(
      {direct::raw_memory + destination, source, kBytes, valid, host::this_thread().groups});
}

inline void copy_async_commit() { ++host::this_thread().groups; }

// What the last `kPending` groups copy, or was not put into a group, is still on its way.
template <int kPending>
void copy_async_wait() {
  std::vector<host::Copy>& copies = host::this_thread().copies;
  const int come =
      kPending == 0 ? host::this_thread().groups : host::this_thread().groups - kPending;
  size_t kept = 0;
  for (const host::Copy& copy : copies) {
    if (kPending != 0 && copy.group >= come) {
      copies[kept++] = copy;
      continue;
    }
    std::memset(copy.target, 0, copy.bytes);
    std::memcpy(copy.target, copy.source, copy.valid);
  }
  copies.resize(kept);
}

}  // namespace upconv::ptx
