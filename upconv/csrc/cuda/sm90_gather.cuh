// Hopper kernel: loaders that copy the input tile themselves, where TMA cannot: channels_last, rows
// longer than a box, channels of which too few begin on 16 bytes.
#pragma once

#include "sm90_split.cuh"

namespace upconv {

// --- Gathering loaders -----------------------------------------------------------------------

// An item is 4 neighbouring pixels of one channel block, or of half of one where float32 is split:
// 64 bytes. Each loader thread copies its items asynchronously into a ring of its own, then turns
// them from [channel][pixel] into [pixel][channel] on the way to the slot: 36 KB in flight for each
// multiprocessor, and no register waits for memory. Plain loads into 64 registers were 1.4x slower
// on kb57: a wait for the oldest of them waits for all.
struct Item {
  uint32_t v[16];
};

// Where a thread's next item lies in the tile; moves in jumps of a fixed number of items, with no
// division after the first.
struct Walker {
  int quad, row, image, lane;
  int jump_quad, jump_row;

  __device__ __forceinline__ Walker(const Sm90Params& p, int start, int jump) {
    const int quads = p.pitch / kItemPixels;
    lane = 0;
    image = 0;
    row = start / quads;
    quad = start - row * quads;
    jump_row = jump / quads;
    jump_quad = jump - jump_row * quads;
    wrap(p);
  }
  __device__ __forceinline__ void wrap(const Sm90Params& p) {
    while (row >= p.rows) {
      row -= p.rows;
      if (++image == p.tile_o) image = 0, ++lane;
    }
  }
  __device__ __forceinline__ void advance(const Sm90Params& p) {
    quad += jump_quad;
    row += jump_row;
    if (quad * kItemPixels >= p.pitch) quad -= p.pitch / kItemPixels, ++row;
    wrap(p);
  }
};

template <typename Operand>
struct Loader {
  using Element = typename Operand::Element;
  static constexpr int kE = kWhole<Operand>;                   // channels of an item
  static constexpr int kParts = Operand::kBlockChannels / kE;  // items of 4 pixels of a block
  static constexpr int kVector = kItemBytes / kE;  // bytes of one channel of an item: 16 or 8
  static constexpr int kOutside = -(1 << 30);      // offset of an item outside the image
  const Sm90Params& p;
  const Shared& shared;
  // 4 channel blocks and 32 items side by side: a warp then reads 8 neighbouring items of a channel
  // and its 16-byte stores hit every bank once. The other blocks of the slice come in later rounds.
  // Where an item is a part of a block, parts are what is called blocks here.
  const int slice_blocks, lane_blocks, lane_block, lane_item, jump, round_items;
  const uint32_t ring;         // this thread's part of the raw ring
  const int64_t channel_step;  // elements from one channel to the next
  int* const offsets;          // this thread's items: where they lie, and their first column
  const Bands<Operand::kSplit> bands;
  static constexpr int kColumns = kMaxItems * kLoaders;  // from an offset to its column
  // What is copied next.
  int unit, pass = 0, slice = 0, round = 0, item = 0;
  const int* visit = nullptr;
  int planes = 0;                   // of the unit that are still to come, with this one
  uint32_t of_pass = 0;             // of each ring entry, the pass that it is for: 4 bits
  const Element* source = nullptr;  // first channel of the round
  int channels = 0;                 // that exist from there on

  __device__ __forceinline__ Loader(const Sm90Params& p, const Shared& shared)
      : p(p),
        shared(shared),
        slice_blocks(kParts * p.slice_blocks),
        lane_blocks(min(slice_blocks, 4)),
        lane_block(threadIdx.x % lane_blocks),
        lane_item(threadIdx.x / lane_blocks),
        jump(kLoaders / lane_blocks),
        round_items((p.pixels / kItemPixels + jump - 1) / jump),
        ring(shared.raw + threadIdx.x * kVector),
        channel_step(p.channels_last ? 1 : static_cast<int64_t>(p.in_d) * p.in_h * p.in_w),
        offsets(shared.offsets + threadIdx.x),
        bands(shared),
        unit(static_cast<int>(blockIdx.x) - static_cast<int>(gridDim.x)) {
    next_unit();
  }

  __device__ __forceinline__ bool live() const { return unit < unit_count(p); }

  // Finds the next unit that reads anything.
  __device__ __forceinline__ void next_unit() {
    do {
      unit += gridDim.x;
      if (!live()) return;
      find_planes();
    } while (planes == 0);
    pass = 0;
    begin_plane();
  }

  __device__ __forceinline__ void find_planes() {
    const Sm90Job& job = p.job[job_of(p, group_of(p, unit), 0)];
    planes = job.visits;
    visit = shared.visits + job.visit * kVisitWords;
  }

