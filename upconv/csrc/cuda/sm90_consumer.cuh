// Hopper kernel: what a consumer warpgroup does with a tile: multiply, then store.
#pragma once

#include <type_traits>

#include "sm90_layout.cuh"
#include "wgmma.cuh"

namespace upconv {

// --- Consumers: main loop --------------------------------------------------------------------

// Shared-memory operand without swizzle: 8 rows of 16 bytes make a core matrix; `k_step` is the
// distance of the two core matrices along K, 128 bytes the distance along rows. All in 16 bytes;
// moving the operand adds to the low word, which never carries.
__device__ __forceinline__ uint32_t descriptor_low(uint32_t address, uint32_t k_step) {
  return (address >> 4) | (k_step << 16);
}
__device__ __forceinline__ uint64_t descriptor(uint32_t low) {
  return static_cast<uint64_t>(128 >> 4) << 32 | low;
}

// What a lane loads or stores at a time.
template <int kBytes>
using VectorOf = std::conditional_t<
    kBytes == 2, unsigned short,
    std::conditional_t<kBytes == 4, uint32_t, std::conditional_t<kBytes == 8, uint2, uint4>>>;

// One warpgroup: MB blocks of 64 rows by N pixels.
template <typename Operand, int N, int MB>
struct Consumer {
  using Element = typename Operand::Element;
  // Staging of the epilogue, in elements. Contiguous: 16 rows of 256 bytes, padded so that rows
  // written together fall into different banks. channels_last: 16 channels a pixel, likewise.
  static constexpr int kChunk = 256 / sizeof(Element);
  static constexpr int kPitch = kChunk + (sizeof(Element) == 4 ? 32 : 16) / sizeof(Element);
  static constexpr int kPixels = 32, kPixelPitch = 16 + 16 / sizeof(Element);
  static_assert(16 * kPitch * sizeof(Element) <= kStagingBytes, "rows overrun the staging slice");
  static_assert(kPixels * kPixelPitch * sizeof(Element) <= kStagingBytes, "pixels overrun");
  const Sm90Params& p;
  const Shared& shared;
  const int c;
  const bool issuer;  // the one thread of the warpgroup that arrives on barriers
  float d[MB][N / 2];
  int stage = 0, slot = 0;
  uint32_t stage_parity = 0, slot_parity = 0, turn_parity;
  // Steps in flight, each a stage and the slot that it reads last, plus one; 0 for none. One
  // register each: there is none to spare.
  int older = 0, newer = 0;

  __device__ __forceinline__ Consumer(const Sm90Params& p, const Shared& shared, int c)
      : p(p),
        shared(shared),
        c(c),
        issuer(threadIdx.x % 128 == 0),
        turn_parity(c == 0 ? 1 : 0) {}  // the first turn is consumer 0's

  // Gives back what one retired step has read: its weight stage, and its slot if it was the last
  // step to read it.
  __device__ __forceinline__ void retire(int step) {
    ptx::barrier_arrive_if(issuer && (step & 0xff), shared.spent + 8 * (step & 0xff) - 8);
    ptx::barrier_arrive_if(issuer && step >> 8, shared.emptied + 8 * (step >> 8) - 8);
  }

  // Waits for everything in flight and gives it back.
  __device__ __forceinline__ void drain() {
    ptx::wgmma_wait<0>();
    retire(older);
    retire(newer);
    older = newer = 0;
  }

  __device__ __forceinline__ void begin_turn() {
    ptx::barrier_wait(shared.turn + 8 * c, turn_parity);
    turn_parity ^= 1;
  }
  // Hands the tensor cores on as soon as everything is issued, then gives back what was read.
  __device__ __forceinline__ void end_turn() {
    ptx::barrier_arrive_if(issuer, shared.turn + 8 * (1 - c));
    drain();
    __syncwarp();
  }

