// Hopper kernel for the weight's gradient: sizes, shared memory, and the walk over the pixels. The
// idea, roles and pipelines are told in sm90_wgmma_wgrad.cuh.
#pragma once

#include "ptx.cuh"
#include "sm90_layout.cuh"
#include "sm90_wgrad_params.h"

namespace upconv::wgrad {

// --- Configuration ---------------------------------------------------------------------------

constexpr int kProducers = 128;
constexpr int kUnit = 32;       // pixels that one set of registers covers
constexpr int kPiecesAt = 384;  // the header: barriers, where the 8-pixel pieces of a chunk lie,
constexpr int kPlanesAt = 512;  // what producers know of the job's planes,
constexpr int kLateAt = 768;    // where the planes of each stage begin in their boxes,
constexpr int kSpotsAt = 1024;  // and the producers' own places in the present unit of work
constexpr int kHeaderBytes = kSpotsAt + 3 * kProducers * 16;
constexpr int kSlackBytes = 128;  // windows may reach past the last channel
constexpr int kRows = 64;         // most channels of a plane of grad_output

// How the input lies in shared memory. "Woven": word 8 t + v (16-bit pairs: 4 t + v) of a unit is
// word t of vector v; TF32 pairs do so in either half of a unit, with 4 t + v. 16-bit types without
// pairs keep their pixels in order, and so do pairs with single taps, which have no registers to
// share: weaving was a fifth of the shared memory's traffic where kernel = stride.
template <typename Operand, bool kPairs, int T>
struct Shape {
  static constexpr int kElement = sizeof(typename Operand::Element);
  static constexpr bool kWoven = kPairs ? T > 1 : kElement == 4;
  static constexpr int kWords = kUnit * kElement / 4;  // of a channel in one unit
  static constexpr int kVectors = kWords / 4;          // 16-byte vectors of the same
  // Words of a channel that lie side by side in memory and go to vectors of their own.
  static constexpr int kBeside = kPairs ? 4 : kVectors;
  // From one vector to the next. The 16 (32) bytes beyond N vectors spread over the banks what a
  // warp writes at a time: 32 words of a channel, 16 of two channels, or vectors in order.
  __host__ __device__ static constexpr int vector_step(int n) {
    return n * 16 + (kPairs && kElement == 2 ? 32 : 16);
  }
};

__host__ __device__ inline int element_bytes(const WgradParams& p) { return p.operand ? 2 : 4; }
__host__ __device__ inline int point_bytes(const WgradParams& p) {
  return p.pairs ? 4 : element_bytes(p);
}
// Does the TMA bring the input? A "slab" is 32, 64 or 128 bytes of a row, of N channels, swizzled:
// a warp's asynchronous copies of 16 bytes each to a place of its own took 32 wavefronts of the
// shared-memory port, and were half of all that kb57 has in BF16.
__host__ __device__ inline bool slabs(const WgradParams& p) { return p.slab > 0; }
__host__ __device__ inline int input_copied(const WgradParams& p) {
  return p.segment * p.images * element_bytes(p) * p.tile_n;
}
// Where 16 bytes of a channel of a chunk lie, `along` bytes along K.
__device__ __forceinline__ uint32_t slab_place(const WgradParams& p, int along, int channel) {
  const int slab = along & -p.slab;  // powers of two
  const uint32_t at = slab * p.tile_n + channel * p.slab + (along - slab);
  return at ^ (at >> 7 & (p.slab / 16 - 1)) << 4;
}
// Does the TMA bring grad_output? A box is one image's part of a plane, or that of all images:
// channel after channel.
__host__ __device__ inline bool boxes(const WgradParams& p) { return p.copy == 0; }
__host__ __device__ inline int boxes_of_plane(const WgradParams& p) {
  return (p.together ? 1 : p.images) * p.classes;
}
// Where planes do not begin on 16 bytes, every second or fourth does: their channels are classes,
// with boxes of their own, and lie one class after the other.
__host__ __device__ inline int class_rows(const WgradParams& p) { return p.rows / p.classes; }
// Points of grad_output from one channel to the next, those of a row, and of 16 bytes. A pair of
// 16-bit elements is one point. No divisions: each took 120 cycles, for every chunk.
__device__ __forceinline__ bool halves(const WgradParams& p) { return p.pairs && p.operand; }
__device__ __forceinline__ int volume_points(const WgradParams& p) {
  return p.out_volume >> static_cast<int>(halves(p));
}
__device__ __forceinline__ int row_points(const WgradParams& p) {
  return p.out_w >> static_cast<int>(halves(p));
}
__device__ __forceinline__ int vector_points(const WgradParams& p) {
  return point_bytes(p) == 4 ? 4 : 8;
}
// The channel of grad_output in a row of shared memory.
__device__ __forceinline__ int channel_of_row(const WgradParams& p, int row) {
  const int inside = row % kRows, rows = class_rows(p);
  return row - inside + inside % rows * p.classes + inside / rows;
}
__host__ __device__ inline int chunk_pixels(const WgradParams& p) { return p.segment * p.images; }
__host__ __device__ inline int shared_bytes(const WgradParams& p) {
  return kHeaderBytes + p.stages * p.stage_bytes + kSlackBytes;
}

static_assert(3 * 8 * kWgradMaxStages <= kPiecesAt && kWgradPlanes * 32 <= kLateAt - kPlanesAt &&
                  2 * kWgradMaxStages * kWgradPlanes <= kSpotsAt - kLateAt,
              "the header is too small");

struct Shared {
  uint32_t full, empty, raw;  // barrier arrays
  int* pieces;                // point of each 8-pixel piece of a chunk
  uint32_t planes, late, spots, stages;

