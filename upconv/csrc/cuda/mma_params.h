// What the planner tells the mma.sync kernel. upconv/planner/mma.py writes the same fields in the
// same order as flat integers; tests/test_mma_plan.py compares the two files.
#pragma once

#include <cstdint>

namespace upconv {

constexpr int kMmaMaxKinds = 64;    // column sets: phases that one block computes together
constexpr int kMmaMaxRows = 256;    // (depth, height) phases, over all kinds
constexpr int kMmaMaxPhases = 256;  // phases with taps, over all kinds
constexpr int kMmaMaxSteps = 1024;  // steps of one slice, over all kinds
constexpr int kMmaMaxStages = 256;  // weight stages of one slice, over all kinds
constexpr int kMmaMaxTaps = 2048;   // (shift, phase) entries, over all kinds
constexpr int kMmaDepth = 3;        // ring of weight stages
constexpr int kMmaChunkWords = 16;  // registers of a thread for input on its way

// Scalars, all int. "q" is the phase-local output coordinate: output = q * out_step + first,
// input = q * in_step + shift. A slot is 16 bytes of shared memory: the channels of one channel
// block (4 of 32 bits, 8 of 16 bits) at one pixel. Channels are those of one group.
#define UPCONV_MMA_FIELDS(X)                                                                 \
  X(operand)     /* 0 TF32, 1 BF16, 2 FP16, 3 float32 by three TF32 products */              \
  X(warp_pixels) /* of one warp: 64, or 32 where all channels are one slice */               \
  X(warps_m)     /* warps along the pixels */                                                \
  X(warps_n)     /* warps along the columns */                                               \
  X(copy)        /* neighbouring pixels of the input that are read at a time: 1, 2 or 4 */   \
  X(batch)                                                                                   \
  X(groups)                                                                                  \
  X(in_channels)                                                                             \
  X(in_d)                                                                                    \
  X(in_h)                                                                                    \
  X(in_w)                                                                                    \
  X(out_channels)                                                                            \
  X(out_d)                                                                                   \
  X(out_h)                                                                                   \
  X(out_w)                                                                                   \
  X(in_step_z)                                                                               \
  X(in_step_y)                                                                               \
  X(in_step_x)                                                                               \
  X(out_step_z)                                                                              \
  X(out_step_y)                                                                              \
  X(out_step_x)                                                                              \
  X(tiles_o) /* tiles over images */                                                         \
  X(tiles_z)                                                                                 \
  X(tiles_y)                                                                                 \
  X(tiles_x)                                                                                 \
  X(tile_o) /* images of one tile */                                                         \
  X(tile_z) /* q planes, rows and columns of one tile */                                     \
  X(tile_y)                                                                                  \
  X(tile_x)                                                                                  \
  X(fill_z) /* input planes, rows and columns that a tile reads */                           \
  X(fill_y)                                                                                  \
  X(fill_x)                                                                                  \
  X(shift_z) /* input of the tile's first element, relative to q * in_step */                \
  X(shift_y)                                                                                 \
  X(shift_x)                                                                                 \
  X(pitch_o) /* slots from one image of the tile to the next */                              \
  X(pitch_z)                                                                                 \
  X(pitch_y)                                                                                 \
  X(lane_x)       /* slots from one residue of the columns modulo in_step_x to the next */   \
  X(plane)        /* slots from one channel block to the next */                             \
  X(slice_blocks) /* channel blocks of one slice */                                          \
  X(slices)       /* slices that cover all input channels */                                 \
  X(stage_bytes)  /* one stage of the weight ring */                                         \
  X(ring_at)      /* where things lie in shared memory, in bytes: weight ring, */            \
  X(offsets_at)   /* table of global offsets of the tile, */                                 \
  X(positions_at) /* table of their slots, */                                                \
  X(steps_at)     /* steps of the kind, */                                                   \
  X(stages_at)    /* its stages, */                                                          \
  X(barriers_at)  /* one barrier for each place of the ring; */                              \
  X(rows_at)      /* table of output rows, after the staging memory; */                      \
  X(phases_at)    /* after it all: where the kind's phases begin in the staging memory, */   \
  X(bias_at)      /* bias of the chunk's channels */                                         \
  X(shared_bytes)                                                                            \
  X(chunk) /* output channels of one block */                                                \
  X(chunks)                                                                                  \
  X(spread)        /* 1: every warp has all phases, for phase_columns channels of its own */ \
  X(phase_columns) /* columns from one phase to the next */                                  \
  X(segment)       /* elements of one output row in the staging memory */                    \
  X(channel_pitch) /* elements from one channel to the next there */                         \
  X(vector)        /* elements of one output store */                                        \
  X(row_lanes)     /* lanes that store one row together, a power of two */                   \
  X(weight_in)     /* weight stride of an input channel, in elements */                      \
  X(weight_out)    /* weight stride of an output channel */                                  \
  X(weight_group)  /* weight stride of a group */                                            \
  X(kinds)                                                                                   \
  X(rows)                                                                                    \
  X(phases)                                                                                  \
  X(steps)                                                                                   \
  X(stages)                                                                                  \
  X(taps)

// The (depth, height) phases that one block computes, each with all its width phases.
struct MmaKind {
  int row_begin, row_end;
  int phase_begin, phase_end;  // columns are these phases times the channels of the chunk
  int step_begin, step_end;    // steps of one slice
  int stage_begin, stage_end;
  int uniform;      // 1: all steps of a stage have the same tiles
  int taps;         // first entry of its (shift, phase) table
  int prefill;      // 1: some width phase has no tap, its columns hold the bias
  int slice_tiles;  // weight tiles of one slice
  int weights;      // first weight tile of the kind
};

struct MmaRow {
  int16_t first_z, first_y;
  int base;  // of its staging rows, in elements; -1: no tap at all, bias only
};

// One product of 16 K: two slots, of the same or of different channel blocks and shifts.
struct MmaStep {
  uint16_t offset[2];  // from the tile's first slot
  uint32_t tiles;      // bit j: column tile j (8 columns) has weights in this step
};

struct MmaStage {
  uint32_t first;        // byte of the slice's packed weights
  uint32_t bytes_steps;  // bytes / 16 in the low half, number of steps in the high half
};

// A divisor whose quotients take 3 instructions instead of some 30.
struct MmaDivisor {
  uint32_t multiplier, shift;
};

struct MmaParams {
  const void* x;
  const uint4* w;  // packed: [kind][group][chunk][slice][step][tile][lane]
  const void* bias;
  void* y;
#define UPCONV_DECLARE(name) int name;
  UPCONV_MMA_FIELDS(UPCONV_DECLARE)
#undef UPCONV_DECLARE
  // Made from the above when the plan is read.
  MmaDivisor by_kinds, by_chunks, by_groups, by_tiles_x, by_tiles_y, by_tiles_z;
  MmaDivisor by_tile_x, by_tile_y, by_tile_z, by_fill_x, by_fill_y, by_fill_z, by_in_step_x;
  MmaDivisor by_phase_columns;
  int items;           // groups of `copy` pixels that a tile reads,
  int slice_items;     // times the channel blocks of a slice,
  int chunks_a_slice;  // and how often the block's threads go through them
  MmaDivisor by_items;
  MmaKind kind[kMmaMaxKinds];
  MmaRow row[kMmaMaxRows];
  int phase_base[kMmaMaxPhases];  // staging element of the phase's first output
  MmaStep step[kMmaMaxSteps];
  MmaStage stage[kMmaMaxStages];
};

// What only the packing of the weights needs.
struct MmaPack {
  struct Source {
    int16_t shift[2];  // of the kind's shifts, for each half of the step
    int8_t block[2];   // channel block of the slice; -1: the half is empty
    uint16_t first;    // weight tiles of the slice before this step
  };
  Source source[kMmaMaxSteps];
  int16_t tap[kMmaMaxTaps];  // [kind][shift][phase]: weight position, -1: none
};

static_assert(sizeof(MmaParams) + sizeof(MmaPack) <= 32764, "one launch takes no more");

}  // namespace upconv