  // WGMMA keeps the four warps together. Without one, the issuer's warp could run ahead and hand on
  // turns and slots twice while another warp still waits for the first time: a parity test cannot
  // tell two phases apart, and that warp would wait for ever.
  __device__ __forceinline__ void keep_together() { ptx::warpgroup_sync(1 + c); }

  // Moves past the weight blocks and slots of the other consumer's turn.
  __device__ __forceinline__ void skip_stages(int steps) {
    stage += steps;
    while (stage >= p.stages) stage -= p.stages, stage_parity ^= 1;
  }
  __device__ __forceinline__ void skip_slots(int slices) {
    slot += slices;
    while (slot >= p.slots) slot -= p.slots, slot_parity ^= 1;
  }

  __device__ static __forceinline__ void load_offsets(uint32_t (&to)[4], const int* from) {
    const int4 v = *reinterpret_cast<const int4*>(from);
    to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
  }
  __device__ static __forceinline__ void load_offsets(uint32_t (&to)[2], const int* from) {
    to[0] = from[0], to[1] = from[1];
  }
  __device__ static __forceinline__ void load_offsets(uint32_t (&to)[1], const int* from) {
    to[0] = from[0];
  }

  // One weight block: kPairs instructions, each two channel blocks deep at its own place in the
  // tile. Two steps stay in flight behind it.
  template <int kPairs>
  __device__ __forceinline__ void multiply(float (&accumulator)[N / 2], uint32_t tile,
                                           const int* offsets) {
    uint32_t b[kPairs];
    load_offsets(b, offsets);
    ptx::barrier_wait(shared.weights_full + 8 * stage, stage_parity);
    const uint32_t a = descriptor_low(shared.weights + stage * kStageBytes, kRowsPerBlock);
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < kPairs; ++k) {
      Wgmma<Operand, N>::run(accumulator, descriptor(a + k * 2 * kRowsPerBlock),
                             descriptor(tile + b[k]));
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<2>();
    retire(older);
    older = newer;
    newer = stage + 1;
    if (++stage == p.stages) stage = 0, stage_parity ^= 1;
  }

  // `lists`: each block's tap list, its first pair and their number in 16 bits each.
  __device__ __forceinline__ void multiply_slice(const uint32_t (&lists)[MB]) {
    // Nothing is held back while waiting: the slot waited for may depend on it.
    if (!ptx::barrier_test(shared.filled + 8 * slot, slot_parity)) {
      drain();
      ptx::barrier_wait(shared.filled + 8 * slot, slot_parity);
    }
    const uint32_t tile = descriptor_low(shared.slots + slot * slot_bytes(p), p.block_pitch);
#pragma unroll
    for (int j = 0; j < MB; ++j) {
      // Whole steps, then what is left in a step of 2 and a step of 1. Lists start on whole steps.
      const int* pair = shared.pairs + (lists[j] >> 16);
      int left = lists[j] & 0xffff;
      for (; left >= 4; left -= 4, pair += 4) multiply<4>(d[j], tile, pair);
      if (left == 0) continue;
      if (left & 2) multiply<2>(d[j], tile, pair);
      if (left & 1) multiply<1>(d[j], tile, pair + (left & 2));
    }
    uint32_t pairs = 0;
#pragma unroll
    for (int j = 0; j < MB; ++j) pairs |= lists[j] & 0xffff;
    if (pairs) {
      newer |= (slot + 1) << 8;
    } else {  // a job without taps in this plane has read nothing
      keep_together();
      retire((slot + 1) << 8);
    }
    skip_slots(1);
  }

  // The tap lists of this consumer's job in a plane.
  __device__ __forceinline__ void load_lists(uint32_t (&lists)[MB], const int* visit) const {
    visit += p.alternate ? 0 : c * kMaxBlocks;
#pragma unroll
    for (int j = 0; j < MB; ++j) {
      const uint32_t list = visit[j];  // an Sm90List, as it lies in memory
      lists[j] = list << 16 | list >> 16;
    }
  }

