// What the planner tells the Hopper kernel. upconv/planner/sm90.py writes the same fields in the
// same order as flat integers; tests/test_sm90_plan.py compares the two files.
#pragma once

#include <cstdint>

#include "divider.h"

namespace upconv {

constexpr int kMaxKinds = 32;    // tap lists: one for each set of phases that share a 64-row block
constexpr int kMaxPairs = 1024;  // entries of all tap lists
constexpr int kMaxVisits = 128;  // planes of all units of a tile
constexpr int kStepPairs = 4;    // entries that share one weight block
constexpr int kStepBytes = kStepPairs * 2 * 64 * 16;  // a weight block: 4 pairs, 64 rows, 16 bytes
constexpr int kMaxJobs = 128;        // blocks of rows that one warpgroup accumulates together
constexpr int kMaxBlocks = 4;        // 64-row blocks in one job
constexpr int kMaxRowPhases = 64;    // that have taps, of all lanes
constexpr int kMaxWidthPhases = 16;  // that have taps and are stored together
constexpr int kRangeBlocks = 256;    // parts of the input whose ranges are found (split operands)

// Scalars, all int. "q" is the phase-local output coordinate: output = q * out_step + first,
// input = q * in_step + offset of the plane + place in the plane * in_step. Rows have lanes
// besides: `lanes` neighbouring output rows make one q, and a tile holds the input rows of all of
// them.
#define UPCONV_SM90_FIELDS(X)                                                                    \
  X(operand)       /* 0 TF32, 1 BF16, 2 FP16, 3 float32 as two FP16 numbers */                   \
  X(tile_n)        /* pixels of a tile: N of one WGMMA, or of one of each consumer (split) */    \
  X(job_blocks)    /* 64-row blocks of one warpgroup: MB */                                      \
  X(channels_last) /* layout of input and output */                                              \
  X(copy)          /* input: 0 vectors of 4 pixels, 1 4 bytes, 2 one element, */                 \
                   /* 3 TMA boxes of whole tiles, 4 of every few rows and channels */            \
  X(batch)                                                                                       \
  X(conv_groups) /* groups of the convolution; channels are those of one of them */              \
  X(in_channels)                                                                                 \
  X(in_d)                                                                                        \
  X(in_h)                                                                                        \
  X(in_w)                                                                                        \
  X(out_channels)                                                                                \
  X(out_d)                                                                                       \
  X(out_h)                                                                                       \
  X(out_w)                                                                                       \
  X(in_step_z)                                                                                   \
  X(in_step_y)                                                                                   \
  X(in_step_x)                                                                                   \
  X(lanes)      /* rows of in_step_y that one q row spans */                                     \
  X(tile_lanes) /* the same in the tile, where rows of one lane lie together */                  \
  X(out_step_z)                                                                                  \
  X(out_step_y)                                                                                  \
  X(out_step_x)                                                                                  \
  X(tiles_o) /* tiles over images */                                                             \
  X(tiles_z) /* a tile is one q deep */                                                          \
  X(tiles_y)                                                                                     \
  X(tiles_x)                                                                                     \
  X(tile_o)       /* images of one tile */                                                       \
  X(tile_h)       /* q rows of one tile */                                                       \
  X(tile_w)       /* q columns of one tile */                                                    \
  X(pitch)        /* pixels from one row of the tile to the next, multiple of 4 if not by TMA */ \
  X(strip)        /* pixels from 8 of its columns to the next 8: more where each has margins */  \
  X(row_columns)  /* accumulator columns from one row to the next */                             \
  X(rows)         /* rows of one image in the tile, margins included */                          \
  X(pixels)       /* pixels of the tile that are filled, a multiple of 4 */                      \
  X(block_pitch)  /* pixels from one 16-byte channel block to the next */                        \
  X(slice_blocks) /* 16-byte channel blocks of one slice, even */                                \
  X(parts)        /* numbers that make one input: 2 where it is split, a slot holds both */      \
  X(slices)       /* slices of one plane: they cover all input channels */                       \
  X(slots)        /* ring of input slices */                                                     \
  X(rings)        /* of weight blocks: 1 of both consumers, in turns; 2: each has its own */     \
  X(stages)       /* of one such ring */                                                         \
  X(resident)     /* 1: it holds all weights of the layer, loaded once */                        \
  X(raw_w)        /* TMA boxes: columns and rows of some channel blocks of a tile, */            \
  X(raw_h)        /* how many of these, their bytes, how many such lie in the ring */            \
  X(raw_blocks)                                                                                  \
  X(raw_bytes)                                                                                   \
  X(raw_chunks)                                                                                  \
  X(raw_rows)     /* rows of one box: all, or every raw_residues-th, */                          \
  X(raw_residues) /* which begin on the same place in 16 bytes */                                \
  X(raw_classes)  /* channels of one box: all, or every raw_classes-th */                        \
  X(raw_shift)    /* TMA sees rows in groups of 1 << raw_shift, */                               \
  X(raw_step)     /* and a box takes every raw_step-th group */                                  \
  X(raw_stride)   /* bytes from one box to the next */                                           \
  X(flat)         /* 1: an image is one long row to them; no tap reaches another pixel */        \
  X(alternate)    /* 1: the consumers take units in turn; 0: jobs of the same unit */            \
  X(turn_slices)  /* slices of one consumer's turn at the tensor cores */                        \
  X(sum_slices)   /* split: slices, and pairs of a list (a multiple of kStepPairs), that are */  \
  X(sum_pairs)    /* summed by themselves before they are added to the rest */                   \
  X(fold_rows)    /* output channels of one fold, 1 to 64 */                                     \
  X(folds)        /* depths times row phases of one block */                                     \
  X(row_folds)    /* row phases of one block; */                                                 \
  X(depth_apart)  /* its depths are so far apart */                                              \
  X(width_folds)  /* width phases of one block: neighbouring rows of it */                       \
  X(warp_lines)   /* channels times row phases of 16 rows of a block */                          \
  X(width_phases) /* width phases of a job, stored together; 0: each block by itself */          \
  X(paired)       /* 1: the consumers have one of two width phases each, stored together */      \
  X(line_pitch)   /* staging of stores by lines: elements from one to the next, and */           \
  X(line_columns) /* accumulator columns at a time; 0: other stores */                           \
  X(shifted)      /* 1: a tile is one row, and each line is staged as far from 16 bytes as */    \
                  /* it lies in the output */                                                    \
  X(fill_z)       /* bit r: depths, and rows, of residue r have no taps: the bias alone */       \
  X(fill_y)                                                                                      \
  X(fill_first)    /* 1: and with them the rows that have taps, before these are stored */       \
  X(vector)        /* elements of one output store, contiguous layout: 1, 2 or 16 bytes */       \
  X(weight_in)     /* weight stride of an input channel, in elements */                          \
  X(weight_out)    /* weight stride of an output channel */                                      \
  X(weight_group)  /* weight stride of a group of the convolution */                             \
  X(weight_blocks) /* packed weight blocks of such a group */                                    \
  X(job_groups)    /* pairs of jobs, or single jobs when consumers alternate */                  \
  X(row_phases)    /* entries of row_first */                                                    \
  X(kinds)                                                                                       \
  X(pairs)                                                                                       \
  X(visits)                                                                                      \
  X(jobs)

// Which tap of a dimension reads the input at `shift` for the phase that begins at `first`: the
// k < kernel with k * step = first * of_first + base - shift * of_shift, if there is one.
struct Sm90Axis {
  int kernel, of_first, base, of_shift, step;
};

struct Sm90Kind {
  int first_z;  // first output depth of the depth phase
  int row;      // first of its folds in row_first
  int first_x;  // first output column of the width phase, where blocks are stored by themselves
};

// One WGMMA: a tap of some folds (weights of the others are zero) and two of the slice's channel
// blocks.
struct Sm90Pair {
  int offset;       // from the start of the slice in shared memory, in 16 bytes
  int16_t block;    // first of the two channel blocks
  int16_t z, y, x;  // input = q * in_step + this
};

// Some of a tap list's pairs; they begin on multiples of kStepPairs.
struct Sm90List {
  uint16_t begin, count;
};

// A plane that the units of a job group load, and what their jobs do with each slice of it.
struct Sm90Visit {
  Sm90List list[2][kMaxBlocks];  // of each consumer and row block
  uint16_t steps[2];             // weight blocks of each consumer
  int z, y, x;                   // input = q * in_step + this
};

struct Sm90Job {
  int kind[kMaxBlocks];
  int channel[kMaxBlocks];  // first output channel of each block; past the end: nothing to do
  int weights;              // first packed weight block
  int steps;                // weight blocks of a unit, over all its row blocks, planes and slices
  int visit, visits;        // the planes of its group: first and number, 0 when no job has a tap
};

struct Sm90Params {
  const void* x;
  // packed: [group][job][plane][slice][step][channel block][64 rows][16 bytes]
  const uint4* w;
  const void* bias;
  void* y;
  uint2* ranges;  // split operands: kRangeBlocks of them, see sm90_split.cuh
#define UPCONV_DECLARE(name) int name;
  UPCONV_SM90_FIELDS(UPCONV_DECLARE)
#undef UPCONV_DECLARE
  Divider by_job_groups, by_conv_groups, by_tiles_x, by_tiles_y, by_tiles_z;
  Sm90Axis axis[3];                       // depth, rows, columns
  int16_t row_first[kMaxRowPhases];       // first output row of each row phase that has taps
  int16_t column_first[kMaxWidthPhases];  // first output column of each width phase of a job
  Sm90Kind kind[kMaxKinds];
  Sm90Pair pair[kMaxPairs];
  Sm90Visit visit[kMaxVisits];
  Sm90Job job[kMaxJobs];
};

// Weight blocks of all groups; a plan without taps still gets a pointer to one.
constexpr int64_t packed_blocks(const Sm90Params& p) {
  const int64_t blocks = static_cast<int64_t>(p.conv_groups) * p.weight_blocks;
  return blocks ? blocks : 1;
}

// Besides the TMA's description of the input.
static_assert(sizeof(Sm90Params) <= 32764 - 192, "more than a kernel takes as parameters");

}  // namespace upconv
