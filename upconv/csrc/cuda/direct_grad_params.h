// What the planner tells the CUDA-core kernels for the gradients. upconv/planner/direct_wgrad.py
// writes the same fields in the same order as flat integers; tests/test_direct_wgrad.py compares
// the two files.
#pragma once

#include <cstdint>

#include "divider.h"

namespace upconv {

constexpr int kGradPixels = 32;    // of a chunk: input columns that a warp stages at a time
constexpr int kGradOutputs = 160;  // of a chunk: columns of one row of grad_output

// Scalars, all int. Channels are those of one group. A "column" is one output channel with one
// depth and one height of the weight; its taps along the width lie in the lanes of a warp.
#define UPCONV_DIRECT_GRAD_FIELDS(X)                                              \
  X(type)    /* 0 float32, 1 float64, 2 bfloat16, 3 float16 */                    \
  X(inputs)  /* input channels of a thread; 0: the gradient of the input */       \
  X(columns) /* columns of a thread */                                            \
  X(warps)   /* of a block */                                                     \
  X(batch)                                                                        \
  X(groups)                                                                       \
  X(in_channels)                                                                  \
  X(out_channels)                                                                 \
  X(in_d)                                                                         \
  X(in_h)                                                                         \
  X(in_w)                                                                         \
  X(out_d)                                                                        \
  X(out_h)                                                                        \
  X(out_w)                                                                        \
  X(kernel_z)                                                                     \
  X(kernel_y)                                                                     \
  X(kernel_x)                                                                     \
  X(stride_z)                                                                     \
  X(stride_y)                                                                     \
  X(stride_x)                                                                     \
  X(padding_z)                                                                    \
  X(padding_y)                                                                    \
  X(padding_x)                                                                    \
  X(dilation_z)                                                                   \
  X(dilation_y)                                                                   \
  X(dilation_x)                                                                   \
  X(lanes_x)       /* taps along the width that the lanes of a warp take */       \
  X(slots)         /* neighbouring pixels that a warp takes at a time */          \
  X(chunk)         /* pixels that a warp stages at a time, a multiple of slots */ \
  X(x_tiles)       /* parts that the kernel's width is cut into */                \
  X(column_tiles)  /* parts that the columns are cut into */                      \
  X(channel_tiles) /* parts that the input channels are cut into */               \
  X(segment)       /* pixels of one unit: a row, or a piece of one */             \
  X(segments)      /* pieces of a row */                                          \
  X(shares)        /* blocks that divide the units */                             \
  X(units)         /* units of a block */

struct DirectGradParams {
  const void* x;  // the input, or the weight where the input's gradient is computed
  const void* gy;
  void* result;
  void* workspace;
#define UPCONV_DECLARE(name) int name;
  UPCONV_DIRECT_GRAD_FIELDS(UPCONV_DECLARE)
#undef UPCONV_DECLARE
  // Made from the above when the plan is read.
  int64_t in_plane, out_plane;  // elements of one channel
  int all_columns;              // of a group
  int all_units;
  int tiles;    // parts that the weight of a group is cut into
  int workers;  // warps that add up one part
  int sums;     // of a worker: inputs x columns x lanes_x
  Divider by_in_h, by_in_d, by_segments;
};

}  // namespace upconv
