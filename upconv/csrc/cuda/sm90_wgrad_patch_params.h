// What the planner tells the Hopper kernel for the weight's gradient of patches.
// upconv/planner/sm90_patch_wgrad.py writes the same fields in the same order as flat integers;
// tests/test_sm90_patch_wgrad.py compares the two files.
#pragma once

#include <cstdint>

#include "divider.h"

namespace upconv {

#define UPCONV_PATCH_WGRAD_FIELDS(X)                            \
  X(operand)      /* 0 TF32, 1 BF16, 2 FP16 */                  \
  X(tile_n)       /* input channels of a tile */                \
  X(workers)      /* that share the pixels */                   \
  X(input_stages) /* of the input's ring */                     \
  X(box_stages)   /* of grad_output's rings */                  \
  X(sums)         /* the bias's gradient is added up as well */ \
  X(batch)                                                      \
  X(in_channels)                                                \
  X(in_d)                                                       \
  X(in_h)                                                       \
  X(in_w)                                                       \
  X(out_channels)                                               \
  X(step_z) /* the patch: kernel and stride; it is 2 wide */    \
  X(step_y)

// What follows from the fields, computed once: to divide, feeders would take as long as products,
// and whoever adds up longer than to read.
struct PatchWgradShape {
  int lead;             // pixels that a part may begin before its row: see GradPart
  int row_parts;        // of a row of x
  int share, longer;    // parts of a worker; the first ones have one more
  int rows, pairs;      // of the patch; of its rows and blocks of gy's channels, in a job
  int blocks;           // of x's channels
  int jobs, units;      // units: those of all workers
  int64_t worker_step;  // pairs of taps in the workspace from one worker to the next
  Divider by_rows, by_out_channels, by_tile_n;
  Divider by_row_parts, by_in_h, by_in_d, by_jobs, by_pairs;
};

struct PatchWgradParams {
#define UPCONV_DECLARE(name) int name;
  UPCONV_PATCH_WGRAD_FIELDS(UPCONV_DECLARE)
#undef UPCONV_DECLARE
  PatchWgradShape shape;
  const void* x;
  const void* gy;
  void* gw;
  void* gb;
  float* workspace;
};

}  // namespace upconv
