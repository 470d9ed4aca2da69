// Hopper kernel: the input as TMA boxes: who starts them, and the loaders that turn them into
// tiles.
#pragma once

#include "sm90_split.cuh"

namespace upconv {

// --- Boxes -----------------------------------------------------------------------------------

// TMA wants rows and channels that begin on 16 bytes, and boxes too: else the copy is an illegal
// instruction. A box therefore begins up to 15 bytes early, and the loaders skip its phase.
//
// Where rows do not begin on 16 bytes (1026 floats), every 2nd, 4th or 8th row does, and if need be
// every so many-th channel. The tile then comes in several boxes (kCopyRows), [row % raw_residues]
// [channel % raw_classes], each with a phase of its own. What lies beside a row in its box is
// another row and no zeros, and so is a row outside the image: the loaders write the zeros.

// First column of a unit's tile.
__device__ __forceinline__ int box_column(const Sm90Params& p, const Unit& where,
                                          const int* visit) {
  return where.x * p.in_step_x + visit[kVisitPlane + 2];
}
// First row, and depth.
__device__ __forceinline__ int box_row(const Sm90Params& p, const Unit& where, const int* visit) {
  return where.y * p.lanes * p.in_step_y + visit[kVisitPlane + 1];
}
__device__ __forceinline__ int box_depth(const Sm90Params& p, const Unit& where, const int* visit) {
  return where.z * p.in_step_z + visit[kVisitPlane];
}

// The input of all units, a few channel blocks of a tile at a time, margins included. What lies
// outside the image or the group arrives as zeros. kRows: boxes of every few rows and channels.
template <bool kRows>
struct BoxFeed {
  const Sm90Params& p;
  const Shared& shared;
  const CUtensorMap& map;
  const int block_channels, whole;                      // channels of a block; elements in 16 bytes
  const int passes;                                     // over the input of each unit
  const int units, blocks, chunks, bytes, chunk_bytes;  // blocks: of a plane; bytes: of a chunk
  // kRows: how many, and what leads from one to the next. Read from the kernel's parameters for
  // each box, these made it 266 cycles instead of 120.
  const int residues, classes, class_channels, class_rows, shift, width, stride;
  int unit, pass = 0, block = 0, chunk = 0;
  uint32_t parity = 1;
  const int* visit = nullptr;
  int planes = 0;  // of the unit that are still to come, with this one
  int x = 0, y = 0, z = 0, image = 0;

  __device__ __forceinline__ BoxFeed(const Sm90Params& p, const Shared& shared,
                                     const CUtensorMap& map, int block_channels, int whole,
                                     int passes)
      : p(p),
        shared(shared),
        map(map),
        block_channels(block_channels),
        whole(whole),
        passes(passes),
        units(ptx::pinned(kRows || p.copy == kCopyBoxes ? unit_count(p) : 0)),
        blocks(ptx::pinned(p.slices * p.slice_blocks)),
        chunks(ptx::pinned(p.raw_chunks)),
        bytes(ptx::pinned(p.raw_w * p.raw_rows * min(p.raw_residues, p.raw_h) * p.tile_o *
                          p.raw_blocks * (block_channels / whole) * 16)),
        chunk_bytes(ptx::pinned(p.raw_bytes)),
        residues(ptx::pinned(min(p.raw_residues, p.raw_h))),
        classes(ptx::pinned(p.raw_classes)),
        class_channels(ptx::pinned(block_channels / p.raw_classes)),
        class_rows(ptx::pinned(p.in_d * p.in_h)),
        shift(ptx::pinned(p.raw_shift)),
        width(ptx::pinned(p.in_w)),
        stride(ptx::pinned(p.raw_stride)),
        unit(blockIdx.x) {
    begin_unit();
  }
  __device__ __forceinline__ bool live() const { return unit < units; }

  // From `unit` on, the first one that reads anything.
  __device__ __forceinline__ void begin_unit() {
    for (; live(); unit += gridDim.x) {
      const Sm90Job& job = p.job[job_of(p, group_of(p, unit), 0)];
      planes = job.visits;
      visit = shared.visits + job.visit * kVisitWords;
      if (planes) break;
    }
    if (live()) begin_plane();
  }

