// What the planner tells the Hopper kernel for both phases of a row. upconv/planner/sm90_phases.py
// writes the same fields in the same order as flat integers; tests/test_sm90_phases.py compares the
// two files.
#pragma once

#include <cstdint>

#include "divider.h"

namespace upconv {

#define UPCONV_PHASES_FIELDS(X)                                                    \
  X(operand)  /* 0 TF32, 1 BF16, 2 FP16 */                                         \
  X(backward) /* the input's gradient: y becomes x */                              \
  X(tile_n)   /* channels of a tile */                                             \
  X(blocks)   /* of 64 pixels that a consumer has */                               \
  X(resident) /* all weights of a thread block's channels stay in shared memory */ \
  X(weight_stages)                                                                 \
  X(box_stages)                                                                    \
  X(flat)   /* pixels of an image one after the other */                           \
  X(octets) /* else, 8 pixels each, side by side in a block; a power of two */     \
  X(box_w)  /* elements of a box; if flat, of all its rows */                      \
  X(box_h)                                                                         \
  X(box_d)                                                                         \
  X(batch)                                                                         \
  X(in_channels) /* of the layer, in either direction */                           \
  X(in_d)                                                                          \
  X(in_h)                                                                          \
  X(in_w)                                                                          \
  X(out_channels)                                                                  \
  X(out_d)                                                                         \
  X(out_h)                                                                         \
  X(out_w)                                                                         \
  X(kernel_z)                                                                      \
  X(kernel_y)                                                                      \
  X(kernel_x)                                                                      \
  X(stride_z)                                                                      \
  X(stride_y) /* that of a row is 2 */                                             \
  X(pad_z)                                                                         \
  X(pad_y) /* that of a row is 1 */

// What follows from the fields, computed once: the kernel would divide for each unit of work.
struct PhasesShape {
  int block_w, block_h;  // a consumer's pixels
  int wide, high, deep;  // blocks of a slice, slices of an image
  int blocks, groups, row_phases, units, depth;
  int most_z, most_y;         // taps of the rows
  int pack_rows, pack_parts;  // rows of taps that a block packs, and how many such parts there are
  Divider by_block_w, by_wide, by_high, by_deep, by_groups, by_row_phases, by_stride_z, by_stride_y;
  Divider by_pack_rows, by_pack_parts, by_kernel_y;
  Divider by_width;  // of the input
  Divider by_apart;  // pairs of blocks from one unit of a thread block to its next
};

struct PhasesParams {
#define UPCONV_DECLARE(name) int name;
  UPCONV_PHASES_FIELDS(UPCONV_DECLARE)
#undef UPCONV_DECLARE
  PhasesShape shape;
  const void* source;  // x, or grad_output
  const void* w;       // packed
  const void* bias;
  void* result;  // y, or grad_input
};

}  // namespace upconv
