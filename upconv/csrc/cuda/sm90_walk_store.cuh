// Hopper kernel that walks: how a finished plane of outputs leaves a thread block. Threads of a
// consumer have pairs of pixels in channels two apart; they lay them down as rows of pixels, which
// the writer copies to where they lie in the output (sm90_staging.cuh). What a consumer does here
// it does between its products, and both consumers at the same time: with pieces of 16 channels,
// zeros for new sums and biases added behind them a plane took 600 cycles more, of 3,900.
#pragma once

#include "sm90_walk_layout.cuh"

namespace upconv::walk {

// --- A consumer's side -------------------------------------------------------------------------

template <typename Operand, int C, int kBlocks>
struct Stage {
  using Element = typename Operand::Element;
  static constexpr bool kWide = sizeof(Element) == 4;
  static constexpr int kChannels = stage_channels(C, kBlocks, sizeof(Element));  // of a piece
  static constexpr int kPitch = stage_pitch(kBlocks, sizeof(Element));
  static constexpr int kRounds = C / kChannels;
  static_assert(C % kChannels == 0, "whole pieces");
  static_assert(C <= kMaxChannels, "the table of the bias is too short");
};

template <typename Operand, int C, int kBlocks>
struct Outputs : Stage<Operand, C, kBlocks> {
  using typename Stage<Operand, C, kBlocks>::Element;
  using Stage<Operand, C, kBlocks>::kWide, Stage<Operand, C, kBlocks>::kChannels,
      Stage<Operand, C, kBlocks>::kPitch, Stage<Operand, C, kBlocks>::kRounds;

  const WalkParams& p;
  const Shared& shared;
  const int c;
  const uint32_t place;  // of a thread's pixels in a piece
  staging::Pieces pieces;

  __device__ __forceinline__ Outputs(const WalkParams& p, const Shared& shared, int c, int warp,
                                     int lane)
      : p(p),
        shared(shared),
        c(c),
        place(lane % 4 * 2 * kPitch +
              (warp * kBlocks * 16 + lane / 4 * 2) * static_cast<int>(sizeof(Element))),
        pieces(shared.pieces_of(p, c)) {}

  // Tells all threads of the warpgroup the bias of a group's channels, with which sums begin.
  __device__ __forceinline__ void begin_group(int group) const {
    const int i = threadIdx.x % 128, channel = group * C + i;
    if (i >= C) return;
    const bool biased = p.bias && channel < p.out_channels;
    const float value =
        biased ? Operand::to_float(static_cast<const Element*>(p.bias)[channel]) : 0.f;
    ptx::store_shared(shared.bias_of(c) + i * 4, __float_as_uint(value));
  }

  // The finished accumulators of a thread's pixels, from the `first` on.
  template <int kSums>
  __device__ __forceinline__ void lay_down(const float (&d)[kBlocks][kSums], int first) {
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
      const uint32_t to = place + pieces.wait_for_room();
#pragma unroll
      for (int i = 0; i < kChannels; i += 8) {
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) {
          const uint32_t at = to + i * kPitch + b * 16 * static_cast<int>(sizeof(Element));
          const float* v = &d[b][first + (round * kChannels + i) / 2];
          put(at, v[0], v[2]);
          put(at + kPitch, v[1], v[3]);
        }
      }
      pieces.hand_over();
    }
  }
  __device__ __forceinline__ void put(uint32_t at, float even, float odd) const {
    if constexpr (kWide) {
      ptx::store_shared(at, uint2{__float_as_uint(even), __float_as_uint(odd)});
    } else {
      ptx::store_shared(at, two_halves<Operand>(even, odd));
    }
  }
};

// --- The writer --------------------------------------------------------------------------------

// The warp that copies what consumer `c` has laid down.
template <typename Operand, int C, int kBlocks>
struct Writer : Stage<Operand, C, kBlocks> {
  using typename Stage<Operand, C, kBlocks>::Element;
  using Stage<Operand, C, kBlocks>::kChannels, Stage<Operand, C, kBlocks>::kPitch,
      Stage<Operand, C, kBlocks>::kRounds;
  static constexpr int kPixels = kBlocks * kBlock, kOctets = kPixels / kOctet;
  static constexpr int kSize = sizeof(Element);
  static constexpr int kBatch = kChannels % 16 ? 4 : 8;  // channels that are read at a time
  static_assert(kOctets <= 32, "a lane for each octet");

