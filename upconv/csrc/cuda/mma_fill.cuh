// mma.sync kernel: from the input tensor to the tile in shared memory.
#pragma once

#include "mma_layout.cuh"

namespace upconv {

constexpr int kMmaOutside = -1;

// Lists where every pixel of the tile lies: in the input, relative to the tile's first image, and
// in the tile. Once for all slices. Clears the tile: what lies outside the image stays zero.
__device__ __forceinline__ void list_pixels(const MmaParams& p, const MmaUnit& unit,
                                            const MmaShared& shared) {
  const int count = p.tile_o * p.fill_z * p.fill_y * p.fill_x;
  const int whole = (count + 4 * blockDim.x - 1) / (4 * blockDim.x) * (4 * blockDim.x);
  const int channels = p.in_channels * p.groups;
  for (int i = threadIdx.x; i < whole; i += blockDim.x) {
    const int rows = quotient(i, p.by_fill_x), planes = quotient(rows, p.by_fill_y);
    const int image = quotient(planes, p.by_fill_z);
    const int column = i - rows * p.fill_x, row = rows - planes * p.fill_y;
    const int depth = planes - image * p.fill_z, lane = quotient(column, p.by_in_step_x);
    const int iz = unit.z * p.in_step_z + p.shift_z + depth;
    const int iy = unit.y * p.in_step_y + p.shift_y + row;
    const int ix = unit.x * p.in_step_x + p.shift_x + column;
    const bool inside = i < count && unit.o + image < p.batch &&
                        static_cast<unsigned>(iz) < p.in_d && static_cast<unsigned>(iy) < p.in_h &&
                        static_cast<unsigned>(ix) < p.in_w;
    const int pixel = (iz * p.in_h + iy) * p.in_w + ix;
    const int area = p.in_d * p.in_h * p.in_w;
    const int offset =
        p.channels_last ? (image * area + pixel) * channels : image * channels * area + pixel;
    shared.offsets[i] = inside ? offset : kMmaOutside;
    if (i < count) {
      shared.positions[i] =
          static_cast<uint16_t>(image * p.pitch_o + depth * p.pitch_z + row * p.pitch_y +
                                (column - lane * p.in_step_x) * p.lane_x + lane);
    }
  }
  const int slots = (p.slices > 1 ? 2 : 1) * p.slice_blocks * p.plane;
  for (int i = threadIdx.x; i < slots; i += blockDim.x) {
    mma_ptx::store_shared(shared.tile + 16 * i, make_uint4(0, 0, 0, 0));
  }
}

// Brings slices of the tile in chunks: a thread reads up to kMmaChunkWords words of a later slice
// into registers, the block computes, then the thread puts them into the tile. Between the two lie
// some thousand cycles, more than memory takes to answer.
//
// An item is one slot, or, of 16-bit types, two neighbouring pixels of a channel block: their
// channels are read 32 bits at a time where rows are aligned (copy 1), else element by element. A
// chunk holds 4, 2 or 1 items a thread: kSide channel blocks of the same pixel, so that one look
// into the tables serves them all, times as many pixels.
template <typename Operand>
struct MmaFill {
  using Element = typename Operand::Element;
  static constexpr int kE = Operand::kChannels;
  static constexpr bool kWide = sizeof(Element) == 4;
  static constexpr int kItems = kWide ? 4 : 2;  // of a chunk, when read whole
  const MmaParams& p;
  const MmaShared& shared;
  const Element* source;       // of the slice that is read
  const int64_t channel_step;  // elements from one channel to the next
  const int items;             // of one channel block
  const int side;              // channel blocks of a chunk
  const int passes;            // over the channel blocks
  const int chunks;            // of one slice
  int left;                    // channels from the slice on
  uint32_t v[kMmaChunkWords];

  __device__ __forceinline__ MmaFill(const MmaParams& p, const MmaShared& shared,
                                     const MmaUnit& unit)
      : p(p),
        shared(shared),
        source(static_cast<const Element*>(p.x)),
        channel_step(p.channels_last ? 1 : static_cast<int64_t>(p.in_d) * p.in_h * p.in_w),
        items(p.tile_o * p.fill_z * p.fill_y * p.fill_x / (kWide ? 1 : 2)),
        side(side_of(p)),
        passes(p.slice_blocks / side),
        chunks(passes * ((items + reach() - 1) / reach())),
        left(p.in_channels) {
    const int64_t area = static_cast<int64_t>(p.in_d) * p.in_h * p.in_w;
    source += static_cast<int64_t>(unit.o) * p.groups * p.in_channels * area;
    source += unit.group * p.in_channels * channel_step;
  }

  // Divides the channel blocks of a slice.
  __device__ __forceinline__ int side_of(const MmaParams& p) const {
    if (single() || p.slice_blocks % 2) return 1;
    return kWide && p.slice_blocks % 4 == 0 ? 4 : 2;
  }
  // 16-bit elements one by one fill all registers with a single item.
  __device__ __forceinline__ bool single() const { return !kWide && p.copy == 0; }
  // Items of a channel block that one chunk covers.
  __device__ __forceinline__ int reach() const {
    return (single() ? 1 : kItems / side) * blockDim.x;
  }

