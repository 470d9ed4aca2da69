// mma.sync kernel: from the input tensor to the tile in shared memory.
#pragma once

#include "mma_layout.cuh"

namespace upconv {

constexpr int kMmaOutside = -1;
constexpr uint16_t kMmaNowhere = 0xffff;

// Lists where every group of `copy` neighbouring pixels lies: in the input, relative to the tile's
// first image, and in the tile. Once for all slices. Clears tiles at the image's edge: what lies
// outside stays zero.
__device__ __forceinline__ void list_pixels(const MmaParams& p, const MmaUnit& unit,
                                            const MmaShared& shared) {
  const int z0 = unit.z * p.in_step_z + p.shift_z, y0 = unit.y * p.in_step_y + p.shift_y;
  const int x0 = unit.x * p.in_step_x + p.shift_x;
  for (int i = threadIdx.x; i < p.items; i += blockDim.x) {
    const int pixel = i * p.copy;
    const int rows = quotient(pixel, p.by_fill_x), planes = quotient(rows, p.by_fill_y);
    const int image = quotient(planes, p.by_fill_z);
    const int column = pixel - rows * p.fill_x, row = rows - planes * p.fill_y;
    const int depth = planes - image * p.fill_z, lane = quotient(column, p.by_in_step_x);
    const int iz = z0 + depth, iy = y0 + row, ix = x0 + column;
    const bool inside = unit.o + image < p.batch && static_cast<unsigned>(iz) < p.in_d &&
                        static_cast<unsigned>(iy) < p.in_h && static_cast<unsigned>(ix) < p.in_w;
    const int at = (iz * p.in_h + iy) * p.in_w + ix;
    const int images = image * p.in_channels * p.groups * p.in_d * p.in_h * p.in_w;
    const int slot = image * p.pitch_o + depth * p.pitch_z + row * p.pitch_y +
                     (column - lane * p.in_step_x) * p.lane_x + lane;
    shared.offsets[i] = inside ? images + at : kMmaOutside;
    shared.positions[i] = inside ? static_cast<uint16_t>(slot) : kMmaNowhere;
  }
  const bool whole = z0 >= 0 && z0 + p.fill_z <= p.in_d && y0 >= 0 && y0 + p.fill_y <= p.in_h &&
                     x0 >= 0 && x0 + p.fill_x <= p.in_w && unit.o + p.tile_o <= p.batch;
  const int slots = whole ? 0 : (p.slices > 1 ? 2 : 1) * p.slice_blocks * p.plane;
  for (int i = threadIdx.x; i < slots; i += blockDim.x) {
    mma_ptx::store_shared(shared.tile + 16 * i, make_uint4(0, 0, 0, 0));
  }
}

// Brings slices of the tile in chunks: a thread reads up to kMmaChunkWords words of a later slice
// into registers, the block computes, then the thread puts them into the tile. Between the two lie
// some thousand cycles, more than memory takes to answer.
//
// An item is a channel block of `copy` pixels: each of its channels is one load of 1, 2 or 4
// pixels. Items are numbered through all channel blocks of the slice; a chunk holds as many of each
// thread as fit its registers.
template <typename Operand, int kFragments>
struct MmaFill {
  using Element = typename Operand::Element;
  using Words = uint32_t[kMmaChunkWords];
  static constexpr int kE = Operand::kChannels;
  static constexpr bool kWide = sizeof(Element) == 4;
  // Chunks on their way at once, of the first slice: what the registers of the sums hold.
  static constexpr int kSums = 4 * kFragments * Operand::kTiles;
  static constexpr int kAhead = kSums < 4 * kMmaChunkWords ? kSums / kMmaChunkWords : 4;
  template <int kPixels>
  static constexpr int kLoadWords = kWide ? kPixels : (kPixels + 1) / 2;
  template <int kPixels>
  static constexpr int kItems = kMmaChunkWords / (kE * kLoadWords<kPixels>);  // of a chunk
  const MmaParams& p;
  const MmaShared& shared;
  const Element* source;       // of the slice that is read
  const int64_t channel_step;  // elements from one channel to the next
  const int chunks;            // of one slice
  int left;                    // channels from the slice on
  Words v;

  __device__ __forceinline__ MmaFill(const MmaParams& p, const MmaShared& shared,
                                     const MmaUnit& unit)
      : p(p),
        shared(shared),
        source(static_cast<const Element*>(p.x)),
        channel_step(static_cast<int64_t>(p.in_d) * p.in_h * p.in_w),
        chunks(p.chunks_a_slice),
        left(p.in_channels) {
    const int64_t before = static_cast<int64_t>(unit.o) * p.groups + unit.group;
    source += before * p.in_channels * channel_step;
  }

  __device__ __forceinline__ void next_slice() {
    source += p.slice_blocks * kE * channel_step;
    left -= p.slice_blocks * kE;
  }

