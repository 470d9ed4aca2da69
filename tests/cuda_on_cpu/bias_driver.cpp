// What tests call to run the bias's gradient on the CPU's make-believe device.
#include "bias_gradient.h"
#include "ptx.cuh"

extern "C" const char* upconv_bias_run(int type, int channels_last, int64_t images,
                                       int64_t channels, int64_t pixels, const void* gy,
                                       int64_t gy_bytes, void* result, int multiprocessors,
                                       int* parts) {
  using namespace upconv;
  BiasGradient sum{};
  sum.type = static_cast<SumType>(type);
  sum.channels_last = channels_last != 0;
  sum.images = images;
  sum.channels = channels;
  sum.pixels = pixels;
  sum.gy = gy;
  sum.result = result;
  plan_bias_gradient(&sum, multiprocessors);
  *parts = sum.parts;
  std::vector<double> workspace(bias_gradient_workspace_bytes(sum) / 8, float_of(~0u));
  sum.workspace = workspace.data();
  begin_run({{gy, static_cast<size_t>(gy_bytes), false}}, 1);
  if (bias_gradient(sum, nullptr)) return "the launch was refused";
  return end_run();
}