  __device__ __forceinline__ void next_slice() {
    source += p.slice_blocks * kE * channel_step;
    left -= p.slice_blocks * kE;
  }

  static __device__ __forceinline__ uint32_t read32(const Element* at) {
    return __ldg(reinterpret_cast<const uint32_t*>(at));
  }
  static __device__ __forceinline__ uint32_t read16(const Element* at) {
    return __ldg(reinterpret_cast<const unsigned short*>(at));
  }

  // Channels of one item; `channels` of them exist.
  template <int k>
  __device__ __forceinline__ void read_item(const Element* from, int channels) {
    if (channels >= kE) {
#pragma unroll
      for (int c = 0; c < kE; ++c, from += channel_step) v[k * kE + c] = read32(from);
    } else {
#pragma unroll
      for (int c = 0; c < kE; ++c, from += channel_step) {
        v[k * kE + c] = 0;
        if (c < channels) v[k * kE + c] = read32(from);
      }
    }
  }

  template <int kSide, int k = 0>
  __device__ __forceinline__ void read_items(const Element* from, int item, int channels) {
    if constexpr (k < kItems) {
      const int offset = shared.offsets[(item + k / kSide * blockDim.x) * (kWide ? 1 : 2)];
      if (offset != kMmaOutside) {
        read_item<k>(from + k % kSide * kE * channel_step + offset, channels - k % kSide * kE);
      }
      read_items<kSide, k + 1>(from, item, channels);
    }
  }

  template <int kSide, int k = 0>
  __device__ __forceinline__ void put_items(uint32_t slots, int item) const {
    if constexpr (k < kItems) {
      const int at = item + k / kSide * blockDim.x;
      const uint32_t to = slots + k % kSide * p.plane * 16;
      if (shared.offsets[at * (kWide ? 1 : 2)] != kMmaOutside) {
        if constexpr (kWide) {
          const uint4 words = make_uint4(v[4 * k], v[4 * k + 1], v[4 * k + 2], v[4 * k + 3]);
          mma_ptx::store_shared(to + shared.positions[at] * 16, Operand::prepare(words));
        } else {
          uint32_t one[4], two[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            one[i] = __byte_perm(v[8 * k + 2 * i], v[8 * k + 2 * i + 1], 0x5410);
            two[i] = __byte_perm(v[8 * k + 2 * i], v[8 * k + 2 * i + 1], 0x7632);
          }
          put_two(to, at, one, two);
        }
      }
      put_items<kSide, k + 1>(slots, item);
    }
  }

  __device__ __forceinline__ void put_two(uint32_t to, int item, const uint32_t (&one)[4],
                                          const uint32_t (&two)[4]) const {
    const uint32_t at = reinterpret_cast<const uint32_t*>(shared.positions)[item];
    mma_ptx::store_shared(to + (at & 0xffff) * 16, make_uint4(one[0], one[1], one[2], one[3]));
    mma_ptx::store_shared(to + (at >> 16) * 16, make_uint4(two[0], two[1], two[2], two[3]));
  }

  __device__ __forceinline__ void read_single(const Element* from, int item, int channels) {
    const int one = shared.offsets[2 * item], two = shared.offsets[2 * item + 1];
#pragma unroll
    for (int c = 0; c < 8; ++c, from += channel_step) {
      v[c] = v[8 + c % 8] = 0;
      if (c < channels && one != kMmaOutside) v[c] = read16(from + one);
      if (c < channels && two != kMmaOutside) v[8 + c % 8] = read16(from + two);
    }
  }
  __device__ __forceinline__ void put_single(uint32_t to, int item) const {
    uint32_t one[4], two[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      one[i] = v[2 * i] | v[2 * i + 1] << 16;
      two[i] = v[8 + 2 * i] | v[9 + 2 * i] << 16;
    }
    if (item < items) put_two(to, item, one, two);
  }

  __device__ __forceinline__ void read(int chunk) {
    const int part = passes == 1 ? chunk : chunk / passes;
    const int block = (chunk - part * passes) * side;
    const int item = part * reach() + static_cast<int>(threadIdx.x);
    const Element* from = source + block * kE * channel_step;
    const int channels = left - block * kE;
    if (single()) {
      if constexpr (!kWide) read_single(from, item, channels);
    } else if (side == 1) {
      read_items<1>(from, item, channels);
    } else if (!kWide || side == 2) {
      read_items<2>(from, item, channels);
    } else {
      read_items<4>(from, item, channels);
    }
  }

  __device__ __forceinline__ void put(uint32_t tile, int chunk) const {
    const int part = passes == 1 ? chunk : chunk / passes;
    const int block = (chunk - part * passes) * side;
    const int item = part * reach() + static_cast<int>(threadIdx.x);
    const uint32_t slots = tile + block * p.plane * 16;
    if (single()) {
      if constexpr (!kWide) put_single(slots, item);
    } else if (side == 1) {
      put_items<1>(slots, item);
    } else if (!kWide || side == 2) {
      put_items<2>(slots, item);
    } else {
      put_items<4>(slots, item);
    }
  }
};

}  // namespace upconv