  // `visit`: the first plane of the unit, in the table.
  __device__ __forceinline__ void accumulate(const int* visit, int slices) {
#pragma unroll
    for (int j = 0; j < MB; ++j)
#pragma unroll
      for (int i = 0; i < N / 2; ++i) d[j][i] = 0.f;
    uint32_t lists[MB];
    load_lists(lists, visit);
    // A unit without slices takes an empty turn: the other consumer waits for it.
    int slice = 0, left = slices;
    do {
      const int rest = max(left - p.turn_slices, 0);  // after this turn
      const int other_steps = p.alternate ? 0 : steps_in(p, visit, 1 - c, slice, left - rest);
      if (c == 1) skip_stages(other_steps);
      begin_turn();
      if (!left) keep_together();
      for (; left > rest; --left) {
        multiply_slice(lists);
        if (++slice == p.slices) {
          slice = 0;
          visit += kVisitWords;
          load_lists(lists, visit);  // after the last plane: of nothing that is used
        }
      }
      end_turn();
      if (c == 0) skip_stages(other_steps);
    } while (left);
#pragma unroll
    for (int j = 0; j < MB; ++j)
#pragma unroll
      for (int i = 0; i < N / 2; ++i) ptx::keep_after_wait(d[j][i]);
  }

  // --- Consumers: epilogue ---------------------------------------------------------------------
  // Each warp regroups its 16 rows through its own staging slice; no other warp is waited for.

  // Outputs of one channel of an image.
  __device__ __forceinline__ int64_t out_area() const {
    return static_cast<int64_t>(p.out_d) * p.out_h * p.out_w;
  }

  // First output of a unit's depth and row phase in y, channel 0 of its group.
  __device__ __forceinline__ int64_t unit_offset(const Unit& where, int first_z, int first_y,
                                                 int first_x) const {
    const int64_t depth = static_cast<int64_t>(where.z) * p.out_step_z + first_z;
    const int64_t row = static_cast<int64_t>(where.y) * p.out_step_y + first_y;
    const int64_t column = static_cast<int64_t>(where.x) * p.out_step_x + first_x;
    const int64_t pixel = (depth * p.out_h + row) * p.out_w + column;
    const int64_t image = static_cast<int64_t>(where.o) * p.conv_groups;
    const int64_t channels = static_cast<int64_t>(where.conv_group) * p.out_channels;
    if (p.channels_last) {
      return (image * out_area() + pixel * p.conv_groups) * p.out_channels + channels;
    }
    return (image * p.out_channels + channels) * out_area() + pixel;
  }

  // Does the unit's one depth of a phase exist?
  __device__ __forceinline__ bool depth_inside(const Unit& where, int first_z) const {
    return where.z * p.out_step_z + first_z < p.out_d;
  }

  // Are all outputs of the tile inside, for the given row phase and last column phase?
  __device__ __forceinline__ bool unit_inside(const Unit& where, int first_y, int last_x) const {
    return where.o + p.tile_o <= p.batch &&
           (where.y + p.tile_h - 1) * p.out_step_y + first_y < p.out_h &&
           (where.x + p.tile_w - 1) * p.out_step_x + last_x < p.out_w;
  }

  // Offset of accumulator column `n` from its unit's first output, -1 when it is not stored.
  __device__ __forceinline__ int column_offset(const Unit& where, bool inside, int first_y, int n,
                                               int extra_x) const {
    const int at = n < N ? shared.places[n] : -1;
    if (inside || at < 0) return at;
    const int entry = shared.columns[n];
    const bool on = where.o + (entry >> 16) < p.batch &&
                    (where.y + (entry >> 8 & 255)) * p.out_step_y + first_y < p.out_h &&
                    (where.x + (entry & 255)) * p.out_step_x + extra_x < p.out_w;
    return on ? at : -1;
  }

