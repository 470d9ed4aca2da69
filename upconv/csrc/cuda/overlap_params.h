// What the planner tells the kernel for few output channels. upconv/planner/overlap.py writes the
// same fields in the same order as flat integers, then the lists; tests/test_overlap_plan.py
// compares the two files.
#pragma once

#include <cstdint>

#include "divider.h"

namespace upconv {

constexpr int kOverlapThreads = 512;  // of a block, at most
constexpr int kOverlapPackThreads = 128;
constexpr int kOverlapShifts = 64;  // input rows that an output row meets, over all phases
constexpr int kOverlapSums = 64;    // output channels times phases of depth and height
constexpr int kOverlapPhases = 64;  // of the width

// Every tile of a warp that the planner may ask for, pixels in 16s and columns in 8s: where the TMA
// brings boxes, where copies do, and where float32 must not be rounded ("split", boxes alone). The
// same lists are in upconv/planner/overlap.py.
#define UPCONV_OVERLAP_BOX_TILES(X) \
  X(4, 1) X(4, 2) X(4, 3) X(4, 4) X(3, 2) X(3, 3) X(3, 4) X(2, 4) X(2, 8)
#define UPCONV_OVERLAP_COPY_TILES(X) X(4, 2) X(4, 4) X(2, 8)
#define UPCONV_OVERLAP_SPLIT_TILES(X) X(4, 1) X(2, 2) X(2, 4)

// Scalars, all int. Channels are those of one group. A "place" b has the outputs b * stride + phase
// of a row, whose taps meet inputs b + shift; in depth and height, where no two phases share a
// store, b * stride + phase - padding, so that as many phases as can be meet the same inputs.
#define UPCONV_OVERLAP_FIELDS(X)                                                      \
  X(type)    /* 0 float32 as TF32, 1 bfloat16, 2 float16, 3 float32 as such */        \
  X(boxes)   /* 1: the TMA brings boxes; 0: copies */                                 \
  X(tiles_m) /* tiles of 16 pixels of a warp */                                       \
  X(tiles_n) /* tiles of 8 columns: sums, times the taps of the width */              \
  X(warps)                                                                            \
  X(warps_x)  /* warps side by side; the others take further rows of places */        \
  X(stages)   /* boxes in shared memory, 2 or 3 */                                    \
  X(steps)    /* of K in a box: 8 or 16 channels each */                              \
  X(together) /* sums that are added up at a time */                                  \
  X(batch)                                                                            \
  X(groups)                                                                           \
  X(in_channels)                                                                      \
  X(out_channels)                                                                     \
  X(in_d)                                                                             \
  X(in_h)                                                                             \
  X(in_w)                                                                             \
  X(out_d)                                                                            \
  X(out_h)                                                                            \
  X(out_w)                                                                            \
  X(kernel_z)                                                                         \
  X(kernel_y)                                                                         \
  X(kernel_x)                                                                         \
  X(stride_z)                                                                         \
  X(stride_y)                                                                         \
  X(stride_x)                                                                         \
  X(padding_z)                                                                        \
  X(padding_y)                                                                        \
  X(dilation_z)                                                                       \
  X(dilation_y)                                                                       \
  X(low_z)  /* the least shift, of a box of */                                        \
  X(planes) /* planes, */                                                             \
  X(low_y)                                                                            \
  X(box_rows) /* rows each, */                                                        \
  X(low_x)                                                                            \
  X(box_columns) /* and columns */                                                    \
  X(pitch)       /* elements of a row of a box */                                     \
  X(vector)      /* bytes of one copy: 2 (through registers), 4, 8 or 16 */           \
  X(first_z)     /* places: the first, */                                             \
  X(count_z)     /* and how many */                                                   \
  X(first_y)                                                                          \
  X(count_y)                                                                          \
  X(first_x)   /* input column of the first tile */                                   \
  X(tiles_x)   /* of a block, along a row */                                          \
  X(valid)     /* places of a warp's pixels whose taps are all among them */          \
  X(sum_pitch) /* floats of a row of sums */                                          \
  X(sum_rows)  /* of a warp */                                                        \
  X(tap_pitch) /* floats from a tap to the next one of the same phase of the width */ \
  X(most_taps) /* of a phase of the width */                                          \
  X(store)     /* outputs of a store: 1, 2 or 4 */                                    \
  X(box_bytes)                                                                        \
  X(weight_bytes)                                                                     \
  X(shared_bytes) /* of a block */                                                    \
  X(shares)       /* blocks of a group */                                             \
  X(shifts)                                                                           \
  X(shifts_all) /* the first of them: every tile of columns has a tap there */        \
  X(sums)                                                                             \
  X(phases)

// Input rows that places meet.
#define UPCONV_OVERLAP_SHIFT_FIELDS(X) \
  X(z)                                 \
  X(y)                                 \
  X(tiles) /* bits: tiles of 8 columns with a tap there */

// An output channel with a phase of depth and height, the first of its columns, and the first of
// its rows among those that are laid down together; -1: it has no taps.
#define UPCONV_OVERLAP_SUM_FIELDS(X) \
  X(channel)                         \
  X(z)                               \
  X(y)                               \
  X(column)                          \
  X(line)

// Where the first tap of a phase of the width lies from a place on, in floats, and how many.
#define UPCONV_OVERLAP_PHASE_FIELDS(X) \
  X(place)                             \
  X(taps)

#define UPCONV_DECLARE(name) int name;
struct OverlapShift {
  UPCONV_OVERLAP_SHIFT_FIELDS(UPCONV_DECLARE)
};
struct OverlapSum {
  UPCONV_OVERLAP_SUM_FIELDS(UPCONV_DECLARE)
};
struct OverlapPhase {
  UPCONV_OVERLAP_PHASE_FIELDS(UPCONV_DECLARE)
};

// The input as the TMA sees it: a CUtensorMap, where boxes are brought by it.
struct alignas(64) OverlapBoxes {
  unsigned char map[128];
};

struct OverlapParams {
  const void* x;
  const void* w;     // packed
  const void* bias;  // null where there is none
  void* y;
  UPCONV_OVERLAP_FIELDS(UPCONV_DECLARE)
  OverlapShift shift[kOverlapShifts];
  OverlapSum sum[kOverlapSums];
  OverlapPhase phase[kOverlapPhases];
  // Made from the above when the plan is read.
  int64_t in_plane, out_plane;  // elements of one channel
  int rows;                     // of places, of a block
  int channels;                 // of a box, a power of two
  int chunks;                   // boxes of a unit
  int units_y, units;           // rows of blocks in a plane, and units of a group
  int each, more;               // units of a block; the first `more` have one more
  int even_taps;                // of a phase of the width, or one less; 0: neither
  Divider by_warps_x, by_shares, by_tiles_x, by_units_y, by_count_z, by_shifts, by_tiles_n;
  Divider by_rows, by_dilation_z, by_dilation_y;
};
#undef UPCONV_DECLARE

}  // namespace upconv
