// Hopper kernel that walks: sizes, units of work, shared memory, and which pixels a thread has. The
// idea, roles and pipelines are told in sm90_walk.cuh.
#pragma once

#include "ptx.cuh"
#include "sm90_layout.cuh"
#include "sm90_pixels.cuh"
#include "sm90_rings.cuh"
#include "sm90_staging.cuh"
#include "sm90_walk_params.h"

namespace upconv::walk {

using pixels::Channels, pixels::high_halves, pixels::kPieceBytes, pixels::kStepBytes,
    pixels::low_halves, pixels::two_halves;
using rings::kBarrierBytes, rings::kBlock, rings::kConsumers, rings::kConsumerWarps,
    rings::kMaxStages, rings::kThreads, rings::Rings, rings::Slot;

// --- Configuration ---------------------------------------------------------------------------

constexpr int kOctet = 8;  // pixels that always lie side by side
constexpr int kMaxChannels = 128;
constexpr int kMaxOctets = 32;                // of a consumer
constexpr int kBiasBytes = kMaxChannels * 4;  // of a consumer
constexpr int kTableBytes = kMaxOctets * 8;   // likewise: where its octets go
constexpr int kHeaderBytes =
    kBarrierBytes + staging::kBarrierBytes + kConsumers * (kBiasBytes + kTableBytes);

__host__ __device__ inline int element_bytes(const WalkParams& p) { return p.operand == 0 ? 4 : 2; }
// Products for which the channels of a box are enough. Where a box serves several blocks of pixels,
// one product of each keeps the tensor cores busy for long enough.
__host__ __device__ constexpr int steps_of(int blocks) { return blocks == 1 ? 2 : 1; }
__host__ __device__ inline int box_channels(const WalkParams& p) {
  return steps_of(p.blocks) * kStepBytes / element_bytes(p);
}
// Of a channel, a box has an odd number of pieces, or twice an odd number: sm90_pixels.cuh.
__host__ __device__ inline int channel_bytes(const WalkParams& p) {
  return p.box_w * p.box_h * element_bytes(p);
}
__host__ __device__ inline int box_bytes(const WalkParams& p) {
  return channel_bytes(p) * box_channels(p);
}
// From one box to the next: TMA writes to multiples of 128 bytes.
__host__ __device__ inline int box_pitch(const WalkParams& p) {
  return (box_bytes(p) + 127) / 128 * 128;
}
__host__ __device__ inline int columns_of(const WalkParams& p) { return p.tile_c * p.kernel_z; }
// Of one row of taps and a box's channels.
__host__ __device__ inline int weight_bytes(const WalkParams& p) {
  return columns_of(p) * kStepBytes * p.kernel_x * steps_of(p.blocks);
}
// From one channel of a piece of staged outputs to the next.
__host__ __device__ constexpr int stage_pitch(int blocks, int element_bytes) {
  return staging::pitch_of(blocks * kBlock * element_bytes);
}
// Channels of a piece: equal parts of a tile's, as many as there is room for.
__host__ __device__ constexpr int stage_channels(int tile_c, int blocks, int element_bytes) {
  int channels = tile_c;
  while (channels > 8 &&
         (tile_c % channels || channels * blocks * kBlock * element_bytes > staging::kMostBytes)) {
    channels -= 8;
  }
  return channels;
}
__host__ __device__ inline int stage_bytes(const WalkParams& p) {
  const int size = element_bytes(p);
  return stage_channels(p.tile_c, p.blocks, size) * stage_pitch(p.blocks, size);
}
__host__ __device__ inline int shared_bytes(const WalkParams& p) {
  return kHeaderBytes +
         kConsumers * (p.box_stages * box_pitch(p) + p.stage_pieces * stage_bytes(p)) +
         p.weight_stages * weight_bytes(p);
}

// --- Units of work ---------------------------------------------------------------------------

inline int divided(int value, int by) { return (value + by - 1) / by; }

inline WalkShape shape_of(const WalkParams& p) {
  WalkShape s;
  const int octets = divided(p.out_w + p.skew, kOctet);
  s.wide = divided(octets, p.strip);
  s.runs = divided(p.out_h * p.strip, p.blocks * kBlock / kOctet);
  s.blocks = p.batch * s.wide * s.runs;
  s.pairs = divided(s.blocks, kConsumers);
  s.chunks = divided(p.out_d, p.chunk);
  s.groups = divided(p.out_channels, p.tile_c);
  s.units = s.chunks * s.pairs * s.groups;
  s.depth = divided(p.in_channels, box_channels(p));  // boxes that K has
  s.by_groups = Divider(s.groups);
  s.by_pairs = Divider(s.pairs);
  s.by_images = Divider(s.wide * s.runs);
  s.by_runs = Divider(s.runs);
  s.by_strip = Divider(p.strip);
  return s;
}

// Both consumers of a thread block walk through the same planes, with the same weights.
struct Unit {
  int pair, group, first, last;  // planes of pixels, the last one not included
};
__device__ __forceinline__ Unit unit_at(const WalkParams& p, int number) {
  const WalkShape& s = p.shape;
  const int rest = s.by_groups(number), chunk = s.by_pairs(rest);
  const int first = chunk * p.chunk;
  return {rest - chunk * s.pairs, number - rest * s.groups, first, min(first + p.chunk, p.out_d)};
}

// A run of octets of a strip of a plane, counted along its rows.
struct Block {
  int image, x, y, octet;  // the strip's first pixel, the first octet's row and place in it
};
__device__ __forceinline__ Block block_at(const WalkParams& p, int number) {
  const WalkShape& s = p.shape;
  const int image = s.by_images(number), rest = number - image * s.wide * s.runs;
  const int strip = s.by_runs(rest), octet = (rest - strip * s.runs) * p.blocks * (kBlock / kOctet);
  const int y = s.by_strip(octet);
  return {image, strip * p.strip * kOctet - p.skew, y, octet - y * p.strip};
}

// An octet of a consumer, by its number: its first pixel, seen from the block's first row and the
// strip.
struct Own {
  int x, y;
};
__device__ __forceinline__ Own octet_at(const WalkParams& p, const Block& block, int number) {
  const int octet = block.octet + number, y = p.shape.by_strip(octet);
  return {(octet - y * p.strip) * kOctet, y};
}

// --- Shared memory ---------------------------------------------------------------------------

struct Shared : Rings {
  uint32_t staged, tables, boxes, pieces, weights;  // staged: barriers of the pieces

  __device__ __forceinline__ Shared(const WalkParams& p, unsigned char* memory) : Rings(memory) {
    staged = full + kBarrierBytes;
    tables = staged + staging::kBarrierBytes;
    boxes = full + kHeaderBytes;
    pieces = boxes + kConsumers * p.box_stages * box_pitch(p);
    weights = pieces + kConsumers * p.stage_pieces * stage_bytes(p);
  }
  __device__ __forceinline__ uint32_t bias_of(int c) const { return tables + c * kBiasBytes; }
  __device__ __forceinline__ uint32_t octets_of(int c) const {
    return tables + kConsumers * kBiasBytes + c * kTableBytes;
  }
  __device__ __forceinline__ staging::Pieces pieces_of(const WalkParams& p, int c) const {
    return staging::Pieces(staged, pieces, p.stage_pieces, stage_bytes(p), c);
  }

  // By all threads of a block.
  __device__ __forceinline__ void begin() const {
    if (threadIdx.x == 0) staging::Pieces::begin(staged);
    Rings::begin();
  }
};

}  // namespace upconv::walk
