// What the planner tells the Hopper kernel for patches. upconv/planner/sm90_patch.py writes the
// same fields in the same order as flat integers; tests/test_sm90_patch.py compares the two files.
#pragma once

#include <cstdint>

#include "divider.h"

namespace upconv {

#define UPCONV_PATCH_FIELDS(X)                                                                \
  X(operand) /* 0 TF32, 1 BF16, 2 FP16, 3 split float32 */                                    \
  X(channels_last)                                                                            \
  X(backward) /* the input's gradient: y becomes x */                                         \
  X(tile_n)   /* columns of a tile: channels x taps, or channels of the gradient */           \
  X(resident) /* all weights of a thread block's columns stay in shared memory */             \
  X(weight_stages)                                                                            \
  X(box_stages)                                                                               \
  X(span)        /* outputs side by side that one thread has of a pixel: 2 or 4 */            \
  X(rest_pixels) /* of an image in a block of what is left over of several; a power of two */ \
  X(paired)      /* two channels are a row of TMA's: planes of an odd number of 8 bytes */    \
  X(short_rows)  /* rows of x in a part of the gradient's; 0 where it is a part of a row */   \
  X(batch)                                                                                    \
  X(in_channels) /* of the layer, in either direction */                                      \
  X(in_d)                                                                                     \
  X(in_h)                                                                                     \
  X(in_w)                                                                                     \
  X(out_channels)                                                                             \
  X(step_z) /* the patch: kernel and stride */                                                \
  X(step_y)                                                                                   \
  X(step_x)

// What follows from the fields, computed once: the kernel would divide for each unit of work.
struct PatchShape {
  int groups;                     // of columns
  int each;                       // whole blocks of an image
  int runs;                       // of `span` outputs, of a pixel in one channel
  int rest_shift;                 // rest_pixels is 1 << rest_shift
  int row_parts;                  // of a row of grad_output, or of a slice of short ones
  int64_t area;                   // of a channel of y
  uint32_t row_step, slice_step;  // in it, from the first output of a row of pixels to the next
  Divider by_groups, by_each, by_runs, by_row_runs, by_row_parts, by_rows, by_pixels;
  Divider by_in_w, by_in_h, by_in_d, by_step_y, by_step_x, by_out_channels;
};

struct PatchParams {
#define UPCONV_DECLARE(name) int name;
  UPCONV_PATCH_FIELDS(UPCONV_DECLARE)
#undef UPCONV_DECLARE
  PatchShape shape;
  const void* source;  // x, or grad_output
  const void* w;       // packed
  const void* bias;
  void* result;  // y, or grad_input
};

}  // namespace upconv
