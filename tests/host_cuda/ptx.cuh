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
  host::this_thread().copies.push_back({direct::raw_memory + destination, source, kBytes, valid});
}

inline void copy_async_commit() {}

template <int kPending>
void copy_async_wait() {
  static_assert(kPending == 0, "all copies at once");
  for (const host::Copy& copy : host::this_thread().copies) {
    std::memset(copy.target, 0, copy.bytes);
    std::memcpy(copy.target, copy.source, copy.valid);
  }
  host::this_thread().copies.clear();
}

}  // namespace upconv::ptx
