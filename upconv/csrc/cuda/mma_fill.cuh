// mma.sync kernel: from the input tensor to the tile in shared memory.
#pragma once

#include "mma_layout.cuh"

namespace upconv {

constexpr int kMmaOutside = -1;

// Lists where every pixel of the tile lies: in the input, relative to the tile's first image, and
// in the tile. Once for all slices.
__device__ __forceinline__ void list_pixels(const MmaParams& p, const MmaUnit& unit,
                                            const MmaShared& shared) {
  const int count = p.tile_o * p.fill_z * p.fill_y * p.fill_x;
  const int channels = p.in_channels * p.groups;
  for (int i = threadIdx.x; i < count; i += blockDim.x) {
    const int column = i % p.fill_x;
    int rest = i / p.fill_x;
    const int row = rest % p.fill_y;
    rest /= p.fill_y;
    const int depth = rest % p.fill_z, image = rest / p.fill_z;
    const int iz = unit.z * p.in_step_z + p.shift_z + depth;
    const int iy = unit.y * p.in_step_y + p.shift_y + row;
    const int ix = unit.x * p.in_step_x + p.shift_x + column;
    const bool inside = unit.o + image < p.batch && static_cast<unsigned>(iz) < p.in_d &&
                        static_cast<unsigned>(iy) < p.in_h && static_cast<unsigned>(ix) < p.in_w;
    const int pixel = (iz * p.in_h + iy) * p.in_w + ix;
    const int area = p.in_d * p.in_h * p.in_w;
    const int offset =
        p.channels_last ? (image * area + pixel) * channels : image * channels * area + pixel;
    shared.offsets[i] = inside ? offset : kMmaOutside;
    shared.positions[i] =
        static_cast<uint16_t>(image * p.pitch_o + depth * p.pitch_z + row * p.pitch_y +
                              column % p.in_step_x * p.lane_x + column / p.in_step_x);
  }
}

// Brings slices of the tile in chunks: a thread reads up to kMmaChunkWords words of a later slice
// into registers, the block computes, then the thread puts them into the tile. Between the two lie
// some thousand cycles, more than memory takes to answer.
//
// An item is one slot, or, of 16-bit types whose channels are not contiguous, two neighbouring
// pixels of a channel block: their channels are read 32 bits at a time where rows are aligned
// (copy 1), else element by element. A chunk holds 4, 2 or 1 items a thread: `side` channel blocks
// of the same pixel, so that one look into the tables serves them all, times as many pixels.
template <typename Operand>
struct MmaFill {
  using Element = typename Operand::Element;
  static constexpr int kE = Operand::kChannels;
  static constexpr bool kWide = sizeof(Element) == 4;
  const MmaParams& p;
  const MmaShared& shared;
  const Element* source;       // first channel of the group, first image of the tile
  const int64_t channel_step;  // elements from one channel to the next
  const int items;             // of one channel block
  const int chunk_items;       // of one thread in a chunk
  const int side_shift;        // log2 of side
  const int passes;            // over the channel blocks
  const int chunks;            // of one slice
  uint32_t v[kMmaChunkWords];

  __device__ __forceinline__ MmaFill(const MmaParams& p, const MmaShared& shared,
                                     const MmaUnit& unit)
      : p(p),
        shared(shared),
        source(static_cast<const Element*>(p.x)),
        channel_step(p.channels_last ? 1 : static_cast<int64_t>(p.in_d) * p.in_h * p.in_w),
        items(p.tile_o * p.fill_z * p.fill_y * p.fill_x / (kWide || p.copy == 2 ? 1 : 2)),
        chunk_items(kWide || p.copy == 2 ? 4
                    : p.copy == 1        ? 2
                                         : 1),
        side_shift(log2_of(min(p.slice_blocks, chunk_items))),
        passes((p.slice_blocks + (1 << side_shift) - 1) >> side_shift),
        chunks(passes * ((items + pixels_each() - 1) / pixels_each())) {
    const int64_t area = static_cast<int64_t>(p.in_d) * p.in_h * p.in_w;
    source += static_cast<int64_t>(unit.o) * p.groups * p.in_channels * area;
    source += unit.group * p.in_channels * channel_step;
  }

  static __device__ __forceinline__ int log2_of(int count) { return count >= 4 ? 2 : count / 2; }

  // Items of a channel block that one chunk covers.
  __device__ __forceinline__ int pixels_each() const {
    return (chunk_items >> side_shift) * blockDim.x;
  }

  static __device__ __forceinline__ uint32_t read32(const Element* at) {
    return __ldg(reinterpret_cast<const uint32_t*>(at));
  }
  static __device__ __forceinline__ uint32_t read16(const Element* at) {
    return __ldg(reinterpret_cast<const unsigned short*>(at));
  }

