// Forward transposed convolution on the CPU: the entry point, and what it is told.
//
// No PyTorch header is needed here or in any file of this folder.
#pragma once

#include <cstdint>

namespace upconv {

enum class DType : int { f32 = 0, f64 = 1, bf16 = 2, f16 = 3 };

// The flat list of integers that `upconv/planner/cpu.py` makes (PARAMS_HEAD there names the same
// fields in the same order). One-dimensional and two-dimensional problems have leading dimensions
// of size 1, so that every triple is (depth, height, width).
enum Param : int {
  kIsa = 0,         // highest instruction set to use: 0 generic, 1 AVX2, 2 AVX-512
  kBatch = 1,       //
  kCin = 2,         //
  kCout = 3,        //
  kGroups = 4,      //
  kTile = 5,        // flat positions (see fprop_job.h) of one unit of work
  kChunk = 6,       // output channels, within a group, of one unit of work
  kThreads = 7,     // the most threads that are worth waking
  kInSize = 8,      // 3 values
  kOutSize = 11,    // 3 values
  kKernel = 14,     // 3 values
  kStride = 17,     // 3 values
  kPitch = 20,      // 3 values: positions the flat space reserves for every dimension
  kPhaseLists = 23  // per dimension: number of phases, then per phase: first output, number of
                    // outputs, number of taps, and (tap, shift) for every tap
};

// y = conv_transpose(x, w) + bias. All tensors are contiguous: x (N, Cin, *in), w (Cin,
// Cout/groups, *kernel), y (N, Cout, *out), which need not be initialised. `threads` is an upper
// bound.
//
// False, and nothing of worth in y, where a weight is infinite or NaN: the kernel multiplies the
// zeros between rows by weights as well, and zero times such a weight is NaN, in outputs that the
// weight has no part in. Inputs and biases may be anything.
bool cpu_fprop(const int64_t* params, DType dtype, const void* x, const void* w,
               const void* bias_or_null, void* y, int threads);

}  // namespace upconv
