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
      if (is_spread(p)) lay_biases(round * kChannels, to);
      pieces.hand_over();
    }
  }
  // Behind its pixels each channel has its bias, for outputs between them.
  __device__ __forceinline__ void lay_biases(int channel, uint32_t to) const {
    const int thread = ptx::this_thread();
    if (thread % 128 >= 4) return;
    constexpr int kPixels = kBlocks * kBlock * static_cast<int>(sizeof(Element));
#pragma unroll
    for (int i = 0; i < kChannels; i += 8) {
      float low, high;
      ptx::load_shared(low, high, shared.bias_of(c) + (channel + i) * 4 + thread % 4 * 8);
      put(to + i * kPitch + kPixels, low, low);
      put(to + (i + 1) * kPitch + kPixels, high, high);
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
    if (is_spread(p)) return walk<Apart>();
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
    static constexpr int kSlots = kPixels / (32 * kEach);  // times kEach pixels that a lane has
    static constexpr int kBatch = kChannels % 16 ? 4 : 8;  // of channels
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

    // Reads are a batch of channels ahead of the stores.
    __device__ __forceinline__ void write(uint32_t piece, Element* to, int, int left) const {
      const int in_octet = writer.lane * kEach % kOctet;
      uint32_t from = piece + writer.lane * kEach * kSize;
      Vector v[2][kBatch];
      read(v[0], from);
#pragma unroll 1
      for (int slot = 0; slot < kSlots; ++slot) {
        uint2 octet;
        ptx::load_shared(octet, writer.table + (slot * 32 + writer.lane) * kEach / kOctet * 8);
        const bool there = octet.y + in_octet < static_cast<uint32_t>(writer.p.out_w);
        Element* place = to + static_cast<int>(octet.x) + in_octet;
        const uint32_t next = slot + 1 < kSlots ? from + 32 * kEach * kSize : from;
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
    __device__ __forceinline__ void read(Vector (&v)[kBatch], uint32_t from) const {
#pragma unroll
      for (int i = 0; i < kBatch; ++i) ptx::load_shared(v[i], from + i * kPitch);
    }
    __device__ __forceinline__ Element* store(Element* to, const Vector (&v)[kBatch], bool there,
                                              int left) const {
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (there && i < left) __stcs(reinterpret_cast<Vector*>(to), v[i]);
        to = ptx::computed_here(to + writer.volume);
      }
      return to;
    }
  };

  // --- Pixels some outputs apart, the bias in between ---

  struct Apart {
    static constexpr int kBatch = 8;  // channels that are read before any is written

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
      uint2 place;
      ptx::load_shared(place, writer.table + pixel / kOctet * 8);
      const int x = static_cast<int>(place.y) + pixel % kOctet * p.spread_x + beside;
      if (static_cast<uint32_t>(x) >= static_cast<uint32_t>(p.out_w)) return;
      const int first_y = static_cast<int>(place.x), last_y = min(first_y + p.spread_y, p.out_h);
#pragma unroll 1
      for (int y = first_y; y < last_y; ++y) {
        const bool there = valued && y == first_y + p.first_y && beside == p.first_x;
        write_channels(piece + (there ? pixel : kPixels) * kSize, to + y * p.out_w + x, left);
      }
    }
    __device__ __forceinline__ void write_channels(uint32_t from, Element* to, int left) const {
#pragma unroll 1
      for (int first = 0; first < min(kChannels, left); first += kBatch) {
        Word v[kBatch];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) ptx::load_shared(v[i], from + (first + i) * kPitch);
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          if (first + i < left) __stcs(reinterpret_cast<Word*>(to), v[i]);
          to = ptx::computed_here(to + writer.volume);
        }
      }
    }
  };
};

}  // namespace upconv::walk
