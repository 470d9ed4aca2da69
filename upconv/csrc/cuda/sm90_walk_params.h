// What the planner tells the Hopper kernel that walks. upconv/planner/sm90_walk.py writes the same
// fields in the same order as flat integers; tests/test_sm90_walk.py compares the two files.
#pragma once

#include <cstdint>

#include "divider.h"

namespace upconv {

#define UPCONV_WALK_FIELDS(X)                                                                     \
  X(operand)  /* 0 TF32, 1 BF16, 2 FP16 */                                                        \
  X(tile_c)   /* channels of a tile; times kernel_z they are its columns */                       \
  X(blocks)   /* of 64 pixels that a consumer has */                                              \
  X(resident) /* all weights of a thread block's channels stay in shared memory */                \
  X(weight_stages)                                                                                \
  X(box_stages)                                                                                   \
  X(stage_pieces) /* of outputs, laid down for a consumer's writer */                             \
  X(strip)        /* octets, 8 pixels each: a plane is cut into columns so wide */                \
  X(skew)         /* 0 or 1: pixels left of the image with which octets begin, so that windows */ \
                  /* of the taps begin with an even pixel of a box */                             \
  X(lead)         /* pixels of a box before the first one that a tap wants */                     \
  X(box_w)        /* elements of a box */                                                         \
  X(box_h)                                                                                        \
  X(chunk) /* planes of the result that a unit of work walks through */                           \
  X(batch)                                                                                        \
  X(in_channels) /* of what is read */                                                            \
  X(in_d)        /* the first dimension of the walk: height where there is no depth */            \
  X(in_h)                                                                                         \
  X(in_w)                                                                                         \
  X(out_channels) /* of what is written */                                                        \
  X(out_d)                                                                                        \
  X(out_h)                                                                                        \
  X(out_w)                                                                                        \
  X(kernel_z)                                                                                     \
  X(kernel_y)                                                                                     \
  X(kernel_x)                                                                                     \
  X(flipped) /* tap k comes last instead of first: going forward */                               \
  X(low_z)   /* pixel q meets the first tap at input q + low */                                   \
  X(low_y)                                                                                        \
  X(low_x)                                                                                        \
  X(step_y)    /* and the next one so many rows further on */                                     \
  X(weight_in) /* elements of the weight from one channel to the next */                          \
  X(weight_out)

// What follows from the fields, computed once: the kernel would divide for each unit of work.
struct WalkShape {
  int runs, wide;     // blocks of a strip of a plane, and strips
  int blocks, pairs;  // blocks of one chunk of all images, and pairs of them
  int chunks, groups, units, depth;
  Divider by_groups, by_pairs, by_images, by_runs, by_strip;
};

struct WalkParams {
#define UPCONV_DECLARE(name) int name;
  UPCONV_WALK_FIELDS(UPCONV_DECLARE)
#undef UPCONV_DECLARE
  WalkShape shape;
  const void* source;  // x, or grad_output
  const void* w;       // packed
  const void* bias;
  void* result;  // y, or grad_input
};

}  // namespace upconv