  // Where this thread's items of a plane lie: once for all its slices.
  __device__ __forceinline__ void begin_plane() {
    const Unit where(p, unit);
    const int z = where.z * p.in_step_z + visit[kVisitPlane];
    const int y = where.y * p.lanes * p.in_step_y + visit[kVisitPlane + 1];
    const int x = where.x * p.in_step_x + visit[kVisitPlane + 2];
    const int channels_between = p.channels_last ? 1 : p.conv_groups * p.in_channels;
    Walker walker(p, lane_item, jump);
    for (int i = 0; i < round_items; ++i) {
      const int iy = y + (walker.row * p.tile_lanes + walker.lane) * p.in_step_y;
      const int ix = x + walker.quad * kItemPixels * p.in_step_x;
      const bool row_inside = walker.lane < p.tile_lanes && where.o + walker.image < p.batch &&
                              static_cast<unsigned>(z) < p.in_d &&
                              static_cast<unsigned>(iy) < p.in_h;
      // Columns are checked where an item can hang over the edge; else all 4 are in or out.
      const bool whole = p.copy == 0 && !p.channels_last;
      const bool inside = row_inside && (!whole || static_cast<unsigned>(ix) < p.in_w);
      const int depth = walker.image * channels_between * p.in_d + z;
      offsets[i * kLoaders] = inside ? (depth * p.in_h + iy) * p.in_w + ix : kOutside;
      offsets[i * kLoaders + kColumns] = inside ? ix : p.in_w;
      walker.advance(p);
    }
    slice = 0;
    const int64_t area = static_cast<int64_t>(p.in_d) * p.in_h * p.in_w;
    source = static_cast<const Element*>(p.x) + where.o * area * p.conv_groups * p.in_channels +
             (where.conv_group * p.in_channels + lane_block * kE) * channel_step;
    channels = p.in_channels - lane_block * kE;
  }

  // Shared address of vector `i` of a ring entry: a channel, or a pixel when channels are last.
  __device__ __forceinline__ uint32_t raw(int entry, int i) const {
    return ring + (entry * kE + i) * (kLoaders * kVector);
  }
  __device__ __forceinline__ uint32_t raw_pixel(int entry, int i) const {
    return shared.raw + ((entry * kItemPixels + i) * kLoaders + threadIdx.x) * 16;
  }

  // Starts the copies of the next item.
  __device__ __forceinline__ void fetch(int entry) {
    if (Operand::kSplit) of_pass = of_pass & ~(15u << 4 * entry) | pass << 4 * entry;
    const int offset = offsets[item * kLoaders];
    if (p.channels_last) {
      fetch_channels_last(entry, offset);
    } else if (p.copy == 0) {
      const Element* from = source + offset;
      const int bytes = offset == kOutside ? 0 : kVector;
#pragma unroll
      for (int c = 0; c < kE; ++c) {
        ptx::copy_async<kVector>(raw(entry, c), from, c < channels ? bytes : 0);
        from += channel_step;
      }
    } else {
      fetch_edges(entry, offset);
    }
    if (++item < round_items) return;
    item = 0;
    source += lane_blocks * kE * channel_step;
    channels -= lane_blocks * kE;
    if (++round * lane_blocks < slice_blocks) return;
    round = 0;
    if (++slice < p.slices) return;
    visit += kVisitWords;
    if (--planes == 0) {
      if (!Operand::kSplit || ++pass == bands.count()) return next_unit();
      find_planes();
    }
    begin_plane();
  }

  // Rows that do not start on whole vectors: 4 bytes at a time, or single elements where a 16-bit
  // row has an odd length. Every column is checked by itself.
  __device__ __forceinline__ void fetch_edges(int entry, int offset) {
    const int column = offsets[item * kLoaders + kColumns];
    const Element* from = source + offset;
    constexpr int kStep = 4 / sizeof(Element);
#pragma unroll
    for (int c = 0; c < kE; ++c) {
#pragma unroll
      for (int i = 0; i < kItemPixels; i += kStep) {
        const int first = column + i * p.in_step_x;
        const Element* at = from + i * p.in_step_x;
        const uint32_t target = raw(entry, c) + i * sizeof(Element);
        if (kStep == 1 || p.copy == 1) {
          const bool on = c < channels && static_cast<unsigned>(first) < p.in_w;
          ptx::copy_async<4>(target, at, on ? 4 : 0);
        } else {
          uint32_t v = 0;
#pragma unroll
          for (int k = 0; k < kStep; ++k) {
            const bool on = c < channels && static_cast<unsigned>(first + k * p.in_step_x) < p.in_w;
            const auto* half = reinterpret_cast<const unsigned short*>(at + k * p.in_step_x);
            if (on) v |= static_cast<uint32_t>(__ldg(half)) << (16 * k);
          }
          ptx::store_shared(target, v);
        }
      }
      from += channel_step;
    }
  }

  __device__ __forceinline__ void fetch_channels_last(int entry, int offset) {
    const int column = offsets[item * kLoaders + kColumns];
    const int channels_between = p.conv_groups * p.in_channels;
    const Element* from = source + static_cast<int64_t>(offset) * channels_between;
#pragma unroll
    for (int i = 0; i < kItemPixels; ++i) {
      const bool on = 0 < channels && static_cast<unsigned>(column + i * p.in_step_x) < p.in_w;
      ptx::copy_async<16>(raw_pixel(entry, i), from, on ? 16 : 0);
      from += p.in_step_x * channels_between;
    }
  }

