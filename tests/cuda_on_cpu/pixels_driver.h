// What tests call to run a Hopper kernel whose rows are pixels on the CPU's make-believe device.
#pragma once

#include "ptx.cuh"

namespace upconv {

// Packs the weight and runs the kernel. Returns what went wrong, or an empty text.
template <typename Params>
const char* run_pixels(bool (*read)(const int64_t*, int64_t, Params*),
                       int64_t (*packed_bytes)(const Params&),
                       cudaError_t (*pack)(const Params&, const void*, void*, cudaStream_t),
                       cudaError_t (*launch)(const Params&, int, cudaStream_t),
                       const int64_t* record, int64_t length, const void* x, int64_t x_bytes,
                       const void* weight, int64_t weight_bytes, const void* bias,
                       int64_t bias_bytes, void* y, int64_t y_bytes, int multiprocessors,
                       uint64_t seed) {
  static Params plan;
  plan = {};
  if (!read(record, length, &plan)) return "the integers do not make a plan";
  std::vector<uint4> packed(packed_bytes(plan) / 16, uint4{~0u, ~0u, ~0u, ~0u});
  begin_run({{x, static_cast<size_t>(x_bytes), false},
             {weight, static_cast<size_t>(weight_bytes), false},
             {packed.data(), packed.size() * 16, false},
             {bias, static_cast<size_t>(bias_bytes), false},
             {y, static_cast<size_t>(y_bytes), true}},
            seed);
  if (pack(plan, weight, packed.data(), nullptr)) return "packing was refused";
  plan.source = x;
  plan.w = packed.data();
  plan.bias = bias;
  plan.result = y;
  if (launch(plan, multiprocessors, nullptr)) return "the launch was refused";
  return end_run();
}

}  // namespace upconv

// The entry point for a kernel whose functions have names that begin with `name`.
#define UPCONV_PIXELS_DRIVER(name)                                                              \
  extern "C" const char* upconv_run(const int64_t* record, int64_t length, const void* x,       \
                                    int64_t x_bytes, const void* weight, int64_t weight_bytes,  \
                                    const void* bias, int64_t bias_bytes, void* y,              \
                                    int64_t y_bytes, int multiprocessors, uint64_t seed) {      \
    using namespace upconv;                                                                     \
    return run_pixels(read_##name##_plan, name##_packed_bytes, name##_pack, name##_run, record, \
                      length, x, x_bytes, weight, weight_bytes, bias, bias_bytes, y, y_bytes,   \
                      multiprocessors, seed);                                                   \
  }
