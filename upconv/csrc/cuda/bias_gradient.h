// Entry points of the bias's gradient, free of PyTorch: sums of a dense tensor over everything but
// its channels.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace upconv {

enum class SumType { kFloat32, kBfloat16, kFloat16 };

// What is summed, and how it is shared out. `plan_bias_gradient` fills in the second half.
struct BiasGradient {
  SumType type;
  bool channels_last;  // [pixel of an image][channel]; otherwise [image][channel][pixel]
  int64_t images, channels, pixels;
  const void* gy;
  void* result;
  double* workspace;  // [channel][part]; not needed where there is one part

  int parts;    // blocks that share a channel
  int lanes;    // threads that read one piece of a plane together: 8, 16 or 32
  int items;    // pieces that they read at a time: 1, 2 or 4
  int vector;   // elements of one load
  int columns;  // channels_last: loads side by side of one block
};

void plan_bias_gradient(BiasGradient* sum, int multiprocessors);

// Size of the sums that the blocks leave for each other.
int64_t bias_gradient_workspace_bytes(const BiasGradient& sum);

cudaError_t bias_gradient(const BiasGradient& sum, cudaStream_t stream);

}  // namespace upconv
