// What the planner tells the kernels for the gradients of depthwise layers with a stride.
// upconv/planner/depthwise.py writes the same fields in the same order as flat integers;
// tests/test_depthwise_plan.py compares the two files.
#pragma once

#include <cstdint>

#include "divider.h"

namespace upconv {

constexpr int kDepthwiseColumns = 4;    // of grad_output in a thread, in every type
constexpr int kDepthwiseThreads = 256;  // of a block, at most
constexpr int kDepthwiseRows = 4;       // of grad_output that a thread brings at a time: igrad
constexpr int kDepthwisePad = 8;        // places in shared memory before one that is left out
constexpr int kDepthwiseMostPad = 32;   // the same for wide strides

// Scalars, all int. A "block" of grad_output is what lies between two input pixels: stride elements
// in each dimension. "Reach": the blocks that a pixel meets, ceil(kernel / stride).
#define UPCONV_DEPTHWISE_FIELDS(X)                                                         \
  X(type)      /* 0 float32, 1 bfloat16, 2 float16 */                                      \
  X(by_weight) /* 1: the weight's gradient, 0: the input's */                              \
  X(reach_y)                                                                               \
  X(reach_x)                                                                               \
  X(rows)           /* of one block that a thread brings: weight's gradient, 1 or 2 */     \
  X(vector)         /* bytes that are copied at a time, where the tensor begins on them */ \
  X(lanes)          /* threads along a row */                                              \
  X(row_groups)     /* threads along the rows of a block: weight's gradient */             \
  X(teams)          /* units that a thread block has at a time, of each channel */         \
  X(block_channels) /* of a thread block: weight's gradient */                             \
  X(tile)           /* columns of a unit: of the input, or of grad_output by weight */     \
  X(tiles_x)                                                                               \
  X(strip) /* rows of a unit: of the input, or of blocks by weight */                      \
  X(strips)                                                                                \
  X(deep)   /* planes of a unit's tap along the depth: weight's gradient */                \
  X(shares) /* thread blocks that divide the units of a channel: weight's gradient */      \
  X(folded) /* the images of a signal are its rows */                                      \
  X(sums)   /* the bias's gradient is added up as well */                                  \
  X(images)                                                                                \
  X(channels)                                                                              \
  X(in_d)                                                                                  \
  X(in_h)                                                                                  \
  X(in_w)                                                                                  \
  X(out_d)                                                                                 \
  X(out_h)                                                                                 \
  X(out_w)                                                                                 \
  X(kernel_z)                                                                              \
  X(kernel_y)                                                                              \
  X(kernel_x)                                                                              \
  X(stride_z)                                                                              \
  X(stride_y)                                                                              \
  X(stride_x)                                                                              \
  X(padding_z)                                                                             \
  X(padding_y)                                                                             \
  X(padding_x)                                                                             \
  X(dilation_z)

struct DepthwiseParams {
#define UPCONV_DECLARE(name) int name;
  UPCONV_DEPTHWISE_FIELDS(UPCONV_DECLARE)
#undef UPCONV_DECLARE
  const void* other;  // the input, or the weight where the input's gradient is computed
  const void* gy;
  void* result;
  void* bias;       // its gradient
  void* workspace;  // sums of the bias in double, then of the weight in float
  // Made from the above when the plan is read.
  int period;  // columns after which places in blocks and in vectors repeat together
  int last_y;  // rows and columns of a block that its last tap reaches
  int last_x;
  int pad_shift;  // places in shared memory are i + (i >> pad_shift)
  int positions;  // columns of a unit's sums in shared memory, with what is left out
  int x_columns;  // of a unit's input in shared memory
  int units;      // of all channels together; by weight: of one channel and tap of the depth
  int each;       // units of a team, one after the other
  int first_row;  // of blocks that grad_output has
  int groups;     // of rows of a unit
  int taps;       // of height and width
  int threads, blocks, shared_bytes;
  int64_t in_pitch, out_pitch;      // from one row to the next
  int64_t in_channel, out_channel;  // from one channel to the next
  Divider by_lanes, by_row_groups, by_teams, by_tiles_x, by_strips, by_depth, by_channels;
  Divider by_period, by_stride_y, by_stride_x, by_shares, by_kernel_z, by_kernel_x, by_taps;
  Divider by_reach_x, by_classes;
};

}  // namespace upconv
