// One call of the forward kernel, prepared: everything that does not depend on the data.
//
// The flat space. Write the phase-local outputs of all images one after another, row after row,
// plane after plane, and leave between rows (planes, images) a gap just wide enough that a shift by
// any tap's offset lands either on the input it means or in a gap. The planner gives the pitches.
// Then position f of the flat space reads, for every tap, the input at f + (one constant of the
// tap), gaps read as zero, and vectors run across the ends of rows: an 8 x 8 image fills them as
// well as a 1024 x 1024 one. A unit of work is a tile of `tile` consecutive positions; its input,
// gaps included, is copied to a buffer per thread that stays in the L2 cache.
#pragma once

#include <cstdint>

#include "fprop.h"

namespace upconv {

// Consecutive tile positions handled together, in bytes per channel: 6 vectors of AVX-512.
constexpr int64_t kStripBytes = 6 * 64;
// Input channels between two taps: 64 channels of a 256-byte line set (16 KB) stay in L1 while the
// taps of a row pass over them.
constexpr int64_t kChannelBlock = 64;

// Input channels whose weights one thread packs at a time.
constexpr int64_t kPackChannels = 8;

struct PhaseRange {  // outputs first, first + stride, ... of one dimension
  int64_t first, count;
};

struct TapRange {  // half-open range of `tap_offset` / `tap_kernel`
  int64_t begin, end;
};

struct Segment {       // part of the input buffer of one channel
  int64_t flat_begin;  // flat position of its first element, relative to the tile's first
  int64_t length;
  int64_t start;  // where it lies in the buffer
};

struct ChannelBlock {    // output channels that one call of the micro-kernel computes
  int64_t first;         // within the group
  int rows;              // rows of the micro-kernel: 8, 4, 2 or 1
  int live;              // rows that exist; the others have zero weights and are not stored
  int64_t packed_begin;  // its weights, within the group's
};

struct Job {
  DType dtype;
  const void* x;
  const void* w;
  const void* bias;  // may be null
  void* y;

  int64_t batch, cin, cout, groups;  // channels of one group
  int64_t in[3], out[3], kernel[3], stride[3], pitch[3];
  int64_t tile, tiles, flat_size, chunks;

  // Plain arrays, owned by the caller: the files of the instruction sets must not instantiate any
  // inline function of the standard library, or the linker may keep the AVX-512 copy for everybody.
  const PhaseRange* phases[3];
  int64_t phase_count[3];
  const TapRange* taps;        // per phase of the problem: (depth, height, width), width fastest
  const int64_t* tap_offset;   // into the input buffer, at tile position 0
  const int64_t* tap_kernel;   // flat index of the tap in the kernel
  const Segment* segments;     // ascending
  int64_t segment_count;       //
  int64_t channel_pitch;       // elements between two channels of the input buffer
  const ChannelBlock* blocks;  // of one group
  int64_t block_count;         //
  const int64_t* chunk_begin;  // blocks of chunk i: [chunk_begin[i], chunk_begin[i + 1])
  int64_t max_pieces, max_copies;  // bounds on the lists that one tile needs

  void* packed;          // weights: [group][block][phase][channel block][tap][cin][rows]
  int64_t packed_pitch;  // elements of one group
  int64_t scratch_bytes;

  int64_t items() const { return tiles * groups * chunks; }
};

// What one instruction set offers, for one computing type (float, double).
struct Kernels {
  int max_rows;  // widest micro-kernel
  // Of groups x ceil(cin / kPackChannels) items; false where a weight is infinite or NaN.
  bool (*pack)(const Job& job, int64_t item);
  void (*compute)(const Job& job, int64_t item, void* scratch);
};

const Kernels& generic_kernels(bool is_double);
#if defined(__x86_64__)
const Kernels& avx2_kernels(bool is_double);
const Kernels& avx512_kernels(bool is_double);
#endif

}  // namespace upconv