  // Bias of an output channel; 0 past the end.
  __device__ __forceinline__ float row_bias(const Unit& where, int channel) const {
    if (!p.bias || channel >= p.out_channels) return 0.f;
    const int at = where.conv_group * p.out_channels + channel;
    return Operand::to_float(static_cast<const Element*>(p.bias)[at]);
  }

  template <int V>
  using Vector = VectorOf<V * sizeof(Element)>;

  // Writes the staged rows, V elements a lane, to their places. Rows are read in batches before any
  // is written, lest each read wait for the write before it.
  template <int V, int kSpan>
  __device__ __forceinline__ void sweep(uint32_t staging, Element* base, const Unit& where,
                                        bool inside, uint32_t columns, int first_x, int first_y,
                                        int channels, int chunk, int width) const {
    constexpr int kLanes = kChunk / V;  // that one row takes
    constexpr int kTogether = kLanes < 32 ? 32 / kLanes : 1, kBatch = 8 / kTogether;
    const int span = kSpan ? kSpan : p.out_step_x;
    const int64_t channel_step = out_area();
    const int first_row = threadIdx.x % 32 / kLanes;
#pragma unroll 1
    for (int position = threadIdx.x % 32 % kLanes * V; position < width; position += 32 * V) {
      const int q = position / span, residue = position - q * span;
      if (kSpan != 1 && !(columns >> residue & 1)) continue;
      const int at =
          column_offset(where, inside, first_y, chunk + q, kSpan == 1 ? first_x : residue);
      if (at < 0) continue;
      Element* target = base + (at + (kSpan == 1 ? 0 : residue)) + first_row * channel_step;
      const uint32_t source = staging + (first_row * kPitch + position) * sizeof(Element);
#pragma unroll
      for (int row = 0; row < 16; row += kBatch * kTogether) {
        Vector<V> v[kBatch];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          ptx::load_shared(v[i], source + (row + i * kTogether) * kPitch * sizeof(Element));
        }
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          if (first_row + row + i * kTogether < channels) {
            __stcs(reinterpret_cast<Vector<V>*>(target), v[i]);
          }
          target += kTogether * channel_step;
        }
      }
    }
  }

  // Blocks [kFirst, kFirst + kCount) of the job, kColumns accumulator columns at a time. kSpan 1:
  // one block by itself. Otherwise the blocks are width phases that go to neighbouring output
  // columns, kSpan of them for a lattice point (0: the plan says how many).
  template <int kFirst, int kCount, int kColumns, int kSpan>
  __device__ __forceinline__ void store_contiguous(const Sm90Job& job, const Unit& where) const {
    const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
    const uint32_t staging = shared.staging + (c * 4 + warp) * kStagingBytes;
    const uint32_t row = staging + lane / 4 * kPitch * sizeof(Element);
    const int span = kSpan ? kSpan : p.out_step_x;
    const Sm90Kind& first = p.kind[job.kind[kFirst]];
    const int first_y = first.first_y[warp * 16 / p.fold_rows];
    const int channel = job.channel[kFirst] + warp * 16 % p.fold_rows;
    if (channel >= p.out_channels || first_y < 0 || !depth_inside(where, first.first_z)) return;
    const int first_x = kSpan == 1 ? first.first_x : 0;
    const bool inside = unit_inside(where, first_y, first_x + span - 1);
    Element* base = static_cast<Element*>(p.y) +
                    unit_offset(where, first.first_z, first_y, first_x) + channel * out_area();
    const bool holes = kSpan == 0 && __popc(job.columns) > kCount;
    const float bias0 = row_bias(where, channel + lane / 4),
                bias8 = row_bias(where, channel + 8 + lane / 4);
    // Not unrolled, or the code grows tenfold; only the choice of registers is.
#pragma unroll 1
    for (int chunk = 0; chunk < N; chunk += kColumns) {
      const int width = min(kColumns, N - chunk) * span;
      __syncwarp();
      if (holes) {  // columns of phases without taps: the bias alone
        for (int i = lane % 4; i < width; i += 4) {
          put<1>(row, i, bias0);
          put<1>(row, i + 8 * kPitch, bias8);
        }
        __syncwarp();
      }
      stage_columns<kFirst, kCount, kColumns, kSpan>(job, row, chunk, bias0, bias8);
      __syncwarp();
      constexpr int kMost = 16 / sizeof(Element);
      const int channels = p.out_channels - channel;
      if (p.vector == kMost) {
        sweep<kMost, kSpan>(staging, base, where, inside, job.columns, first_x, first_y, channels,
                            chunk, width);
      } else if (p.vector == 2) {
        sweep<2, kSpan>(staging, base, where, inside, job.columns, first_x, first_y, channels,
                        chunk, width);
      } else {
        sweep<1, kSpan>(staging, base, where, inside, job.columns, first_x, first_y, channels,
                        chunk, width);
      }
    }
  }

  // Puts this lane's accumulators of one chunk into its two rows.
  template <int kFirst, int kCount, int kColumns, int kSpan>
  __device__ __forceinline__ void stage_columns(const Sm90Job& job, uint32_t row, int chunk,
                                                float bias0, float bias8) const {
#pragma unroll
    for (int each = 0; each < N; each += kColumns) {
      if (each == chunk) {
#pragma unroll
        for (int g = 0; g < 2 * (kColumns / 8); ++g) {
          const int n = each + g / 2 * 8, i = n / 2 + g % 2 * 2, below = g % 2 * 8 * kPitch;
          const float bias = g % 2 ? bias8 : bias0;
          if (n < N) {
            const int q = g / 2 * 8 + threadIdx.x % 4 * 2;
            if constexpr (kSpan == 1) {
              put<2>(row, q + below, d[kFirst][i] + bias, d[kFirst][i + 1] + bias);
            } else if constexpr (kSpan == 2) {
              put<4>(row, 2 * q + below, d[0][i] + bias, d[1][i] + bias, d[0][i + 1] + bias,
                     d[1][i + 1] + bias);
            } else {
#pragma unroll
              for (int j = 0; j < kCount; ++j) {
                const int place = q * p.out_step_x + p.kind[job.kind[j]].first_x + below;
                put<1>(row, place, d[j][i] + bias);
                put<1>(row, place + p.out_step_x, d[j][i + 1] + bias);
              }
            }
          }
        }
      }
    }
  }

  // V neighbouring elements of a staged row.
  template <int V, typename... Values>
  __device__ static __forceinline__ void put(uint32_t row, int index, Values... values) {
    alignas(16) const Element packed[V] = {Operand::from_float(values)...};
    ptx::store_shared(row + index * sizeof(Element), *reinterpret_cast<const Vector<V>*>(packed));
  }

  // channels_last: a warp's 16 channels of a pixel are contiguous, 64 (32) bytes.
  template <int j>
  __device__ __forceinline__ void store_channels_last(const Sm90Job& job, const Unit& where) const {
    constexpr int kE = Operand::kBlockChannels, kLanes = 16 / kE;
    const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
    const uint32_t staging = shared.staging + (c * 4 + warp) * kStagingBytes;
    const Sm90Kind& kind = p.kind[job.kind[j]];
    const int first_y = kind.first_y[warp * 16 / p.fold_rows];
    const int channel = job.channel[j] + warp * 16 % p.fold_rows;
    if (channel >= p.out_channels || first_y < 0 || !depth_inside(where, kind.first_z)) return;
    const int lane_channel = channel + lane % kLanes * kE;
    const bool inside = unit_inside(where, first_y, kind.first_x);
    Element* base = static_cast<Element*>(p.y) +
                    unit_offset(where, kind.first_z, first_y, kind.first_x) + lane_channel;
    const float bias0 = row_bias(where, channel + lane / 4),
                bias8 = row_bias(where, channel + 8 + lane / 4);
#pragma unroll 1
    for (int chunk = 0; chunk < N; chunk += kPixels) {
      __syncwarp();
      stage_pixels<j>(staging, lane % 4 * 2 * kPixelPitch + lane / 4, chunk, bias0, bias8);
      __syncwarp();
      uint4 v[kPixels * kLanes / 32];
#pragma unroll
      for (int i = 0; i < kPixels * kLanes / 32; ++i) {
        const int n = i * (32 / kLanes) + lane / kLanes;
        ptx::load_shared(v[i], staging + (n * kPixelPitch + lane % kLanes * kE) * sizeof(Element));
      }
#pragma unroll
      for (int i = 0; i < kPixels * kLanes / 32; ++i) {
        const int n = i * (32 / kLanes) + lane / kLanes;
        const int at = column_offset(where, inside, first_y, chunk + n, kind.first_x);
        if (at >= 0 && lane_channel < p.out_channels) {
          __stcs(reinterpret_cast<uint4*>(base + at), v[i]);
        }
      }
    }
  }

  template <int j>
  __device__ __forceinline__ void stage_pixels(uint32_t staging, int place, int chunk, float bias0,
                                               float bias8) const {
#pragma unroll
    for (int each = 0; each < N; each += kPixels) {
      if (each == chunk) {
#pragma unroll
        for (int g = 0; g < kPixels / 8 && each + g * 8 < N; ++g) {
          const int i = (each / 8 + g) * 4;
          const int pixel = place + g * 8 * kPixelPitch;
          put<1>(staging, pixel, d[j][i] + bias0);
          put<1>(staging, pixel + kPixelPitch, d[j][i + 1] + bias0);
          put<1>(staging, pixel + 8, d[j][i + 2] + bias8);
          put<1>(staging, pixel + kPixelPitch + 8, d[j][i + 3] + bias8);
        }
      }
    }
  }

  template <int j = 0>
  __device__ __forceinline__ void store_each(const Sm90Job& job, const Unit& where) const {
    if constexpr (j < MB) {
      if (p.channels_last) {
        store_channels_last<j>(job, where);
      } else if constexpr (MB <= 2) {
        store_contiguous<j, 1, kChunk, 1>(job, where);
      }
      store_each<j + 1>(job, where);
    }
  }

  __device__ __forceinline__ void store(const Sm90Job& job, const Unit& where) const {
    if (!job.interleave) {
      store_each(job, where);
    } else if constexpr (MB == 2) {
      store_contiguous<0, 2, kChunk / 2, 2>(job, where);
    } else {
      // One phase of two that has taps (stride 2, dilation 2): with 8 columns at a time it took 4x
      // what the rule expects (kb79_1d: 1.36 ms).
      if constexpr (MB == 1) {
        if (p.out_step_x == 2) return store_contiguous<0, 1, kChunk / 2, 0>(job, where);
      }
      store_contiguous<0, MB, 8, 0>(job, where);
    }
  }

  // Moves past a whole unit of the other consumer.
  __device__ __forceinline__ void skip_unit(int unit) {
    const int group = group_of(p, unit);
    skip_stages(p.job[group].steps);
    skip_slots(slices_of(p, group));
  }

  __device__ __forceinline__ void run() {
    const int step = p.alternate ? 2 * gridDim.x : gridDim.x;
    for (int unit = blockIdx.x + p.alternate * c * gridDim.x; unit < unit_count(p); unit += step) {
      if (p.alternate && c == 1) skip_unit(unit - gridDim.x);
      const int group = group_of(p, unit);
      const Sm90Job& job = p.job[job_of(p, group, c)];
      accumulate(shared.visits + job.visit * kVisitWords, slices_of(p, group));
      store(job, Unit(p, unit));
      if (p.alternate && c == 0) skip_unit(unit + gridDim.x);
    }
  }
};

}  // namespace upconv