  __device__ __forceinline__ void begin_plane() {
    const Unit where(p, unit);
    x = box_column(p, where, visit);
    y = box_row(p, where, visit);
    z = box_depth(p, where, visit);
    image = where.o * p.conv_groups + where.conv_group;
  }

  __device__ __forceinline__ void try_next() {
    if (!live() || !ptx::barrier_test(shared.raw_free + 8 * chunk, parity)) return;
    const uint32_t full = shared.raw_full + 8 * chunk, to = shared.raw + chunk * chunk_bytes;
    ptx::barrier_arrive_expect(full, bytes);
    if constexpr (kRows) {
      start_rows(to, full);
    } else {
      ptx::box_copy(to, map, x & -whole, y, z, block * block_channels, image, full);
    }
    if (++chunk == chunks) chunk = 0, parity ^= 1;
    block += p.raw_blocks;
    if (block < blocks) return;
    block = 0;
    if (--planes) {
      visit += kVisitWords;
      begin_plane();
    } else {
      if (++pass == passes) pass = 0, unit += gridDim.x;
      begin_unit();
    }
  }

  // Every raw_residues-th row and every raw_classes-th channel, from each of the first ones on. A
  // depth outside the image is a box outside the tensor.
  __device__ __forceinline__ void start_rows(uint32_t to, uint32_t full) const {
    const bool inside = static_cast<unsigned>(z) < p.in_d;
    const int channel = inside ? block * class_channels : p.in_channels;
    const int mask = (1 << shift) - 1;
    int first = z * p.in_h + y;
    for (int residue = residues; residue > 0; --residue, first += p.in_step_y) {
      int row = first;
#pragma unroll 1
      for (int of_class = classes; of_class > 0; --of_class, row += class_rows) {
        const int at = (row & mask) * width + x;
        ptx::box_copy(to, map, at & -whole, row >> shift, 0, channel, image, full);
        to += stride;
      }
    }
  }
};

// --- Box loaders -----------------------------------------------------------------------------

// Turns boxes from [channel][row][column] into [pixel][channel], 16 bytes a pixel. Neighbouring
// lanes take neighbouring pixels: every read and every write is free of bank conflicts, but for the
// reads of every in_step_x-th column. kApart: two pixels of 16 bits do not lie together in 4 bytes,
// because columns have a step or rows an odd length. kRows: boxes of every few rows and channels,
// which lie apart.
template <typename Operand, bool kApart, bool kRows>
struct BoxLoader {
  using Element = typename Operand::Element;
  static constexpr int kE = Operand::kBlockChannels;
  static constexpr int kVector = kWhole<Operand>;
  static constexpr int kWide = kVector / 4;  // pixels of one 4-byte read: 1, or 2 of 16 bits
  // Channels of a block whose places are kept; those after them lie as these do, further on.
  static constexpr int kKnown = kRows ? kVector : 1;
  static constexpr int kMost = kMaxItems * kItemPixels * kLoaders / 4 / kLoaders / kWide;
  const Sm90Params& p;
  const Shared& shared;
  const uint32_t channel_step, block_step;  // of the box and of the tile, bytes
  const uint32_t box_block_step;            // from one channel block of the box to the next
  const uint32_t tail_step;                 // from the head of a split number to its tail
  const uint32_t known_step;                // from the channels whose places are kept to the next
  const int raw_blocks;
  // Every thread has as many places; those past the tile are read anywhere and not written, those
  // that pad it to 4 pixels are written and never used. Column, row and image in the boxes, a byte
  // each.
  uint32_t places[kMost];

  __device__ __forceinline__ static int count_places(const Sm90Params& p) {
    return (p.pixels + kLoaders * kWide - 1) / (kLoaders * kWide);
  }

