// What tests call to run the Hopper kernel for both phases of a row on the CPU's make-believe device.
#include "ptx.cuh"
#include "sm90_phases_launch.h"

// Packs the weight and runs the kernel. Returns what went wrong, or an empty text.
extern "C" const char* upconv_run(const int64_t* record, int64_t length, const void* x,
                                  int64_t x_bytes, const void* weight, int64_t weight_bytes,
                                  const void* bias, int64_t bias_bytes, void* y, int64_t y_bytes,
                                  int multiprocessors, uint64_t seed) {
  using namespace upconv;
  static PhasesParams plan;
  plan = {};
  if (!read_phases_plan(record, length, &plan)) return "the integers do not make a plan";
  std::vector<uint4> packed(phases_packed_bytes(plan) / 16, uint4{~0u, ~0u, ~0u, ~0u});
  begin_run({{x, static_cast<size_t>(x_bytes), false},
             {weight, static_cast<size_t>(weight_bytes), false},
             {packed.data(), packed.size() * 16, false},
             {bias, static_cast<size_t>(bias_bytes), false},
             {y, static_cast<size_t>(y_bytes), true}},
            seed);
  if (phases_pack(plan, weight, packed.data(), nullptr)) return "packing was refused";
  plan.source = x;
  plan.w = packed.data();
  plan.bias = bias;
  plan.result = y;
  if (phases_run(plan, multiprocessors, nullptr)) return "the launch was refused";
  return end_run();
}
