// What the planner tells the mma.sync kernels for the gradients. upconv/planner/gather.py writes
// the same fields in the same order as flat integers, then the jobs; tests/test_gather_plan.py
// compares the two files.
#pragma once

#include <cstdint>

#include "divider.h"

namespace upconv {

constexpr int kGatherJobs = 48;      // jobs of a launch, at most
constexpr int kGatherPixels = 64;    // of a warp: the input's gradient
constexpr int kGatherThreads = 256;  // of a block, at most

// Every tile of a warp that the planner may ask for: (rows in 16s, columns in 8s), and columns
// where the input's gradient is computed. The same lists are in upconv/planner/gather_wgrad.py and
// gather_igrad.py.
#define UPCONV_GATHER_WGRAD_TILES(X) X(1, 1) X(1, 3) X(3, 1) X(2, 4) X(4, 3) X(5, 3) X(2, 7) X(3, 7)
#define UPCONV_GATHER_IGRAD_TILES(X) X(1) X(2) X(4) X(7)

// Scalars, all int. Channels are those of one group. A "box" is what a block stages of a tensor at
// a time: rows of some channels and planes, `pitch` elements apart.
#define UPCONV_GATHER_FIELDS(X)                                                           \
  X(type)      /* 0 float32 as TF32, 1 bfloat16, 2 float16, 3 float32 as such */          \
  X(by_weight) /* 1: the gradient of the weight; 0: of the input */                       \
  X(by_input)  /* 1: a unit is rows of the input; 0: rows of grad_output */               \
  X(tiles_m)   /* tiles of 16 rows of a warp; of the input's gradient: 4 */               \
  X(tiles_n)   /* tiles of 8 columns of a warp */                                         \
  X(warps_m)                                                                              \
  X(warps_n)                                                                              \
  X(warps_k) /* warps that divide the pixels of a unit */                                 \
  X(batch)                                                                                \
  X(groups)                                                                               \
  X(in_channels)                                                                          \
  X(out_channels)                                                                         \
  X(in_d)                                                                                 \
  X(in_h)                                                                                 \
  X(in_w)                                                                                 \
  X(out_d)                                                                                \
  X(out_h)                                                                                \
  X(out_w)                                                                                \
  X(kernel_z)                                                                             \
  X(kernel_y)                                                                             \
  X(kernel_x)                                                                             \
  X(stride_z)                                                                             \
  X(stride_y)                                                                             \
  X(stride_x)                                                                             \
  X(padding_x)                                                                            \
  X(dilation_x)                                                                           \
  X(step_z)         /* of a job's taps along the depth */                                 \
  X(step_y)         /* and along the height */                                            \
  X(rows)           /* of a unit */                                                       \
  X(columns)        /* input columns of a unit, a multiple of 16 */                       \
  X(run)            /* input's gradient: neighbouring pixels of a thread, 1 or 4 */       \
  X(out_block)      /* output channels of a block */                                      \
  X(in_block)       /* input channels of a block; input's gradient: all, in tiles of 8 */ \
  X(tap_block)      /* taps along the width of a block */                                 \
  X(gy_rows)        /* of one plane of the box */                                         \
  X(gy_plane_step)  /* between planes of the box, in the tensor */                        \
  X(gy_row_step)    /* between rows of the box, in the tensor */                          \
  X(gy_tap_rows)    /* rows of the box between taps of the height */                      \
  X(gy_row_advance) /* rows of the box between rows of a unit */                          \
  X(gy_pitch)       /* elements */                                                        \
  X(gy_vector)      /* bytes of one copy: 2 (through registers), 4, 8 or 16 */            \
  X(x_rows)                                                                               \
  X(x_plane_step)                                                                         \
  X(x_tap_rows)                                                                           \
  X(x_pitch)                                                                              \
  X(x_vector)                                                                             \
  X(gy_bytes)     /* of a box of grad_output */                                           \
  X(x_bytes)      /* of a box of the input, none for its own gradient */                  \
  X(table_bytes)  /* of the lists of rows, before the boxes */                            \
  X(shared_bytes) /* of a block */                                                        \
  X(blocks)                                                                               \
  X(jobs)

// Taps of the depth and the height that one block adds up, and where their units lie: unit row q
// meets grad_output from q * stride + gy_* on, and the input from q + x_* on.
#define UPCONV_GATHER_JOB_FIELDS(X)            \
  X(block)  /* the first of the launch */      \
  X(shares) /* blocks that divide the units */ \
  X(tap_z)  /* the first tap, */               \
  X(taps_z) /* and how many: `step_z` apart */ \
  X(tap_y)                                     \
  X(taps_y)                                    \
  X(gy_z)                                      \
  X(gy_y)                                      \
  X(x_z)                                       \
  X(x_y)                                       \
  X(count_z) /* unit rows along the depth */   \
  X(count_y) /* and along the height */        \
  X(units)   /* over all images, in one channel */

struct GatherJob {
#define UPCONV_DECLARE(name) int name;
  UPCONV_GATHER_JOB_FIELDS(UPCONV_DECLARE)
#undef UPCONV_DECLARE
  Divider by_shares, by_taps_z, by_taps_y, by_count_z, by_down;
};

struct GatherParams {
  const void* other;  // the input, or the weight where the input's gradient is computed
  const void* gy;
  void* result;
  float* workspace;
#define UPCONV_DECLARE(name) int name;
  UPCONV_GATHER_FIELDS(UPCONV_DECLARE)
#undef UPCONV_DECLARE
  GatherJob job[kGatherJobs];
  // Made from the above when the plan is read.
  int64_t in_plane, out_plane;            // elements of one channel
  int out_blocks, in_blocks, tap_blocks;  // parts that the weight of a job is cut into
  int sums;                               // of a block, in the workspace
  // A block's set-up had up to 47 divisions, and each unit three more.
  Divider by_out_blocks, by_in_blocks, by_tap_blocks, by_tap_block, by_gy_rows, by_x_rows;
  Divider by_kernel_z, by_kernel_y, by_kernel_x, by_across, by_sums_wide, by_padded;
  Divider by_warps_m, by_warps_n, by_row_warps;
  int row_warps, column_warps;  // of the warps that divide the pixels of a unit
  uint32_t inverse_columns;     // 2^32 / columns, rounded up: for the pixels of a unit
};

}  // namespace upconv