  __device__ __forceinline__ BoxLoader(const Sm90Params& p, const Shared& shared)
      : p(p),
        shared(shared),
        channel_step(ptx::pinned<uint32_t>(p.raw_w * p.raw_rows * sizeof(Element))),
        block_step(ptx::pinned(p.block_pitch * 16)),
        box_block_step(ptx::pinned(channel_step * (kE / p.raw_classes))),
        tail_step(Operand::kSplit ? ptx::pinned(p.slice_blocks * p.block_pitch * 16) : 0),
        known_step(kKnown < kE ? ptx::pinned(channel_step * (kVector / p.raw_classes)) : 0),
        raw_blocks(ptx::pinned(p.raw_blocks)) {
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
      const int pixel = (i * kLoaders + threadIdx.x) * kWide;
      const int at = pixel % p.pitch, row = pixel / p.pitch % p.rows;
      const int column = at / p.strip * kGroup + at % p.strip;
      const int image = pixel / p.pitch / p.rows % p.tile_o;
      const int lane = pixel / p.pitch / p.rows / p.tile_o;
      const int box_row = p.flat ? 0 : row * p.tile_lanes + lane;
      const int box_column = p.flat ? row * p.pitch + column : column * p.in_step_x;
      places[i] = lane < p.tile_lanes ? image << 16 | box_row << 8 | box_column : 0;
    }
  }

  // Where each channel of a block lies for each place, or the first where they follow each other.
  // `first`: where the first column of the tile's first row lies in the run of all numbers, modulo
  // 16 bytes.
  template <int kPlaces>
  __device__ __forceinline__ void find_sources(uint32_t (&source)[kPlaces][kKnown],
                                               int first) const {
    const int class_shift = __popc(p.raw_classes - 1), size = p.in_d * p.in_h * p.in_w;
    const int residue_shift = __popc(p.raw_residues - 1), row_size = p.in_step_y * p.in_w;
#pragma unroll
    for (int i = 0; i < kPlaces; ++i) {
      const uint32_t column = places[i] & 255, row = places[i] >> 8 & 255, image = places[i] >> 16;
      const uint32_t residue = row & (p.raw_residues - 1), box_row = row >> residue_shift;
      const uint32_t base = residue * p.raw_classes * p.raw_stride +
                            image * raw_blocks * box_block_step +
                            (box_row * p.raw_w + column) * sizeof(Element);
#pragma unroll
      for (int c = 0; c < kKnown; ++c) {
        const uint32_t of_class = c & (p.raw_classes - 1);
        const uint32_t phase = first + row * row_size + of_class * size & (kVector - 1);
        const uint32_t channel = of_class * p.raw_stride + (c >> class_shift) * channel_step;
        source[i][c] = base + channel + (kRows ? phase * sizeof(Element) : 0);
      }
    }
  }

  // The pixels of this thread, as bits, that lie outside the image, whose first ones are at `x, y`.
  template <int kPlaces>
  __device__ __forceinline__ uint32_t pixels_outside(int x, int y, bool last) const {
    uint32_t outside = 0;
#pragma unroll
    for (int i = 0; i < kPlaces * kWide; ++i) {
      const uint32_t place = places[i / kWide];
      const unsigned column = x + (place & 255) + i % kWide * p.in_step_x;
      const unsigned row = y + (place >> 8 & 255) * p.in_step_y;
      const bool on = i / kWide + 1 < kPlaces || last;
      outside |= static_cast<uint32_t>(on && (column >= p.in_w || row >= p.in_h)) << i;
    }
    return outside;
  }

  // Overwrites them with zeros: their boxes had other pixels there.
  __device__ __forceinline__ void wipe(uint32_t outside, uint32_t target) const {
    for (; outside; outside &= outside - 1) {
      const int i = 31 - __clz(outside & -outside);
      uint32_t to = target + ((i / kWide * kLoaders + threadIdx.x) * kWide + i % kWide) * 16;
      for (int block = raw_blocks; block > 0; --block, to += block_step) {
        ptx::store_shared(to, make_uint4(0, 0, 0, 0));
        if constexpr (Operand::kSplit) ptx::store_shared(to + tail_step, make_uint4(0, 0, 0, 0));
      }
    }
  }