  // An item that has arrived, in registers, as the global memory has it.
  __device__ __forceinline__ void read(int entry, Item& to) const {
    if (p.channels_last || kE == 4) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        uint4 v;
        ptx::load_shared(v, p.channels_last ? raw_pixel(entry, i) : raw(entry, i));
        to.v[4 * i] = v.x, to.v[4 * i + 1] = v.y, to.v[4 * i + 2] = v.z, to.v[4 * i + 3] = v.w;
      }
    } else {
#pragma unroll
      for (int c = 0; c < kE; ++c) {
        uint2 v;
        ptx::load_shared(v, raw(entry, c));
        to.v[2 * c % 16] = v.x, to.v[(2 * c + 1) % 16] = v.y;
      }
    }
  }

  // Pixel `i` of an item, 4 bytes of its channels each.
  __device__ __forceinline__ uint4 pixel_of(const Item& from, int i) const {
    uint32_t word[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      if (p.channels_last) {
        word[k] = from.v[4 * i + k];
      } else if constexpr (kE == 4) {
        word[k] = from.v[4 * k + i];
      } else {  // channels 2k and 2k + 1 of pixel i
        word[k] =
            __byte_perm(from.v[4 * k + i / 2], from.v[4 * k + 2 + i / 2], i % 2 ? 0x7632 : 0x5410);
      }
    }
    return make_uint4(word[0], word[1], word[2], word[3]);
  }

  // Puts the item of a ring entry into the slot, as 4 pixels of 16 bytes, or of 8 and 8.
  __device__ __forceinline__ void place(const Item& from, int entry, uint32_t target) const {
#pragma unroll
    for (int i = 0; i < kItemPixels; ++i) {
      const uint4 v = pixel_of(from, i);
      if constexpr (Operand::kSplit) {
        const Band band = bands.band(of_pass >> 4 * entry & 15);
        uint2 head, tail;
        cut_inputs(band.own(v.x), band.own(v.y), band.scale, head.x, tail.x);
        cut_inputs(band.own(v.z), band.own(v.w), band.scale, head.y, tail.y);
        ptx::store_shared(target + i * 16, head);
        ptx::store_shared(target + (p.slice_blocks * p.block_pitch + i) * 16, tail);
      } else {
        ptx::store_shared(target + i * 16,
                          make_uint4(Operand::prepare(v.x), Operand::prepare(v.y),
                                     Operand::prepare(v.z), Operand::prepare(v.w)));
      }
    }
  }
};

// Where the next item goes: follows the loader's order, kInFlight items behind.
template <typename Operand>
struct Placer {
  const Loader<Operand>& loader;
  int slot = 0, item = 0, round = 0;
  uint32_t parity = 1;

  // `entry`: of the ring, where the item came from.
  __device__ __forceinline__ void put(const Item& from, int entry) {
    const Sm90Params& p = loader.p;
    const Shared& shared = loader.shared;
    if (item == 0 && round == 0) ptx::barrier_wait(shared.emptied + 8 * slot, parity);
    const int pixel = (loader.lane_item + item * loader.jump) * kItemPixels;
    constexpr int kParts = Loader<Operand>::kParts;
    const int part = round * loader.lane_blocks + loader.lane_block;
    const int place = part / kParts * p.block_pitch + pixel;
    if (pixel < p.pixels) {
      loader.place(from, entry,
                   shared.slots + slot * slot_bytes(p) + place * 16 + part % kParts * 8);
    }
    if (++item < loader.round_items) return;
    item = 0;
    if (++round * loader.lane_blocks < loader.slice_blocks) return;
    round = 0;
    ptx::fence_async_proxy();
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::barrier_arrive(shared.filled + 8 * slot);
    if (++slot == p.slots) slot = 0, parity ^= 1;
  }
};

template <typename Operand>
__device__ __forceinline__ void gather_tiles(const Sm90Params& p, const Shared& shared) {
  Loader<Operand> loader(p, shared);
  Placer<Operand> placer{loader};
  int next = 0, oldest = 0, waiting = 0;
  while (true) {
    while (waiting < kInFlight && loader.live()) {
      loader.fetch(next);
      ptx::copy_async_commit();
      next = next + 1 == kInFlight ? 0 : next + 1;
      ++waiting;
    }
    if (waiting == 0) return;
    // Two items at a time, so that their shared-memory latencies overlap.
    if (waiting == kInFlight) {
      ptx::copy_async_wait<kInFlight - 2>();
    } else {
      ptx::copy_async_wait<0>();
    }
    const int second = oldest + 1 == kInFlight ? 0 : oldest + 1;
    Item one, two;
    loader.read(oldest, one);
    loader.read(second, two);
    placer.put(one, oldest);
    oldest = second;
    if (--waiting == 0) continue;
    placer.put(two, second);
    oldest = oldest + 1 == kInFlight ? 0 : oldest + 1;
    --waiting;
  }
}

}  // namespace upconv