  __device__ __forceinline__ explicit Shared(unsigned char* memory) {
    full = ptx::shared_address(memory);
    empty = full + 8 * kWgradMaxStages;
    raw = empty + 8 * kWgradMaxStages;
    pieces = reinterpret_cast<int*>(memory + kPiecesAt);
    planes = full + kPlanesAt;
    late = full + kLateAt;
    spots = full + kSpotsAt;
    stages = full + kHeaderBytes;
  }

  // Points before a plane in its box, in the given stage.
  __device__ __forceinline__ uint32_t late_at(int stage, int plane) const {
    return late + (stage * kWgradPlanes + plane) * 2;
  }
};

// --- The input as an operand -----------------------------------------------------------------

// Fills in how WGMMA finds the input. Without swizzle a step along K has two vectors, which lie
// anywhere; in a slab they follow each other.
inline void describe_operand(WgradParams* plan) {
  WgradParams& p = *plan;
  const bool small = element_bytes(p) == 2, woven = p.pairs ? p.run > 1 : !small;
  if (slabs(p)) {
    const uint32_t rows = 8 * p.slab >> 4, slab = p.tile_n * p.slab >> 4;
    const uint32_t mode = p.slab == 128 ? 1 : p.slab == 64 ? 2 : p.slab == 32 ? 3 : 0;
    p.operand_high = mode << 30 | rows;
    p.operand_low = (p.slab == 16 ? slab : 1) << 16;  // means something without swizzle alone
    p.operand_one = p.slab == 16 ? 2 * slab : p.slab == 32 ? slab : 2;
    p.operand_two = p.slab <= 32 ? 2 * p.operand_one : p.slab == 64 ? slab : 4;
  } else {
    const uint32_t vector = (p.tile_n * 16 + (p.pairs && small ? 32 : 16)) >> 4;
    const uint32_t vectors = kUnit * element_bytes(p) / 16;
    p.operand_high = 128 >> 4;
    p.operand_low = (woven ? vectors / 2 * vector : vector) << 16;
    p.operand_one = woven ? vector : 2 * vector;
    p.operand_two = 2 * p.operand_one;
  }
}

// And what the walk over the pixels divides by.
inline void describe_walk(WgradParams* plan) {
  WgradParams& p = *plan;
  p.by_in_h = Divider(p.in_h);
  p.by_in_d = Divider(p.in_d);
  p.by_strips = Divider(p.strips);
  p.by_segment = Divider(p.segment);
  p.by_images = Divider(p.images);
  p.by_boxes = Divider(boxes_of_plane(p));
  p.by_channel_blocks = Divider(p.channel_blocks);
  p.by_jobs = Divider(p.jobs);
  p.box_bytes = p.plane_bytes / boxes_of_plane(p);
  p.chunk_slabs = slabs(p) ? p.segment * p.images * element_bytes(p) / p.slab : 0;
}

// --- The walk --------------------------------------------------------------------------------

// A unit of work: a strip of columns of some images (slices along the depth), `rows` input rows
// from `row` on. Its chunks are those rows, and `extra_rows` more rows of grad_output before the
// first is complete. The rows of all strips and images are numbered through; `from` to `end` is
// what is left.
struct Unit {
  int image, row, column, rows;

  __device__ __forceinline__ Unit(const WgradParams& p, int from, int end) {
    const int strip = p.by_in_h(from), group = p.by_strips(strip);
    row = from - strip * p.in_h;
    column = (strip - group * p.strips) * p.segment;
    image = group * p.images;
    rows = min(end - from, p.in_h - row);
  }
};

// The block of a worker, job and block of input channels: blocks that read the same pixels stand
// together; those that only some jobs have come last.
__device__ __forceinline__ int block_of(const WgradParams& p, int worker, int job, int channels) {
  if (worker < p.workers) return (worker * p.channel_blocks + channels) * p.jobs + job;
  const int more = p.job[job].more + worker - p.workers;
  return (p.workers * p.jobs + more) * p.channel_blocks + channels;
}

// What one block does: a job, a block of input channels, and a share of the rows.
struct Share {
  int job, channel, first, end;

  __device__ __forceinline__ explicit Share(const WgradParams& p) {
    const int kinds = p.jobs * p.channel_blocks;
    const int number = p.by_jobs(blockIdx.x);
    int worker = p.by_channel_blocks(number);
    job = blockIdx.x - number * p.jobs;
    channel = (number - worker * p.channel_blocks) * p.tile_n;
    if (worker >= p.workers) {
      const int rest = blockIdx.x - kinds * p.workers, more = p.by_channel_blocks(rest);
      channel = (rest - more * p.channel_blocks) * p.tile_n;
      job = p.jobs - 1;
      while (p.job[job].more > more) --job;
      worker = p.workers + more - p.job[job].more;
    }
    const WgradJob& mine = p.job[job];
    first = worker * mine.rows + min(worker, mine.longer);
    end = first + mine.rows + (worker < mine.longer ? 1 : 0);
  }
};

// A place in the ring of chunks, in one register: index, how often it has come round, and
// something to keep.
struct Slot {
  uint32_t word;

  __device__ __forceinline__ explicit Slot(int kept = 0) : word(kept << 16) {}
  __device__ __forceinline__ int index() const { return word & 0xff; }
  __device__ __forceinline__ uint32_t parity() const { return word >> 8 & 1; }
  __device__ __forceinline__ int kept() const { return word >> 16; }
  __device__ __forceinline__ void advance(int stages) {
    ++word;
    if (index() == stages) word = (word ^ 0x100) & ~0xffu;
  }
};

}  // namespace upconv::wgrad
