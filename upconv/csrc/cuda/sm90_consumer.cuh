// Hopper kernel: what a consumer warpgroup does with a tile: multiply, then store.
#pragma once

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

template <int kBytes>
struct VectorOf;
template <>
struct VectorOf<2> {
  using Type = unsigned short;
};
template <>
struct VectorOf<4> {
  using Type = uint32_t;
};
template <>
struct VectorOf<8> {
  using Type = uint2;
};
template <>
struct VectorOf<16> {
  using Type = uint4;
};

// One warpgroup: MB blocks of 64 rows by N pixels.
template <typename Operand, int N, int MB>
struct Consumer {
  using Element = typename Operand::Element;
  // Staging of the epilogue, in elements. Contiguous: rows of 512 bytes, padded so that the 8 rows
  // fall into different banks. channels_last: 16 channels a pixel, padded likewise.
  static constexpr int kChunk = 512 / sizeof(Element);
  static constexpr int kPitch = kChunk + 8;
  static constexpr int kPixels = 32, kPixelPitch = 16 + 16 / sizeof(Element);
  static_assert(8 * kPitch * sizeof(Element) <= kStagingBytes, "rows overrun the staging slice");
  static_assert(kPixels * kPixelPitch * sizeof(Element) <= kStagingBytes, "pixels overrun");
  const Sm90Params& p;
  const Shared& shared;
  const int c;
  const uint32_t weights, weights_full, spent;
  const bool issuer;  // the one thread of the warpgroup that arrives on barriers
  float d[MB][N / 2];
  int stage = 0, slot = 0;
  uint32_t stage_parity = 0, slot_parity = 0;
  struct Step {
    int stage = -1, slot = -1;
  };
  Step older, newer;  // steps in flight

  __device__ __forceinline__ Consumer(const Sm90Params& p, const Shared& shared, int c)
      : p(p),
        shared(shared),
        c(c),
        weights(shared.weights + ring(p, c) * p.stages * kStageBytes),
        weights_full(shared.weights_full + ring(p, c) * 8 * kMaxStages),
        spent(shared.spent + ring(p, c) * 8 * kMaxStages),
        issuer(threadIdx.x % 128 == 0) {}

  __device__ static __forceinline__ int ring(const Sm90Params& p, int c) {
    return p.split_pixels ? 0 : c;
  }

  // Gives back what one retired step has read: its weight stage, and its slot if it was the last
  // step to read it.
  __device__ __forceinline__ void retire(const Step& step) {
    if (issuer) {
      if (step.stage >= 0) ptx::barrier_arrive(spent + 8 * step.stage);
      if (step.slot >= 0) {
        const bool hand_on = c == 0 && !p.split_pixels;
        ptx::barrier_arrive((hand_on ? shared.passed : shared.emptied) + 8 * step.slot);
      }
    }
    __syncwarp();
  }

  // Waits for everything in flight and gives it back.
  __device__ __forceinline__ void drain() {
    ptx::wgmma_wait<0>();
    retire(older);
    retire(newer);
    older = newer = Step();
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
    ptx::barrier_wait(weights_full + 8 * stage, stage_parity);
    const uint32_t a = descriptor_low(weights + stage * kStageBytes, kRowsPerBlock);
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
    newer = Step{stage, -1};
    if (++stage == p.stages) stage = 0, stage_parity ^= 1;
  }

