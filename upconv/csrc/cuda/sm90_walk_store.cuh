// Hopper kernel that walks: how a finished plane of outputs leaves a thread block. Threads of a
// consumer have pairs of pixels in channels two apart; they lay them down as rows of pixels, which
// the writer copies to where they lie in the output (sm90_staging.cuh). Both find out where things
// go once for a unit of work, and wait once for a piece: waits, the table of the bias and that of
// the octets asked for every 8 channels were 900 cycles of a consumer's plane in which nothing was
// multiplied, and half of the 40 cycles that a writer took for each store.
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
      const uint32_t table = shared.bias_of(c) + round * kChannels * 4 + threadIdx.x % 4 * 8;
      uint2 bias[kChannels / 8];
#pragma unroll
      for (int i = 0; i < kChannels / 8; ++i) ptx::load_shared(bias[i], table + i * 32);
      const uint32_t to = place + pieces.wait_for_room();
#pragma unroll
      for (int i = 0; i < kChannels / 8; ++i) {
        lay_channels(d, first + (round * kChannels + 8 * i) / 2, bias[i], to + 8 * i * kPitch);
      }
      pieces.hand_over();
    }
  }

  // Eight channels of all blocks. Behind its pixels each has its bias, for outputs between them.
  template <int kSums>
  __device__ __forceinline__ void lay_channels(const float (&d)[kBlocks][kSums], int first,
                                               const uint2& bias, uint32_t to) const {
    const float low = __uint_as_float(bias.x), high = __uint_as_float(bias.y);
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      const uint32_t at = to + b * 16 * static_cast<int>(sizeof(Element));
      const float* v = &d[b][first];
      put(at, v[0] + low, v[2] + low);
      put(at + kPitch, v[1] + high, v[3] + high);
    }
    if (is_spread(p) && threadIdx.x % 128 < 4) {
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

// The warp that copies what consumer `c` has laid down; a Way below says where to.
template <typename Operand, int C, int kBlocks>
struct Writer : Stage<Operand, C, kBlocks> {
  using typename Stage<Operand, C, kBlocks>::Element;
  using Stage<Operand, C, kBlocks>::kWide, Stage<Operand, C, kBlocks>::kChannels,
      Stage<Operand, C, kBlocks>::kPitch, Stage<Operand, C, kBlocks>::kRounds;
  static constexpr int kPixels = kBlocks * kBlock, kOctets = kPixels / kOctet;
  static constexpr int kSize = sizeof(Element);
  static constexpr int kTogether = 8;  // channels that are read before any is written, of a piece
  static_assert(kOctets <= 32, "a lane for each octet");
  using Word = VectorOf<kSize>;

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
    if (is_spread(p)) {
      if (p.spread_x == 2 && p.out_w > 2) return walk<Twos>();
      return walk<Many>();
    }
    // All rows begin with even pixels: two are written at once.
    if (p.skew == 0 && p.out_w % 2 == 0) return walk<Beside<2>>();
    walk<Beside<1>>();
  }

  template <typename Way>
  __device__ __forceinline__ void walk() {
    Way way = {*this};
    for (int number = blockIdx.x; number < p.shape.units; number += gridDim.x) {
      const Unit unit = unit_at(p, number);
      const int own = unit.pair * kConsumers + c;
      if (own >= p.shape.blocks) continue;
      const Block block = block_at(p, own);
      way.begin_block(block);
      const int64_t channel = static_cast<int64_t>(block.image) * p.out_channels + unit.group * C;
      Element* to = static_cast<Element*>(p.result) + channel * volume +
                    static_cast<int64_t>(unit.first) * p.spread_z * area;
#pragma unroll 1
      for (int plane = unit.first; plane < unit.last; ++plane, to += p.spread_z * area) {
        Element* of_piece = to;
        int left = p.out_channels - unit.group * C;  // channels that there are
#pragma unroll 1
        for (int round = 0; round < kRounds; ++round, left -= kChannels) {
          way.write(pieces.wait_for_outputs(), of_piece, plane * p.spread_z, left);
          pieces.hand_back();
          of_piece += kChannels * volume;
        }
      }
    }
  }

  // --- Pixels side by side, kEach at once ---

  template <int kEach>
  struct Beside {
    static constexpr int kSlots = kPixels / (32 * kEach);  // pixels that a lane has
    using Vector = VectorOf<kEach * kSize>;

    const Writer& writer;

    // Of each octet: its first pixel's place in a plane, and its column, for all lanes.
    __device__ __forceinline__ void begin_block(const Block& block) const {
      const WalkParams& p = writer.p;
      __syncwarp();
      if (writer.lane < kOctets) {
        const Own own = octet_at(p, block, writer.lane);
        const int y = block.y + own.y, x = block.x + own.x;
        ptx::store_shared(writer.table + writer.lane * 8,
                          uint2{static_cast<uint32_t>(y * p.out_w + x),
                                static_cast<uint32_t>(y < p.out_h ? x : p.out_w)});
      }
      __syncwarp();
    }

    __device__ __forceinline__ void write(uint32_t piece, Element* to, int, int left) const {
      const int in_octet = writer.lane * kEach % kOctet;
      uint32_t from = piece + writer.lane * kEach * kSize;
      const uint32_t octets = writer.table + writer.lane * kEach / kOctet * 8;
      uint2 next;  // asked for before what comes before it is written
      ptx::load_shared(next, octets);
#pragma unroll 1
      for (int slot = 0; slot < kSlots; ++slot, from += 32 * kEach * kSize) {
        const uint2 octet = next;
        if (slot + 1 < kSlots) ptx::load_shared(next, octets + (slot + 1) * 4 * kEach * 8);
        if (octet.y + in_octet < static_cast<uint32_t>(writer.p.out_w)) {
          write_channels(from, to + static_cast<int>(octet.x) + in_octet, left);
        }
      }
    }
    __device__ __forceinline__ void write_channels(uint32_t from, Element* to, int left) const {
#pragma unroll 1
      for (int first = 0; first < min(kChannels, left); first += kTogether) {
        Vector v[kTogether];
#pragma unroll
        for (int i = 0; i < kTogether; ++i) ptx::load_shared(v[i], from + (first + i) * kPitch);
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
          if (first + i < left) __stcs(reinterpret_cast<Vector*>(to), v[i]);
          to = ptx::computed_here(to + writer.volume);
        }
      }
    }
  };

  // --- Pixels some outputs apart, the bias in between ---

  struct Apart {
    const Writer& writer;

    // The first output of an octet's pixels, its row and its column, for all lanes.
    __device__ __forceinline__ void begin_block(const Block& block) const {
      const WalkParams& p = writer.p;
      __syncwarp();
      if (writer.lane < kOctets) {
        const Own own = octet_at(p, block, writer.lane);
        const int y = (block.y + own.y) * p.spread_y, x = (block.x + own.x) * p.spread_x;
        ptx::store_shared(writer.table + writer.lane * 8,
                          uint2{static_cast<uint32_t>(y), static_cast<uint32_t>(x)});
      }
      __syncwarp();
    }
    // The first output of a pixel, and behind the last of its rows.
    struct Outputs {
      int x, y, last_y;
    };
    __device__ __forceinline__ Outputs outputs_of(int pixel) const {
      const WalkParams& p = writer.p;
      uint2 place;
      ptx::load_shared(place, writer.table + pixel / kOctet * 8);
      const int y = static_cast<int>(place.x);
      return {static_cast<int>(place.y) + pixel % kOctet * p.spread_x, y,
              min(y + p.spread_y, p.out_h)};
    }
  };

  // Two columns apart, as most are: a lane has a pixel and writes two outputs at once: where its
  // first one begins on two, that one and the next; else, one to the left or the right, again its
  // value and one bias. The ends of a row then have an output by itself.
  struct Twos : Apart {
    using Apart::writer;
    using Vector = VectorOf<2 * kSize>;

    __device__ __forceinline__ void write(uint32_t piece, Element* to, int first_z,
                                          int left) const {
      const WalkParams& p = writer.p;
      const int planes = min(p.spread_z, p.out_d - first_z);
#pragma unroll 1
      for (int number = writer.lane; number < kPixels; number += 32) {
        const auto at = this->outputs_of(number);
        if (static_cast<uint32_t>(at.x) >= static_cast<uint32_t>(p.out_w)) continue;
#pragma unroll 1
        for (int row = 0; row < planes * p.spread_y; ++row) {
          const int z = p.shape.by_spread_y(row), y = at.y + row - z * p.spread_y;
          if (y >= at.last_y) continue;
          const bool valued = z == p.first_z && y == at.y + p.first_y;
          write_row(piece + (valued ? number : kPixels) * kSize, piece + kPixels * kSize,
                    to + z * writer.area + y * p.out_w + at.x, at.x, left);
        }
      }
    }

    // Of a pixel whose first output, in column `x`, begins on two (odd: does not): where its two
    // outputs are, seen from that; and an output by itself, or -1.
    struct Ends {
      int two, single;
      bool whole;
    };
    __device__ __forceinline__ Ends ends(int x, int odd) const {
      const int out_w = writer.p.out_w, two = odd ? 2 * writer.p.first_x - 1 : 0;
      const bool begins = x == 0 && odd, ends = x + 2 >= out_w && out_w % 2 != odd;
      return {two, begins ? 0 : ends ? odd : -1, x + two >= 0 && x + two + 1 < out_w};
    }

    __device__ __forceinline__ void write_row(uint32_t value, uint32_t bias, Element* to, int x,
                                              int left) const {
      const Ends even = ends(x, 0), odd = ends(x, 1);
#pragma unroll 1
      for (int first = 0; first < min(kChannels, left); first += kTogether) {
        Word v[kTogether], b[kTogether];
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
          ptx::load_shared(v[i], value + (first + i) * kPitch);
          ptx::load_shared(b[i], bias + (first + i) * kPitch);
        }
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
          if (first + i < left) {
            const bool is_odd = reinterpret_cast<uintptr_t>(to) / kSize % 2;
            write_two(to, is_odd ? odd : even, v[i], b[i]);
          }
          to = ptx::computed_here(to + writer.volume);
        }
      }
    }
    __device__ __forceinline__ void write_two(Element* to, const Ends& at, Word v, Word b) const {
      const int first_x = writer.p.first_x;
      if (at.whole) {
        const bool before = at.two == first_x;
        __stcs(reinterpret_cast<Vector*>(to + at.two), both(before ? v : b, before ? b : v));
      }
      if (at.single >= 0) {
        __stcs(reinterpret_cast<Word*>(to + at.single), at.single == first_x ? v : b);
      }
    }
    __device__ static __forceinline__ Vector both(Word first, Word second) {
      if constexpr (kWide) {
        return {first, second};
      } else {
        return first | static_cast<uint32_t>(second) << 16;
      }
    }
  };

  // Any number of columns apart.
  struct Many : Apart {
    using Apart::writer;

    __device__ __forceinline__ void write(uint32_t piece, Element* to, int first_z,
                                          int left) const {
      const WalkParams& p = writer.p;
      const int planes = min(p.spread_z, p.out_d - first_z);
#pragma unroll 1
      for (int z = 0; z < planes; ++z, to += writer.area) {
#pragma unroll 1
        for (int number = writer.lane; number < kPixels * p.spread_x; number += 32) {
          write_output(piece, to, number, z == p.first_z, left);
        }
      }
    }

    // Output `number` of those of a row of pixels, and those below it; valued: in the pixels'
    // plane.
    __device__ __forceinline__ void write_output(uint32_t piece, Element* to, int number,
                                                 bool valued, int left) const {
      const WalkParams& p = writer.p;
      const int pixel = p.shape.by_spread_x(number), beside = number - pixel * p.spread_x;
      const auto at = this->outputs_of(pixel);
      const int x = at.x + beside;
      if (static_cast<uint32_t>(x) >= static_cast<uint32_t>(p.out_w)) return;
#pragma unroll 1
      for (int y = at.y; y < at.last_y; ++y) {
        const bool there = valued && y == at.y + p.first_y && beside == p.first_x;
        const uint32_t from = piece + (there ? pixel : kPixels) * kSize;
        Element* place = to + y * p.out_w + x;
#pragma unroll 1
        for (int i = 0; i < min(kChannels, left); ++i, place += writer.volume) {
          Word v;
          ptx::load_shared(v, from + i * kPitch);
          __stcs(reinterpret_cast<Word*>(place), v);
        }
      }
    }
  };
};

}  // namespace upconv::walk