  template <int kPixels>
  static __device__ __forceinline__ void load(const Element* at, uint32_t* to) {
    if constexpr (kLoadWords<kPixels> == 4) {
      const uint4 words = __ldg(reinterpret_cast<const uint4*>(at));
      to[0] = words.x, to[1] = words.y, to[2] = words.z, to[3] = words.w;
    } else if constexpr (kLoadWords<kPixels> == 2) {
      const uint2 words = __ldg(reinterpret_cast<const uint2*>(at));
      to[0] = words.x, to[1] = words.y;
    } else if constexpr (kWide || kPixels == 2) {
      to[0] = __ldg(reinterpret_cast<const uint32_t*>(at));
    } else {
      to[0] = __ldg(reinterpret_cast<const unsigned short*>(at));
    }
  }

  // Channels of one item; `channels` of them exist.
  template <int kPixels>
  __device__ __forceinline__ void read_item(const Element* from, int channels, uint32_t* to) const {
    constexpr int kWords = kLoadWords<kPixels>;
    if (channels >= kE) {
#pragma unroll
      for (int c = 0; c < kE; ++c, from += channel_step) load<kPixels>(from, to + c * kWords);
    } else {
#pragma unroll
      for (int c = 0; c < kE; ++c, from += channel_step) {
#pragma unroll
        for (int i = 0; i < kWords; ++i) to[c * kWords + i] = 0;
        if (c < channels) load<kPixels>(from, to + c * kWords);
      }
    }
  }

  template <int kPixels>
  __device__ __forceinline__ void read(int chunk, Words& to) const {
#pragma unroll
    for (int k = 0; k < kItems<kPixels>; ++k) {
      const int item = (chunk * kItems<kPixels> + k) * blockDim.x + threadIdx.x;
      if (item >= p.slice_items) continue;
      const int block = quotient(item, p.by_items);
      const int offset = shared.offsets[item - block * p.items];
      if (offset == kMmaOutside) continue;
      read_item<kPixels>(source + block * kE * channel_step + offset, left - block * kE,
                         to + k * kE * kLoadWords<kPixels>);
    }
  }

  // Slots from an item's first pixel to another of it. An input step is 1, 2, or so many times the
  // pixels of an item that all of them follow their own residue's.
  __device__ __forceinline__ int beside(int pixel) const {
    if (p.in_step_x == 1) return pixel;
    return p.in_step_x == 2 ? pixel % 2 * p.lane_x + pixel / 2 : pixel * p.lane_x;
  }

  template <int kPixels>
  __device__ __forceinline__ void put(uint32_t tile, int chunk, const Words& from) const {
    constexpr int kWords = kLoadWords<kPixels>;
#pragma unroll
    for (int k = 0; k < kItems<kPixels>; ++k) {
      const int item = (chunk * kItems<kPixels> + k) * blockDim.x + threadIdx.x;
      if (item >= p.slice_items) continue;
      const int block = quotient(item, p.by_items);
      const uint16_t position = shared.positions[item - block * p.items];
      if (position == kMmaNowhere) continue;
      const uint32_t to = tile + 16 * (block * p.plane + position);
      const uint32_t* words = from + k * kE * kWords;
#pragma unroll
      for (int pixel = 0; pixel < kPixels; ++pixel) {
        uint32_t slot[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if constexpr (kWide) {
            slot[i] = words[i * kWords + pixel];
          } else {
            const int c = 2 * i * kWords + pixel / 2;
            slot[i] = __byte_perm(words[c], words[c + kWords], pixel % 2 ? 0x7632 : 0x5410);
          }
        }
        mma_ptx::store_shared(to + 16 * beside(pixel),
                              Operand::prepare(make_uint4(slot[0], slot[1], slot[2], slot[3])));
      }
    }
  }

  __device__ __forceinline__ void read(int chunk) {
    if (p.copy == 4) {
      read<4>(chunk, v);
    } else if (p.copy == 2) {
      read<2>(chunk, v);
    } else {
      read<1>(chunk, v);
    }
  }

  __device__ __forceinline__ void put(uint32_t tile, int chunk) const {
    if (p.copy == 4) {
      put<4>(tile, chunk, v);
    } else if (p.copy == 2) {
      put<2>(tile, chunk, v);
    } else {
      put<1>(tile, chunk, v);
    }
  }

  // The first slice, which nothing hides: several chunks on their way at once, in the registers
  // that the sums take later.
  template <int kPixels>
  __device__ __forceinline__ void first_slice() const {
#pragma unroll 1
    for (int chunk = 0; chunk < chunks; chunk += kAhead) {
      Words words[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) read<kPixels>(chunk + i, words[i]);
#pragma unroll
      for (int i = 0; i < kAhead; ++i) put<kPixels>(shared.tile, chunk + i, words[i]);
    }
  }
  __device__ __forceinline__ void first_slice() const {
    if (p.copy == 4) {
      first_slice<4>();
    } else if (p.copy == 2) {
      first_slice<2>();
    } else {
      first_slice<1>();
    }
  }
};

}  // namespace upconv