  __device__ __forceinline__ void accumulate(const Sm90Job& job, int slices) {
#pragma unroll
    for (int j = 0; j < MB; ++j)
#pragma unroll
      for (int i = 0; i < N / 2; ++i) d[j][i] = 0.f;
    const uint32_t ready = c == 0 || p.split_pixels ? shared.filled : shared.passed;
    const int first = c * p.split_pixels * 16;
    for (int slice = 0; slice < slices; ++slice) {
      // Nothing is held back while waiting: the slot waited for may depend on it.
      if (!ptx::barrier_test(ready + 8 * slot, slot_parity)) {
        drain();
        ptx::barrier_wait(ready + 8 * slot, slot_parity);
      }
      const uint32_t tile = descriptor_low(shared.slots + slot * slot_bytes(p) + first, p.plane);
#pragma unroll
      for (int j = 0; j < MB; ++j) {
        const Sm90Kind& kind = p.kind[job.kind[j]];
        // Whole steps, then what is left in a step of 2 and a step of 1. Lists start on whole
        // steps.
        const int* pair = shared.pairs + kind.begin;
        int left = kind.end - kind.begin;
        for (; left >= 4; left -= 4, pair += 4) multiply<4>(d[j], tile, pair);
        for (; left >= 2; left -= 2) multiply<2>(d[j], tile, pair);
        for (; left >= 1; --left)
          multiply<1>(d[j], tile, pair + (kind.end - kind.begin) % 4 / 2 * 2);
      }
      if (job.steps == 0) retire(Step{-1, slot});
      newer.slot = job.steps == 0 ? -1 : slot;
      if (++slot == p.slots) slot = 0, slot_parity ^= 1;
    }
    drain();
#pragma unroll
    for (int j = 0; j < MB; ++j)
#pragma unroll
      for (int i = 0; i < N / 2; ++i) ptx::keep_after_wait(d[j][i]);
  }

  // --- Consumers: epilogue ---------------------------------------------------------------------
  // Each warp regroups its 16 rows through its own staging slice; no other warp is waited for.

  // Writes down, once, where each accumulator column of this consumer lies in the tile: image, row
  // and column in a byte each, -1 for margins. Saves four divisions a column and unit.
  __device__ __forceinline__ void list_columns() const {
    for (int n = threadIdx.x % 128; n < N; n += 128) {
      const int index = c * p.split_pixels + n;
      const int column = index % p.pitch, row = index / p.pitch % p.rows;
      const int image = index / p.pitch / p.rows;
      const bool inside = (p.split_pixels == 0 || n < p.split_pixels) && column < p.tile_w &&
                          row < p.tile_h && image < p.tile_o;
      shared.columns[c * 256 + n] = inside ? image << 16 | row << 8 | column : -1;
    }
    ptx::warpgroup_sync(1 + c);
  }

  // Offset in y of channel 0 of column `n`, output column `extra_x` of its lattice point; -1 when
  // nothing is to be stored.
  __device__ __forceinline__ int64_t output_offset(const Unit& where, int first_y, int n,
                                                   int extra_x) const {
    const int entry = n < N ? shared.columns[c * 256 + n] : -1;
    const int image = where.o + (entry >> 16);
    const int oy = (where.y + (entry >> 8 & 255)) * p.out_step_y + first_y;
    const int ox = (where.x + (entry & 255)) * p.out_step_x + extra_x;
    if (entry < 0 || image >= p.batch || oy >= p.out_h || ox >= p.out_w) return -1;
    const int64_t area = static_cast<int64_t>(p.out_h) * p.out_w;
    const int64_t pixel = static_cast<int64_t>(oy) * p.out_w + ox;
    return image * area * p.out_channels + (p.channels_last ? pixel * p.out_channels : pixel);
  }

  // Bias of an output channel; 0 past the end.
  __device__ __forceinline__ float row_bias(int channel) const {
    if (!p.bias || channel >= p.out_channels) return 0.f;
    return Operand::to_float(static_cast<const Element*>(p.bias)[channel]);
  }

  template <int V>
  __device__ static __forceinline__ void copy_vector(Element* target, const Element* source) {
    using Vector = typename VectorOf<V * sizeof(Element)>::Type;
    __stcs(reinterpret_cast<Vector*>(target), *reinterpret_cast<const Vector*>(source));
  }