  const WalkParams& p;
  const int c, lane;
  const uint32_t table;  // of the octets of a block
  const int64_t area, volume;
  staging::Pieces pieces;

  __device__ __forceinline__ Writer(const WalkParams& p, const Shared& shared, int c)
      : p(p),
        c(c),
        lane(threadIdx.x % 32),
        table(shared.octets_of(c)),
        area(static_cast<int64_t>(p.out_h) * p.out_w),
        volume(area * p.out_d),
        pieces(shared.pieces_of(p, c)) {}

  __device__ __forceinline__ void run() {
    // All rows begin with even pixels: two are written at once.
    if (p.skew == 0 && p.out_w % 2 == 0) return walk<2>();
    walk<1>();
  }

  // kEach: pixels that a lane writes at once.
  template <int kEach>
  __device__ __forceinline__ void walk() {
    for (int number = blockIdx.x; number < p.shape.units; number += gridDim.x) {
      const Unit unit = unit_at(p, number);
      const int own = unit.pair * kConsumers + c;
      if (own >= p.shape.blocks) continue;
      const Block block = block_at(p, own);
      begin_block(block);
      const int64_t channel = static_cast<int64_t>(block.image) * p.out_channels + unit.group * C;
      Element* to = static_cast<Element*>(p.result) + channel * volume + unit.first * area;
#pragma unroll 1
      for (int plane = unit.first; plane < unit.last; ++plane, to += area) {
        Element* of_piece = to;
        int left = p.out_channels - unit.group * C;  // channels that there are
#pragma unroll 1
        for (int round = 0; round < kRounds; ++round, left -= kChannels) {
          copy<kEach>(pieces.wait_for_outputs(), of_piece, left);
          pieces.hand_back();
          of_piece += kChannels * volume;
        }
      }
    }
  }

  // Of each octet: its first pixel's place in a plane, and its column, for all lanes.
  __device__ __forceinline__ void begin_block(const Block& block) const {
    __syncwarp();
    if (lane < kOctets) {
      const Own own = octet_at(p, block, lane);
      const int y = block.y + own.y, x = block.x + own.x;
      ptx::store_shared(table + lane * 8, uint2{static_cast<uint32_t>(y * p.out_w + x),
                                                static_cast<uint32_t>(y < p.out_h ? x : p.out_w)});
    }
    __syncwarp();
  }

  // A piece, some pixels in all its channels after the others. Reads are a batch ahead of the
  // stores.
  template <int kEach>
  __device__ __forceinline__ void copy(uint32_t piece, Element* to, int left) const {
    constexpr int kApart = 32 * kEach;  // pixels
    const int in_octet = lane * kEach % kOctet;
    uint32_t from = piece + lane * kEach * kSize;
    VectorOf<kEach * kSize> v[2][kBatch];
    read(v[0], from);
#pragma unroll 1
    for (int pixel = 0; pixel < kPixels; pixel += kApart) {
      uint2 octet;
      ptx::load_shared(octet, table + (pixel + lane * kEach) / kOctet * 8);
      const bool there = octet.y + in_octet < static_cast<uint32_t>(p.out_w);
      Element* place = to + static_cast<int>(octet.x) + in_octet;
      const uint32_t next = pixel + kApart < kPixels ? from + kApart * kSize : from;
#pragma unroll 1
      for (int first = 0; first < kChannels; first += 2 * kBatch) {
        read(v[1], from + (first + kBatch) * kPitch);
        place = store(place, v[0], there, left - first);
        const int behind = first + 2 * kBatch;
        read(v[0], behind < kChannels ? from + behind * kPitch : next);
        place = store(place, v[1], there, left - first - kBatch);
      }
      from = next;
    }
  }
  template <typename Vector>
  __device__ __forceinline__ void read(Vector (&v)[kBatch], uint32_t from) const {
#pragma unroll
    for (int i = 0; i < kBatch; ++i) ptx::load_shared(v[i], from + i * kPitch);
  }
  template <typename Vector>
  __device__ __forceinline__ Element* store(Element* to, const Vector (&v)[kBatch], bool there,
                                            int left) const {
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (there && i < left) __stcs(reinterpret_cast<Vector*>(to), v[i]);
      to = ptx::computed_here(to + volume);
    }
    return to;
  }
};

}  // namespace upconv::walk
