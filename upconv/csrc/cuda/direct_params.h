// What the planner tells the CUDA-core kernel. upconv/planner/direct.py writes the same fields in
// the same order as flat integers; tests/test_direct_plan.py compares the two files.
#pragma once

#include <cstdint>

namespace upconv {

constexpr int kDirectMaxThreads = 128;
constexpr int kDirectMaxKinds = 128;    // sets of phases that one thread accumulates
constexpr int kDirectMaxFirsts = 256;   // row phases of all kinds
constexpr int kDirectMaxOffsets = 512;  // places of the tile that taps read, over all kinds
constexpr int kDirectMaxTaps = 4608;    // weight positions: a kind's offsets times its phases

// Scalars, all int. "q" is the phase-local coordinate: output = q * out_step + first,
// input = q * in_step + shift. Channels are those of one group.
#define UPCONV_DIRECT_FIELDS(X)                                                      \
  X(type)      /* 0 float32, 1 float64, 2 bfloat16, 3 float16 */                     \
  X(rows)      /* outputs of a thread at one point: channels x folds x width */      \
  X(warps)     /* of a block: 1, 2 or 4 */                                           \
  X(row_warps) /* those of them that differ in rows; the others differ in points */  \
  X(width)     /* neighbouring width phases of a thread */                           \
  X(folds)     /* depth and height phases of a thread */                             \
  X(batch)                                                                           \
  X(groups)                                                                          \
  X(in_channels)                                                                     \
  X(out_channels)                                                                    \
  X(in_d)                                                                            \
  X(in_h)                                                                            \
  X(in_w)                                                                            \
  X(out_d)                                                                           \
  X(out_h)                                                                           \
  X(out_w)                                                                           \
  X(in_step_z)                                                                       \
  X(in_step_y)                                                                       \
  X(in_step_x)                                                                       \
  X(out_step_z)                                                                      \
  X(out_step_y)                                                                      \
  X(out_step_x)                                                                      \
  X(shift_z) /* input of tile position 0, relative to q * in_step */                 \
  X(shift_y)                                                                         \
  X(shift_x)                                                                         \
  X(tiles_z)                                                                         \
  X(tiles_y)                                                                         \
  X(tiles_x)                                                                         \
  X(tile_z) /* points (q) of one tile */                                             \
  X(tile_y)                                                                          \
  X(tile_x)                                                                          \
  X(slabs)          /* depth of the tile, margins included */                        \
  X(tile_rows)      /* rows of one slab, margins included */                         \
  X(pitch)          /* positions of one row, margins included */                     \
  X(plane)          /* positions from one residue of the input step to the next */   \
  X(channel)        /* positions from one channel of the tile to the next */         \
  X(chunk)          /* channels in the tile at a time */                             \
  X(set_aside)      /* after channel c where (c & this) == this; -1: never */        \
  X(weight_in)      /* weight stride of an input channel, in elements */             \
  X(weight_out)     /* weight stride of an output channel */                         \
  X(weight_group)   /* weight stride of a group */                                   \
  X(most_taps)      /* offsets of the kind that has most */                          \
  X(vector)         /* elements of one store */                                      \
  X(straight)       /* 1: sums go from registers to the output */                    \
  X(row_lanes)      /* lanes that store one row of the tile, if not straight */      \
  X(channel_blocks) /* sets of output channels that threads divide a group into */   \
  X(row_blocks)     /* blocks that divide the kinds and channel blocks of a group */ \
  X(blocks)         /* blocks that divide the tiles */                               \
  X(repeats)        /* tiles of a block */                                           \
  X(shared_bytes)                                                                    \
  X(kinds)                                                                           \
  X(firsts)                                                                          \
  X(offsets)                                                                         \
  X(taps)

// The phases that one thread accumulates.
struct DirectKind {
  int first_x;     // first output column
  int columns;     // width phases there are; fewer than `width` at the end
  int firsts;      // its `folds` entries of first
  int begin, end;  // its offsets
  int taps;        // its taps: [offset][fold][width phase]
};

struct DirectFirst {
  int z, y;  // first output slab and row of a fold; far outside where there is no such phase
};

struct DirectParams {
  const void* x;
  const void* w;
  const void* bias;
  void* y;
#define UPCONV_DECLARE(name) int name;
  UPCONV_DIRECT_FIELDS(UPCONV_DECLARE)
#undef UPCONV_DECLARE
  // Made from the above when the plan is read: as parameters they take up no registers.
  int64_t in_plane, out_plane;                                   // elements of one channel
  float by_width, by_tile_y, by_phases, by_pitch, by_tile_rows;  // reciprocals
  int threads;
  int phases;                  // of a thread: folds x width
  int tap_bytes;               // of shared memory, for the taps of all sets of rows
  int step_z, step_y, step_x;  // `threads` positions further in the tile
  int thread_channels;         // output channels of a thread
  int row_shift;               // row_lanes as a power of two
  int skew;                    // words put in after every 32 of a stored line, against conflicts
  DirectKind kind[kDirectMaxKinds];
  DirectFirst first[kDirectMaxFirsts];
  int offset[kDirectMaxOffsets];  // from a point's own position in the tile
  int16_t tap[kDirectMaxTaps];    // weight position, -1: none
};

}  // namespace upconv