  // Writes `channels` staged rows of `width` outputs, V elements a lane, to their places.
  template <int V, int kSpan>
  __device__ __forceinline__ void sweep(const Element* staging, const Unit& where,
                                        const Sm90Job& job, const Sm90Kind& kind, int first_y,
                                        int channel, int chunk, int width) const {
    const int span = kSpan ? kSpan : p.out_step_x;
    const int64_t channel_step = static_cast<int64_t>(p.out_h) * p.out_w;
    const int channels = p.out_channels - channel;
#pragma unroll 1
    for (int position = threadIdx.x % 32 * V; position < width; position += 32 * V) {
      const int q = position / span, residue = position - q * span;
      if (kSpan != 1 && !(job.columns >> residue & 1)) continue;
      const int64_t offset =
          output_offset(where, first_y, chunk + q, kSpan == 1 ? kind.first_x : residue);
      if (offset < 0) continue;
      Element* target = static_cast<Element*>(p.y) + offset + channel * channel_step;
      const Element* source = staging + position;
      if (channels >= 8) {
#pragma unroll
        for (int q = 0; q < 8; ++q) {
          copy_vector<V>(target, source + q * kPitch);
          target += channel_step;
        }
      } else {
        for (int q = 0; q < channels; ++q) {
          copy_vector<V>(target, source + q * kPitch);
          target += channel_step;
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
    Element* staging = reinterpret_cast<Element*>(shared.staging + (c * 4 + warp) * kStagingBytes);
    Element* row = staging + lane / 4 * kPitch;
    const int span = kSpan ? kSpan : p.out_step_x;
    const Sm90Kind& first = p.kind[job.kind[kFirst]];
    const int first_y = first.first_y[warp * 16 / p.fold_rows];
    const int channel = job.channel[kFirst] + warp * 16 % p.fold_rows;
    if (channel >= p.out_channels || first_y < 0) return;
    const bool holes = kSpan == 0 && __popc(job.columns) > kCount;
    const float bias0 = row_bias(channel + lane / 4), bias8 = row_bias(channel + 8 + lane / 4);
    // Not unrolled, or the code grows tenfold; only the choice of registers is.
#pragma unroll 1
    for (int part = 0; part < 2 * ((N + kColumns - 1) / kColumns); ++part) {
      const int chunk = part / 2 * kColumns, h = part % 2;
      if (channel + 8 * h >= p.out_channels) continue;
      const int width = min(kColumns, N - chunk) * span;
      const float bias = h ? bias8 : bias0;
      __syncwarp();
      if (holes) {  // columns of phases without taps: the bias alone
        for (int i = lane % 4; i < width; i += 4) row[i] = Operand::from_float(bias);
        __syncwarp();
      }
      stage_columns<kFirst, kCount, kColumns, kSpan>(job, row, part, bias);
      __syncwarp();
      constexpr int kMost = 16 / sizeof(Element);
      if (p.vector == kMost) {
        sweep<kMost, kSpan>(staging, where, job, first, first_y, channel + 8 * h, chunk, width);
      } else if (p.vector == 2) {
        sweep<2, kSpan>(staging, where, job, first, first_y, channel + 8 * h, chunk, width);
      } else {
        sweep<1, kSpan>(staging, where, job, first, first_y, channel + 8 * h, chunk, width);
      }
    }
  }

  // Puts this lane's accumulators of one part (columns of a chunk, 8 of 16 rows) into its row.
  template <int kFirst, int kCount, int kColumns, int kSpan>
  __device__ __forceinline__ void stage_columns(const Sm90Job& job, Element* row, int part,
                                                float bias) const {
#pragma unroll
    for (int each = 0; each < 2 * ((N + kColumns - 1) / kColumns); ++each) {
      if (each == part) {
#pragma unroll
        for (int g = 0; g < kColumns / 8; ++g) {
          const int n = each / 2 * kColumns + g * 8, i = n / 2 + 2 * (each % 2);
          if (n < N) {
            const int q = g * 8 + threadIdx.x % 4 * 2;
            if constexpr (kSpan == 1) {
              put_vector<2>(row + q, d[kFirst][i] + bias, d[kFirst][i + 1] + bias);
            } else if constexpr (kSpan == 2) {
              put_vector<4>(row + 2 * q, d[0][i] + bias, d[1][i] + bias, d[0][i + 1] + bias,
                            d[1][i + 1] + bias);
            } else {
#pragma unroll
              for (int j = 0; j < kCount; ++j) {
                Element* place = row + q * p.out_step_x + p.kind[job.kind[j]].first_x;
                place[0] = Operand::from_float(d[j][i] + bias);
                place[p.out_step_x] = Operand::from_float(d[j][i + 1] + bias);
              }
            }
          }
        }
      }
    }
  }

  template <int V, typename... Values>
  __device__ static __forceinline__ void put_vector(Element* target, Values... values) {
    alignas(16) const Element packed[V] = {Operand::from_float(values)...};
    using Vector = typename VectorOf<V * sizeof(Element)>::Type;
    *reinterpret_cast<Vector*>(target) = *reinterpret_cast<const Vector*>(packed);
  }

  // channels_last: a warp's 16 channels of a pixel are contiguous, 64 (32) bytes.
  template <int j>
  __device__ __forceinline__ void store_channels_last(const Sm90Job& job, const Unit& where) const {
    constexpr int kE = Operand::kBlockChannels, kLanes = 16 / kE;
    const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
    Element* staging = reinterpret_cast<Element*>(shared.staging + (c * 4 + warp) * kStagingBytes);
    const Sm90Kind& kind = p.kind[job.kind[j]];
    const int first_y = kind.first_y[warp * 16 / p.fold_rows];
    const int channel = job.channel[j] + warp * 16 % p.fold_rows;
    if (channel >= p.out_channels || first_y < 0) return;
    const int lane_channel = channel + lane % kLanes * kE;
    const float bias0 = row_bias(channel + lane / 4), bias8 = row_bias(channel + 8 + lane / 4);
#pragma unroll 1
    for (int chunk = 0; chunk < N; chunk += kPixels) {
      __syncwarp();
      stage_pixels<j>(staging + lane % 4 * 2 * kPixelPitch + lane / 4, chunk, bias0, bias8);
      __syncwarp();
#pragma unroll
      for (int i = 0; i < kPixels; i += 32 / kLanes) {
        const int n = i + lane / kLanes;
        const int64_t offset = output_offset(where, first_y, chunk + n, kind.first_x);
        if (offset >= 0 && lane_channel < p.out_channels) {
          copy_vector<kE>(static_cast<Element*>(p.y) + offset + lane_channel,
                          staging + n * kPixelPitch + lane % kLanes * kE);
        }
      }
    }
  }

  template <int j>
  __device__ __forceinline__ void stage_pixels(Element* place, int chunk, float bias0,
                                               float bias8) const {
#pragma unroll
    for (int each = 0; each < N; each += kPixels) {
      if (each == chunk) {
#pragma unroll
        for (int g = 0; g < kPixels / 8 && each + g * 8 < N; ++g) {
          const int i = (each / 8 + g) * 4;
          Element* pixel = place + g * 8 * kPixelPitch;
          pixel[0] = Operand::from_float(d[j][i] + bias0);
          pixel[kPixelPitch] = Operand::from_float(d[j][i + 1] + bias0);
          pixel[8] = Operand::from_float(d[j][i + 2] + bias8);
          pixel[kPixelPitch + 8] = Operand::from_float(d[j][i + 3] + bias8);
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
    if (job.interleave) {
      store_contiguous<0, MB, MB == 2 ? kChunk / 2 : 16, MB == 2 ? 2 : 0>(job, where);
    } else {
      store_each(job, where);
    }
  }

  __device__ __forceinline__ void run() {
    list_columns();
    for (int unit = blockIdx.x; unit < unit_count(p); unit += gridDim.x) {
      const Unit where(p, unit);
      const Sm90Job& job = p.job[job_of(p, where.group, c)];
      accumulate(job, slices_of(p, where.group));
      store(job, where);
    }
  }
};

}  // namespace upconv