  // One pixel, or two of 16 bits, of every channel at one place of the box.
  __device__ __forceinline__ void read(uint32_t (&v)[kE], uint32_t box,
                                       const uint32_t (&source)[kKnown]) const {
    uint32_t from = box + source[0];
#pragma unroll
    for (int c = 0; c < kE; ++c, from += channel_step) {
      if constexpr (kRows) from = box + source[c % kKnown] + c / kKnown * known_step;
      if constexpr (kApart) {
        unsigned short low, high;
        ptx::load_shared(low, from);
        ptx::load_shared(high, from + p.in_step_x * sizeof(Element));
        v[c] = low | static_cast<uint32_t>(high) << 16;
      } else {
        ptx::load_shared(v[c], from);
      }
    }
  }

  __device__ __forceinline__ void write(uint32_t (&v)[kE], uint32_t block, int i, bool on,
                                        const Band& band) const {
    const uint32_t target = block + (i * kLoaders + threadIdx.x) * kWide * 16;
    if constexpr (Operand::kSplit) {
      if (band.span != ~0u) {
#pragma unroll
        for (int k = 0; k < kE; ++k) v[k] = band.own(v[k]);
      }
      uint32_t head[4], tail[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) cut_inputs(v[2 * k], v[2 * k + 1], band.scale, head[k], tail[k]);
      ptx::store_shared_if(on, target, make_uint4(head[0], head[1], head[2], head[3]));
      ptx::store_shared_if(on, target + tail_step, make_uint4(tail[0], tail[1], tail[2], tail[3]));
    } else if constexpr (kE == 4) {
      ptx::store_shared_if(on, target,
                           make_uint4(Operand::prepare_box(v[0]), Operand::prepare_box(v[1]),
                                      Operand::prepare_box(v[2]), Operand::prepare_box(v[3])));
    } else {
      // Two pixels: half of the lanes begin with the second one, so that 8 lanes hit all banks.
      const uint32_t odd = threadIdx.x / 4 % 2;
#pragma unroll
      for (uint32_t k = 0; k < 2; ++k) {
        const uint32_t pick = k ^ odd ? 0x7632 : 0x5410;
        ptx::store_shared_if(
            on, target + (k ^ odd) * 16,
            make_uint4(__byte_perm(v[0], v[1], pick), __byte_perm(v[2], v[3], pick),
                       __byte_perm(v[4], v[5], pick), __byte_perm(v[6], v[7], pick)));
      }
    }
  }

  // kBlocks channel blocks of a box, all kPlaces places, of which the last is written if `last`. As
  // many reads as registers allow are on their way together.
  template <int kBlocks, int kPlaces>
  __device__ __forceinline__ void place(uint32_t box, const uint32_t (&source)[kPlaces][kKnown],
                                        uint32_t target, bool last, const Band& band) const {
    constexpr int kRegisters = kApart || (kRows && Operand::kSplit) ? 16 : 32;
    constexpr int kRoom = kRegisters / kE / kBlocks > 0 ? kRegisters / kE / kBlocks : 1;
    constexpr int kTogether = kPlaces < kRoom ? kPlaces : kRoom;
#pragma unroll
    for (int first = 0; first < kPlaces; first += kTogether) {
      uint32_t v[kBlocks][kTogether][kE];
#pragma unroll
      for (int b = 0; b < kBlocks; ++b)
#pragma unroll
        for (int i = first; i < first + kTogether && i < kPlaces; ++i) {
          read(v[b][i - first], box + b * box_block_step, source[i]);
        }
#pragma unroll
      for (int b = 0; b < kBlocks; ++b)
#pragma unroll
        for (int i = first; i < first + kTogether && i < kPlaces; ++i) {
          write(v[b][i - first], target + b * block_step, i, i + 1 < kPlaces || last, band);
        }
    }
  }

  // All channel blocks of a box, several at a time where a thread has few places.
  template <int kPlaces>
  __device__ __forceinline__ void place_box(uint32_t box, const uint32_t (&source)[kPlaces][kKnown],
                                            uint32_t target, bool last, const Band& band) const {
    constexpr int kBlocks = kApart || kPlaces > 2 ? 1 : kPlaces == 2 ? 2 : 4;
    int left = raw_blocks;
    for (; left >= kBlocks; left -= kBlocks) {
      place<kBlocks, kPlaces>(box, source, target, last, band);
      box += kBlocks * box_block_step;
      target += kBlocks * block_step;
    }
    for (; kBlocks > 1 && left > 0; --left) {
      place<1, kPlaces>(box, source, target, last, band);
      box += box_block_step;
      target += block_step;
    }
  }

