// What the planner tells the Hopper kernel for the weight's gradient of all phases of a row.
// upconv/planner/sm90_phases_wgrad.py writes the same fields in the same order as flat integers;
// tests/test_sm90_phases_wgrad.py compares the two files.
#pragma once

#include <cstdint>

#include "divider.h"

namespace upconv {

#define UPCONV_PHASES_WGRAD_FIELDS(X)                             \
  X(operand) /* 0 TF32, 1 BF16, 2 FP16 */                         \
  X(tile_n)  /* input channels of a tile */                       \
  X(workers) /* that share the pixels */                          \
  X(stages)                                                       \
  X(rows)      /* of x in a part; more than one: whole rows */    \
  X(job_quads) /* four taps side by side: so many of a job */     \
  X(square)    /* pixels of a row, where a quad is 2 x 2; or 0 */ \
  X(runs)      /* of x in a part, if loaders copy them; or 0 */   \
  X(sums)      /* the bias's gradient is added up as well */      \
  X(batch)                                                        \
  X(in_channels)                                                  \
  X(in_d)                                                         \
  X(in_h)                                                         \
  X(in_w)                                                         \
  X(out_channels)                                                 \
  X(out_d)                                                        \
  X(out_h)                                                        \
  X(out_w)                                                        \
  X(kernel_z)                                                     \
  X(kernel_y)                                                     \
  X(kernel_x)                                                     \
  X(stride_z)                                                     \
  X(stride_y)                                                     \
  X(stride_x)                                                     \
  X(pad_z)                                                        \
  X(pad_y)                                                        \
  X(pad_x)

// What follows from the fields, computed once: a division takes 120 cycles, a unit of work a dozen
// of them, and whoever adds up would take longer to divide than to read.
struct PhasesWgradShape {
  int rows, quads, windows;  // of taps; quads of a row
  int block_channels, gradient_blocks, input_blocks, jobs;
  int share, longer;    // parts of each worker, and how many have one more
  int row_parts, high;  // parts of a row, and of a slice along the height
  int bias_rows;        // of taps, that add up the bias's gradient
  int64_t worker_step;  // quads in the workspace from one worker to the next
  Divider by_rows, by_quads, by_job_quads, by_out_channels, by_block_channels, by_tile_n;
  Divider by_bias_rows, by_stride_y, by_input_blocks, by_jobs, by_windows, by_gradient_blocks;
  Divider by_kernel_y, by_row_parts, by_high, by_in_d;
};

struct PhasesWgradParams {
#define UPCONV_DECLARE(name) int name;
  UPCONV_PHASES_WGRAD_FIELDS(UPCONV_DECLARE)
#undef UPCONV_DECLARE
  PhasesWgradShape shape;
  const void* x;
  const void* gy;
  void* gw;
  void* gb;
  float* workspace;
};

}  // namespace upconv
