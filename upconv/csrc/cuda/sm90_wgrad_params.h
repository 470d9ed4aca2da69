// What the planner tells the Hopper kernel for the weight's gradient. upconv/planner/sm90_wgrad.py
// writes the same fields in the same order as flat integers; tests/test_sm90_wgrad.py compares
// them.
#pragma once

#include <cstdint>

namespace upconv {

constexpr int kWgradJobs = 64;      // patterns of taps and grad_output channels
constexpr int kWgradPlanes = 8;     // parts of grad_output that one job reads
constexpr int kWgradConsumers = 3;  // warpgroups that multiply
constexpr int kWgradGroups = 4;     // runs of taps of one warpgroup
constexpr int kWgradTaps = 4;       // neighbouring taps of one run
constexpr int kWgradMaxStages = 16;

// Scalars, all int. A pixel of plane (phase_y, phase_x) at point q is grad_output's pixel
// q * step + phase; a tap pairs the input's pixel i with the plane's pixel i + shift.
#define UPCONV_WGRAD_FIELDS(X)                                                                    \
  X(operand)   /* 0 TF32, 1 BF16, 2 FP16 */                                                       \
  X(consumers) /* warpgroups that multiply: C */                                                  \
  X(tile_n)    /* input channels of one block: N */                                               \
  X(groups)    /* runs of taps of one warpgroup: G */                                             \
  X(run)       /* neighbouring taps of one run: T */                                              \
  X(pairs)     /* 1: planes hold both width phases of a 16-bit type, 4 bytes a point */           \
  X(batch)                                                                                        \
  X(in_channels)                                                                                  \
  X(in_h)                                                                                         \
  X(in_w)                                                                                         \
  X(out_channels)                                                                                 \
  X(out_h)                                                                                        \
  X(out_w)                                                                                        \
  X(step_y)                                                                                       \
  X(step_x)                                                                                       \
  X(taps)          /* of the weight */                                                            \
  X(segment)       /* columns of an image in one chunk, a multiple of 8 */                        \
  X(images)        /* images side by side in one chunk */                                         \
  X(filled)        /* points of a plane that are copied for each image of a chunk */              \
  X(segment_pitch) /* points from one image of a chunk to the next, a multiple of 4 */            \
  X(pitch)         /* points from one channel to the next: 8 i + 4; in order, 16 i + 8 */         \
  X(copy_input)    /* bytes of one copy of the input: 4, in order also 8 or 16; 2: one element */ \
  X(band_rows)     /* input rows that follow each other in one unit of work */                    \
  X(bands)                                                                                        \
  X(strips)                                                                                       \
  X(image_groups)                                                                                 \
  X(planes)      /* most planes of a job */                                                       \
  X(stages)      /* ring of chunks */                                                             \
  X(lag)         /* chunks that are on their way behind the one being handed over, 1 to 4 */      \
  X(input_bytes) /* of a chunk: the input, each plane, and all of it */                           \
  X(plane_bytes)                                                                                  \
  X(stage_bytes)                                                                                  \
  X(workers)        /* blocks that share the pixels of a job */                                   \
  X(channel_blocks) /* blocks of N input channels */                                              \
  X(jobs)

struct WgradPlane {
  int16_t channel;  // first of 64 channels of grad_output
  int16_t phase_y, phase_x;
  int16_t start;  // point of the plane that lies under column 0 of the input
};

struct WgradGroup {
  int16_t plane;
  int16_t back;             // chunks back in the ring: 0 is the newest row
  int16_t offset;           // first point of the window, a multiple of 4 (in order: of 2)
  int16_t high;             // pairs: 1 for the second width phase; 2 more: one point on
  int16_t tap[kWgradTaps];  // position in the weight; -1: none, nothing is stored
};

struct WgradConsumer {
  int16_t active;
  int16_t channel;  // first of its 64 channels of grad_output
  WgradGroup group[kWgradGroups];
};

struct WgradJob {
  int16_t shift_y;     // plane row of chunk 0, relative to the unit's first input row
  int16_t extra_rows;  // chunks before the first input row has all its plane rows
  int16_t copy;        // bytes of one copy of grad_output: 4, 8 or 16; 2: element by element
  int16_t planes;
  WgradPlane plane[kWgradPlanes];
  WgradConsumer consumer[kWgradConsumers];
};

struct WgradParams {
  const void* x;
  const void* gy;
  void* gw;
  float* workspace;  // [worker][job][channel block][consumer][accumulator][thread]
#define UPCONV_DECLARE(name) int name;
  UPCONV_WGRAD_FIELDS(UPCONV_DECLARE)
#undef UPCONV_DECLARE
  WgradJob job[kWgradJobs];
};

}  // namespace upconv
