// What every kernel family's entry points share. The Python of an exported file calls them through
// ctypes: plain C with raw pointers, so that no PyTorch header is compiled (20 to 50 s a build).
#pragma once

#include <cuda_runtime.h>

// Everything else in the library stays hidden.
#define UPCONV_ENTRY extern "C" __attribute__((visibility("default")))

namespace upconv {

// Makes a device current for the time of a launch.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    cudaGetDevice(&before_);
    if (device != before_) cudaSetDevice(device);
    now_ = device;
  }
  ~DeviceGuard() {
    if (now_ != before_) cudaSetDevice(before_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int before_ = 0, now_ = 0;
};

// Null when all is well, else the reason in words.
inline const char* reason(cudaError_t error) {
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace upconv
