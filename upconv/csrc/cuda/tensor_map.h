// The driver's function that describes a tensor to the TMA, found at run time, so that nothing
// links against the driver.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

namespace upconv {

// nullptr where the driver has none.
inline decltype(&cuTensorMapEncodeTiled) tensor_map_encoder() {
  static const auto encode = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result;
    cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault,
                                     &result);
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(found);
  }();
  return encode;
}

}  // namespace upconv