  // A chunk's place: its first item and its first channel block.
  struct Place {
    int item, block;
  };
  __device__ __forceinline__ Place place(int chunk) const {
    const int part = passes == 1 ? chunk : chunk / passes;
    return {part * pixels_each() + static_cast<int>(threadIdx.x), (chunk - part * passes)
                                                                      << side_shift};
  }

  __device__ __forceinline__ void read(int slice, int chunk) {
    const Place first = place(chunk);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      if (k >= chunk_items) break;
      const int item = first.item + (k >> side_shift) * blockDim.x;
      const int block = first.block + (k & ((1 << side_shift) - 1));
      if (block >= p.slice_blocks) continue;
      const int channel = (slice * p.slice_blocks + block) * kE;
      const Element* from = source + channel * channel_step;
      const int channels = item < items ? p.in_channels - channel : 0;
      const int at = min(item, items - 1);
      if (kWide || p.copy == 2) {
        read_slot(k, from, shared.offsets[at], channels);
      } else if (p.copy == 1) {
        read_pairs(k, from, shared.offsets[2 * at], channels);
      } else {
        read_elements(from, shared.offsets[2 * at], shared.offsets[2 * at + 1], channels);
      }
    }
  }

  __device__ __forceinline__ void read_slot(int k, const Element* from, int offset, int channels) {
    if (offset == kMmaOutside) channels = 0;
    if (p.copy == 2) {
      uint4 all = make_uint4(0, 0, 0, 0);
      if (channels > 0) all = __ldg(reinterpret_cast<const uint4*>(from + offset));
      v[4 * k] = all.x, v[4 * k + 1] = all.y, v[4 * k + 2] = all.z, v[4 * k + 3] = all.w;
    } else {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        v[4 * k + c] = 0;
        if (c < channels) v[4 * k + c] = read32(from + c * channel_step + offset);
      }
    }
  }
  __device__ __forceinline__ void read_pairs(int k, const Element* from, int offset, int channels) {
    if (offset == kMmaOutside) channels = 0;
#pragma unroll
    for (int c = 0; c < 8; ++c) {
      uint32_t& word = v[(8 * k + c) % kMmaChunkWords];
      word = 0;
      if (c < channels) word = read32(from + c * channel_step + offset);
    }
  }
  __device__ __forceinline__ void read_elements(const Element* from, int one, int two,
                                                int channels) {
#pragma unroll
    for (int c = 0; c < 8; ++c) {
      v[c] = v[8 + c] = 0;
      if (c < channels && one != kMmaOutside) v[c] = read16(from + c * channel_step + one);
      if (c < channels && two != kMmaOutside) v[8 + c] = read16(from + c * channel_step + two);
    }
  }

  __device__ __forceinline__ void put(uint32_t tile, int chunk) const {
    const Place first = place(chunk);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      if (k >= chunk_items) break;
      const int item = first.item + (k >> side_shift) * blockDim.x;
      const int block = first.block + (k & ((1 << side_shift) - 1));
      if (block >= p.slice_blocks || item >= items) continue;
      const uint32_t slots = tile + block * p.plane * 16;
      if (kWide || p.copy == 2) {
        mma_ptx::store_shared(
            slots + shared.positions[item] * 16,
            make_uint4(Operand::prepare(v[4 * k]), Operand::prepare(v[4 * k + 1]),
                       Operand::prepare(v[4 * k + 2]), Operand::prepare(v[4 * k + 3])));
      } else {
        put_two(k, slots, item);
      }
    }
  }
  __device__ __forceinline__ void put_two(int k, uint32_t slots, int item) const {
    uint32_t one[4], two[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (p.copy == 1) {
        const uint32_t low = v[(8 * k + 2 * i) % kMmaChunkWords];
        const uint32_t high = v[(8 * k + 2 * i + 1) % kMmaChunkWords];
        one[i] = __byte_perm(low, high, 0x5410);
        two[i] = __byte_perm(low, high, 0x7632);
      } else {
        one[i] = v[2 * i] | v[2 * i + 1] << 16;
        two[i] = v[8 + 2 * i] | v[9 + 2 * i] << 16;
      }
    }
    const uint16_t* at = shared.positions + 2 * item;
    mma_ptx::store_shared(slots + at[0] * 16, make_uint4(one[0], one[1], one[2], one[3]));
    mma_ptx::store_shared(slots + at[1] * 16, make_uint4(two[0], two[1], two[2], two[3]));
  }
};

}  // namespace upconv
