// What tests call to run the weight's gradient of both phases of a row on the CPU's make-believe device.
#include "ptx.cuh"
#include "sm90_wgrad_phases_launch.h"

extern "C" const char* upconv_wgrad_run(const int64_t* record, int64_t length, const void* x,
                                        int64_t x_bytes, const void* gy, int64_t gy_bytes, void* gw,
                                        void* gb, uint64_t seed) {
  using namespace upconv;
  static PhasesWgradParams plan;
  plan = {};
  if (!read_phases_wgrad_plan(record, length, &plan)) return "the integers do not make a plan";
  std::vector<float> workspace(phases_wgrad_workspace_bytes(plan) / 4, float_of(~0u));
  begin_run({{x, static_cast<size_t>(x_bytes), false}, {gy, static_cast<size_t>(gy_bytes), false}},
            seed);
  plan.x = x;
  plan.gy = gy;
  plan.gw = gw;
  plan.gb = gb;
  plan.workspace = workspace.data();
  if (phases_wgrad(plan, 3, nullptr)) return "the launch was refused";
  return end_run();
}
