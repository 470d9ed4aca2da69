// What tests call to run a Hopper kernel for the weight's gradient on the CPU's make-believe
// device, whose operand A goes through registers.
#pragma once

#include "ptx.cuh"

namespace upconv {

// Returns what went wrong, or an empty text.
template <typename Params>
const char* run_wgrad(bool (*read)(const int64_t*, int64_t, Params*),
                      int64_t (*workspace_bytes)(const Params&),
                      cudaError_t (*launch)(const Params&, int, cudaStream_t),
                      const int64_t* record, int64_t length, const void* x, int64_t x_bytes,
                      const void* gy, int64_t gy_bytes, void* gw, void* gb, uint64_t seed) {
  static Params plan;
  plan = {};
  if (!read(record, length, &plan)) return "the integers do not make a plan";
  std::vector<float> workspace(workspace_bytes(plan) / 4, float_of(~0u));
  begin_run({{x, static_cast<size_t>(x_bytes), false}, {gy, static_cast<size_t>(gy_bytes), false}},
            seed);
  plan.x = x;
  plan.gy = gy;
  plan.gw = gw;
  plan.gb = gb;
  plan.workspace = workspace.data();
  if (launch(plan, 3, nullptr)) return "the launch was refused";
  return end_run();
}

}  // namespace upconv

// The entry point for a kernel whose functions have this name in theirs.
#define UPCONV_PIXELS_WGRAD_DRIVER(name)                                                           \
  extern "C" const char* upconv_wgrad_run(const int64_t* record, int64_t length, const void* x,    \
                                          int64_t x_bytes, const void* gy, int64_t gy_bytes,       \
                                          void* gw, void* gb, uint64_t seed) {                     \
    using namespace upconv;                                                                        \
    return run_wgrad(read_##name##_plan, name##_workspace_bytes, name, record, length, x, x_bytes, \
                     gy, gy_bytes, gw, gb, seed);                                                  \
  }
