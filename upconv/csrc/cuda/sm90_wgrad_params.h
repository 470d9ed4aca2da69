// What the planner tells the Hopper kernel for the weight's gradient. upconv/planner/sm90_wgrad.py
// writes the same fields in the same order as flat integers; tests/test_sm90_wgrad.py compares
// them.
#pragma once

#include <cstdint>

#include "divider.h"

namespace upconv {

constexpr int kWgradJobs = 64;   // patterns of taps and grad_output channels
constexpr int kWgradPlanes = 8;  // parts of grad_output that one job reads
constexpr int kWgradRuns = 9;    // runs of one warp slot of a job: warpgroups times runs of each
constexpr int kWgradWarps = 4;   // of a warpgroup: 16 channels of grad_output each
constexpr int kWgradMaxStages = 16;
constexpr int kWgradBlocks = 16;  // of 64 channels of grad_output, whose jobs are known

// Scalars, all int. Point q of plane (phase_y, phase_x) is grad_output's column
// q * step_x + phase_x; a tap pairs the input's column i with point i * spread + shift. An "image"
// is one slice along the depth of one image of the batch.
#define UPCONV_WGRAD_FIELDS(X)                                                                   \
  X(operand)   /* 0 TF32, 1 BF16, 2 FP16 */                                                      \
  X(consumers) /* warpgroups that multiply: C */                                                 \
  X(tile_n)    /* input channels of one block: N */                                              \
  X(groups)    /* runs of taps of one warpgroup: G */                                            \
  X(run)       /* neighbouring taps of one run: T */                                             \
  X(pairs)     /* 1: planes hold words as they lie in memory */                                  \
  X(odd)       /* 16-bit rows that begin anywhere: 1: stride 1; 2 and 3: stride 2, taps of a run \
                  so many elements apart and one less */                                         \
  X(batch)                                                                                       \
  X(in_channels)                                                                                 \
  X(in_d)                                                                                        \
  X(in_h)                                                                                        \
  X(in_w)                                                                                        \
  X(out_channels)                                                                                \
  X(out_d)                                                                                       \
  X(out_h)                                                                                       \
  X(out_w)                                                                                       \
  X(in_group) /* channels of a group on either side */                                           \
  X(out_group)                                                                                   \
  X(in_volume) /* pixels of a channel */                                                         \
  X(out_volume)                                                                                  \
  X(step_z)                                                                                      \
  X(step_y)                                                                                      \
  X(step_x)        /* elements of grad_output from one point to the next */                      \
  X(spread)        /* points from one input column to the next */                                \
  X(taps)          /* of the weight */                                                           \
  X(tap_step)      /* of the weight, between neighbouring taps of a run */                       \
  X(segment)       /* columns of an image in one chunk, a multiple of 8 */                       \
  X(images)        /* images side by side in one chunk */                                        \
  X(filled)        /* points of a plane that are copied for each image of a chunk */             \
  X(segment_pitch) /* points from one image of a chunk to the next, a multiple of 4 */           \
  X(pitch)         /* points from one channel to the next: 8 i + 4; in order, 16 i + 8 */        \
  X(copy_input)    /* bytes of one copy of the input: 4, 8 or 16; 2: one element */              \
  X(slab)     /* bytes of a channel side by side: 16 to 128 by the TMA, swizzled; 0: copies */   \
  X(copy)     /* bytes of one copy of grad_output: 4, 8 or 16; 2: one element; 0: TMA */         \
  X(flat)     /* boxes of the TMA: 1: the rows of a slice follow each other as one; 2: all do */ \
  X(classes)  /* 2: channels that follow each other as one: 1, 2, 4 or, of odd rows, 8 */        \
  X(together) /* boxes: 1: one has all images of a chunk, side by side in each channel */        \
  X(rows)     /* channels of a plane: 16, 32, 48 or 64 */                                        \
  X(strips)                                                                                      \
  X(image_groups)                                                                                \
  X(planes)      /* most planes of a job */                                                      \
  X(stages)      /* ring of chunks */                                                            \
  X(lag)         /* chunks that are on their way behind the one being handed over, 1 to 4 */     \
  X(input_bytes) /* of a chunk: the input, each plane, and all of it */                          \
  X(plane_bytes)                                                                                 \
  X(stage_bytes)                                                                                 \
  X(workers)        /* blocks that share the pixels of a job, for the job with the fewest */     \
  X(channel_blocks) /* blocks of N input channels */                                             \
  X(jobs)

struct WgradPlane {
  int16_t channel;  // first of `rows` channels of grad_output
  int16_t depth;    // its slice along the depth, relative to the input's times step_z
  int16_t phase_y, phase_x;
  int16_t start;  // point of the plane that lies under column 0 of the input
  int16_t sum;    // so many slices of the input, the last ones, add it to the bias's gradient
};

// The taps of 16 channels of grad_output: one warp's share of a product.
struct WgradRun {
  int8_t plane;
  int8_t back;    // chunks back in the ring: 0 is the newest row
  int8_t offset;  // first point of the window, a multiple of 4 (in order: of 2)
  int8_t skew;    // points from there to the run's first
  int8_t high;  // 16-bit pairs: the half of a word, 0 or 1; by turns from the first (2), second (3)
  int8_t count;     // taps; 0: nothing is stored
  int16_t channel;  // first of its 16 channels of grad_output
  int16_t tap;      // position of the first tap in the weight
};

struct WgradJob {
  int16_t shift_y;     // plane row of chunk 0, relative to the unit's first input row
  int16_t extra_rows;  // chunks before the first input row has all its plane rows
  int16_t planes;
  int16_t consumers;  // warpgroups that have taps; the others pass chunks on
  int16_t workers;    // blocks that share the pixels: a job with fewer taps has fewer
  int16_t more;       // blocks of the jobs before, for each channel block, beyond `workers` of all
  int16_t sums;       // planes that are added to the bias's gradient,
  int16_t sum_channel;   // all of them with this first channel
  int32_t rows, longer;  // of each worker, and how many have one more
  WgradPlane plane[kWgradPlanes];
  WgradRun run[kWgradRuns][kWgradWarps];  // [warpgroup * groups + run][warp]
};

struct WgradParams {
  const void* x;
  const void* gy;
  void* gw;
  void* gb;          // where some job has sums; else nobody asks for it
  float* workspace;  // [block][consumer][accumulator][thread]
  int64_t bias_at;   // then [block][producer], from here on
  bool sums;         // does any job have some?
  int16_t first_job[kWgradBlocks], end_job[kWgradBlocks];  // that have taps of so many-th channels
  // The input as WGMMA's operand, in 16 bytes: the upper half of its descriptors, what the lower
  // half of the first has beside the address, and the way to the next two and four steps along K.
  uint32_t operand_high, operand_low, operand_one, operand_two;
  Divider by_in_h, by_in_d, by_strips, by_segment, by_images, by_boxes, by_channel_blocks, by_jobs;
  int box_bytes;    // of grad_output that one thread asks the TMA for
  int chunk_slabs;  // of the input
#define UPCONV_DECLARE(name) int name;
  UPCONV_WGRAD_FIELDS(UPCONV_DECLARE)
#undef UPCONV_DECLARE
  WgradJob job[kWgradJobs];
};
// Blocks of all jobs.
inline int wgrad_blocks(const WgradParams& p) {
  const WgradJob& last = p.job[p.jobs - 1];
  return (p.jobs * p.workers + last.more + last.workers - p.workers) * p.channel_blocks;
}
static_assert(sizeof(WgradParams) <= 32764, "beyond what a kernel takes as parameters");

}  // namespace upconv
