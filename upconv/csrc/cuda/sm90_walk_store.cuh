// Hopper kernel that walks: how a finished plane of outputs leaves a thread block. Threads of a
// consumer have pairs of pixels in channels two apart; they lay them down as rows of pixels, which
// the writer copies to where they lie in the output (sm90_staging.cuh).
#pragma once

#include "sm90_walk_layout.cuh"

namespace upconv::walk {

// --- A consumer's side -------------------------------------------------------------------------

template <typename Operand, int C, int kBlocks>
struct Stage {
  using Element = typename Operand::Element;
  static constexpr bool kWide = sizeof(Element) == 4;
  static constexpr int kChannels = stage_channels(C);  // of a piece
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

  // Tells all threads of the warpgroup the bias of a group's channels.
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
      for (int eight = 0; eight < kChannels; eight += 8) {
        lay_channels(d, first, round * kChannels + eight, to + eight * kPitch);
      }
      pieces.hand_over();
    }
  }

  // Eight channels of all blocks. Behind its pixels each has its bias, for outputs between them.
  template <int kSums>
  __device__ __forceinline__ void lay_channels(const float (&d)[kBlocks][kSums], int first,
                                               int channel, uint32_t to) const {
    uint2 added;
    ptx::load_shared(added, shared.bias_of(c) + channel * 4 + threadIdx.x % 4 * 8);
    const float low = __uint_as_float(added.x), high = __uint_as_float(added.y);
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      const uint32_t at = to + b * 16 * static_cast<int>(sizeof(Element));
      const float* v = &d[b][first + channel / 2];
      put(at, v[0] + low, v[2] + low);
      put(at + kPitch, v[1] + high, v[3] + high);
    }
    if (threadIdx.x % 128 < 4) {
      constexpr int kPixels = kBlocks * kBlock * static_cast<int>(sizeof(Element));
      put(to + kPixels, low, low);
      put(to + kPitch + kPixels, high, high);
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
  static constexpr int kTogether = 8;  // channels that are read before any is written
  static_assert(kOctets <= 32, "a lane for each octet");

  const WalkParams& p;
  const Shared& shared;
  const int c, lane;
  const uint32_t octets;
  const bool paired;  // whether two pixels are written at once: all rows begin with even ones
  const bool spread;  // whether there is something between pixels
  const int64_t area, volume;
  staging::Pieces pieces;

  __device__ __forceinline__ Writer(const WalkParams& p, const Shared& shared, int c)
      : p(p),
        shared(shared),
        c(c),
        lane(threadIdx.x % 32),
        octets(shared.octets_of(c)),
        paired(p.skew == 0 && p.out_w % 2 == 0),
        spread(p.spread_x * p.spread_y * p.spread_z > 1),
        area(static_cast<int64_t>(p.out_h) * p.out_w),
        volume(area * p.out_d),
        pieces(shared.pieces_of(p, c)) {}

  __device__ __forceinline__ void run() {
    for (int number = blockIdx.x; number < p.shape.units; number += gridDim.x) {
      const Unit unit = unit_at(p, number);
      const int own = unit.pair * kConsumers + c;
      if (own >= p.shape.blocks) continue;
      const Block block = block_at(p, own);
      begin_block(block);
      const int64_t channel = static_cast<int64_t>(block.image) * p.out_channels + unit.group * C;
      Element* const to = static_cast<Element*>(p.result) + channel * volume;
      for (int plane = unit.first; plane < unit.last; ++plane) {
        write_plane(to, plane * p.spread_z, p.out_channels - unit.group * C);
      }
    }
  }

  // Where the octets of a block go: the first output of an octet's pixels, its row and its column.
  // Those of rows that there are not have a row beyond the last one.
  __device__ __forceinline__ void begin_block(const Block& block) const {
    __syncwarp();
    if (lane < kOctets) {
      const Own own = octet_at(p, block, lane);
      const int y = (block.y + own.y) * p.spread_y, x = (block.x + own.x) * p.spread_x;
      ptx::store_shared(octets + lane * 8,
                        uint2{static_cast<uint32_t>(y), static_cast<uint32_t>(x)});
    }
    __syncwarp();
  }

  // All outputs of a plane of pixels, piece by piece. `left`: channels that there are.
  __device__ __forceinline__ void write_plane(Element* to, int first_z, int left) {
    to += static_cast<int64_t>(first_z) * area;
    const int last_z = min(first_z + p.spread_z, p.out_d);
#pragma unroll 1
    for (int round = 0; round < kRounds; ++round, left -= kChannels, to += kChannels * volume) {
      const uint32_t from = pieces.wait_for_outputs();
      if (spread) {
        Element* plane = to;
#pragma unroll 1
        for (int z = first_z; z < last_z; ++z, plane += area) {
          write_spread(from, plane, min(left, kChannels), z == first_z + p.first_z);
        }
      } else if (paired) {
        write<2>(from, to, min(left, kChannels));
      } else {
        write<1>(from, to, min(left, kChannels));
      }
      pieces.hand_back();
    }
  }

  // kEach pixels at once.
  template <int kEach>
  __device__ __forceinline__ void write(uint32_t from, Element* to, int channels) const {
#pragma unroll 1
    for (int pixel = lane * kEach; pixel < kPixels; pixel += 32 * kEach) {
      uint2 place;
      ptx::load_shared(place, octets + pixel / kOctet * 8);
      const int y = static_cast<int>(place.x), x = static_cast<int>(place.y) + pixel % kOctet;
      if (y < p.out_h && static_cast<uint32_t>(x) < static_cast<uint32_t>(p.out_w)) {
        write_channels<kEach>(from + pixel * kSize, to + y * p.out_w + x, channels);
      }
    }
  }

  // Pixels some outputs apart, with the bias in between; `valued`: they are in this plane.
  __device__ __forceinline__ void write_spread(uint32_t from, Element* to, int channels,
                                               bool valued) const {
#pragma unroll 1
    for (int number = lane; number < kPixels * p.spread_x; number += 32) {
      const int pixel = p.shape.by_spread_x(number), beside = number - pixel * p.spread_x;
      uint2 place;
      ptx::load_shared(place, octets + pixel / kOctet * 8);
      const int x = static_cast<int>(place.y) + pixel % kOctet * p.spread_x + beside;
      if (static_cast<uint32_t>(x) >= static_cast<uint32_t>(p.out_w)) continue;
      const int first_y = static_cast<int>(place.x), last_y = min(first_y + p.spread_y, p.out_h);
#pragma unroll 1
      for (int y = first_y; y < last_y; ++y) {
        const bool there = valued && y == first_y + p.first_y && beside == p.first_x;
        write_channels<1>(from + (there ? pixel : kPixels) * kSize, to + y * p.out_w + x, channels);
      }
    }
  }

  // The same pixels of all channels of a piece.
  template <int kEach>
  __device__ __forceinline__ void write_channels(uint32_t from, Element* to, int channels) const {
    using Vector = VectorOf<kEach * kSize>;
    if (channels == kChannels) {
#pragma unroll
      for (int first = 0; first < kChannels; first += kTogether) {
        Vector v[kTogether];
#pragma unroll
        for (int i = 0; i < kTogether; ++i) ptx::load_shared(v[i], from + (first + i) * kPitch);
#pragma unroll
        for (int i = 0; i < kTogether; ++i, to += volume)
          __stcs(reinterpret_cast<Vector*>(to), v[i]);
      }
      return;
    }
#pragma unroll 1
    for (int i = 0; i < channels; ++i, to += volume) {
      Vector v;
      ptx::load_shared(v, from + i * kPitch);
      __stcs(reinterpret_cast<Vector*>(to), v);
    }
  }
};

}  // namespace upconv::walk
