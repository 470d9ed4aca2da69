// How much shared memory the launches of a kernel may ask for.
#pragma once

#include <cuda_runtime_api.h>

namespace upconv {

// Lets a kernel be launched with `bytes` of dynamic shared memory on the current device. What was
// allowed once stays allowed: set anew for each launch, two threads of the host that launch the
// same kernel with different sizes would make each other's launch fail.
cudaError_t allow_shared(const void* kernel, int bytes);

template <typename... Parameters>
cudaError_t allow_shared(void (*kernel)(Parameters...), int bytes) {
  return allow_shared(reinterpret_cast<const void*>(kernel), bytes);
}

}  // namespace upconv