  // The whole kernel's work, for a tile of which each thread has kPlaces places: a branch for each
  // place cost more than its reads.
  template <int kPlaces>
  __device__ __forceinline__ void run() const {
    int chunk = 0, slot = 0;
    uint32_t chunk_parity = 0, slot_parity = 1;
    const bool speaker = threadIdx.x % 32 == 0;
    const bool last = ((kPlaces - 1) * kLoaders + threadIdx.x) * kWide < p.pixels;
    const int units = ptx::pinned(unit_count(p)), slots = ptx::pinned(p.slots);
    const int chunks = ptx::pinned(p.raw_chunks), chunk_bytes = ptx::pinned(p.raw_bytes);
    const int boxes = ptx::pinned(p.slice_blocks / raw_blocks);
    uint32_t source[kPlaces][kKnown], outside = 0;
    int known = -1;  // the `first` of the sources
    const Bands<Operand::kSplit> bands(shared);
    const int passes = bands.count();
    if constexpr (!kRows) find_sources(source, 0);
    for (int unit = blockIdx.x; unit < units; unit += gridDim.x) {
      const Unit where(p, unit);
      const Sm90Job& job = p.job[job_of(p, group_of(p, unit), 0)];
#pragma unroll 1
      for (int pass = 0; pass < passes; ++pass) {
        const Band band = bands.band(pass);
        const int* visit = shared.visits + job.visit * kVisitWords;
        for (int planes = job.visits; planes > 0; --planes, visit += kVisitWords) {
          const int x = box_column(p, where, visit);
          uint32_t late = (x & (kVector - 1)) * sizeof(Element);
          if constexpr (kRows) {
            const int y = box_row(p, where, visit), z = box_depth(p, where, visit);
            const int first = (z * p.in_h + y) * p.in_w + x & (kVector - 1);
            if (first != known) find_sources(source, known = first);
            if (!p.flat) outside = pixels_outside<kPlaces>(x, y, last);
            late = 0;
          }
          for (int slices = p.slices; slices > 0; --slices) {
            ptx::barrier_wait(shared.emptied + 8 * slot, slot_parity);
            uint32_t target = shared.slots + slot * slot_bytes(p);
            for (int box = boxes; box > 0; --box) {
              ptx::barrier_wait(shared.raw_full + 8 * chunk, chunk_parity);
              place_box(shared.raw + chunk * chunk_bytes + late, source, target, last, band);
              if (kRows && outside) wipe(outside, target);
              target += raw_blocks * block_step;
              __syncwarp();
              if (speaker) ptx::barrier_arrive(shared.raw_free + 8 * chunk);
              if (++chunk == chunks) chunk = 0, chunk_parity ^= 1;
            }
            ptx::fence_async_proxy();
            __syncwarp();
            if (speaker) ptx::barrier_arrive(shared.filled + 8 * slot);
            if (++slot == slots) slot = 0, slot_parity ^= 1;
          }
        }
      }
    }
  }
};

template <typename Loader, int kPlaces = 1>
__device__ __forceinline__ void run_loader(const Sm90Params& p, const Loader& loader) {
  if (Loader::count_places(p) == kPlaces) {
    loader.template run<kPlaces>();
  } else if constexpr (kPlaces < Loader::kMost) {
    run_loader<Loader, kPlaces + 1>(p, loader);
  }
}

template <typename Operand, bool kRows>
__device__ __forceinline__ void load_boxes(const Sm90Params& p, const Shared& shared) {
  if constexpr (sizeof(typename Operand::Element) == 2) {
    const bool apart = p.in_step_x > 1 || (kRows && p.in_w % 2);
    if (apart) return run_loader(p, BoxLoader<Operand, true, kRows>(p, shared));
  }
  run_loader(p, BoxLoader<Operand, false, kRows>(p, shared));
}

}  // namespace upconv
