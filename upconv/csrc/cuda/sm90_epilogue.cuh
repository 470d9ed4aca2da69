// Hopper kernel: how a consumer warpgroup stores what it has accumulated.
#pragma once

#include "sm90_layout.cuh"

namespace upconv {

// --- Consumers: epilogue ---------------------------------------------------------------------

// The accumulators of a warpgroup, MB blocks of 64 rows by N pixels. Each warp regroups its 16 rows
// through its own staging slice; no other warp is waited for.
template <typename Operand, int N, int MB>
struct Epilogue {
  using Element = typename Operand::Element;
  // Staging of the epilogue, in elements. Contiguous: 16 rows of 256 bytes, padded so that rows
  // written together fall into different banks. channels_last: 16 channels a pixel, likewise.
  static constexpr int kChunk = 256 / sizeof(Element);
  static constexpr int kPitch = kChunk + (sizeof(Element) == 4 ? 32 : 16) / sizeof(Element);
  static constexpr int kPixels = 32, kPixelPitch = 16 + 16 / sizeof(Element);
  static_assert(MB <= 2, "more than two width phases are stored by lines");
  static_assert(16 * kPitch * sizeof(Element) <= kStagingBytes, "rows overrun the staging slice");
  static_assert(kPixels * kPixelPitch * sizeof(Element) <= kStagingBytes, "pixels overrun");
  const Sm90Params& p;
  const Shared& shared;
  const int c;  // which of the two consumers
  float d[MB][N / 2];

  // Of the tile's columns, the first one of this consumer's.
  __device__ __forceinline__ int first_column() const { return Operand::kSplit ? c * N : 0; }
  // And its place in the tile.
  __device__ __forceinline__ int first_pixel() const { return first_column() / kGroup * p.strip; }

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
    const int at = n < N ? shared.places[first_column() + n] : -1;
    if (inside || at < 0) return at;
    const int entry = shared.columns[first_column() + n];
    const bool on = where.o + (entry >> 16) < p.batch &&
                    (where.y + (entry >> 8 & 255)) * p.out_step_y + first_y < p.out_h &&
                    (where.x + (entry & 255)) * p.out_step_x + extra_x < p.out_w;
    return on ? at : -1;
  }

  // First output row of a fold of a block, -1 where there is none.
  __device__ __forceinline__ int fold_row(const Sm90Kind& kind, int fold) const {
    const int at = kind.row + fold % p.row_folds;
    return fold < p.folds && at < p.row_phases ? p.row_first[at] : -1;
  }

  // First output depth of a fold of a block.
  __device__ __forceinline__ int fold_depth(const Sm90Kind& kind, int fold) const {
    return kind.first_z + fold / p.row_folds * p.depth_apart;
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
                                        bool inside, int first_x, int first_y, int channels,
                                        int chunk, int width) const {
    constexpr int kLanes = kChunk / V;  // that one row takes
    constexpr int kTogether = kLanes < 32 ? 32 / kLanes : 1, kBatch = kSpan * 8 / kTogether;
    const int64_t channel_step = out_area();
    const int first_row = threadIdx.x % 32 / kLanes;
#pragma unroll 1
    for (int position = threadIdx.x % 32 % kLanes * V; position < width; position += 32 * V) {
      const int q = position / kSpan, residue = position % kSpan;
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
  // one block by itself. kSpan 2: one or two width phases of stride 2, which go to neighbouring
  // output columns; a phase without taps is the bias alone.
  template <int kFirst, int kCount, int kColumns, int kSpan>
  __device__ __forceinline__ void store_contiguous(const Sm90Job& job, const Unit& where) const {
    const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
    const uint32_t staging = shared.staging + (c * 4 + warp) * kStagingBytes;
    const uint32_t row = staging + lane / 4 * kPitch * sizeof(Element);
    const Sm90Kind& first = p.kind[job.kind[kFirst]];
    const int fold = warp * 16 / p.fold_rows;
    const int first_y = fold_row(first, fold), first_z = fold_depth(first, fold);
    const int channel = job.channel[kFirst] + warp * 16 % p.fold_rows;
    if (channel >= p.out_channels || first_y < 0 || !depth_inside(where, first_z)) return;
    const int first_x = kSpan == 1 ? first.first_x : 0;
    const bool inside = unit_inside(where, first_y, first_x + kSpan - 1);
    Element* base = static_cast<Element*>(p.y) + unit_offset(where, first_z, first_y, first_x) +
                    channel * out_area();
    const float bias0 = row_bias(where, channel + lane / 4),
                bias8 = row_bias(where, channel + 8 + lane / 4);
    // Not unrolled, or the code grows tenfold; only the choice of registers is.
#pragma unroll 1
    for (int chunk = 0; chunk < N; chunk += kColumns) {
      const int width = min(kColumns, N - chunk) * kSpan;
      __syncwarp();
      // Else the compiler adds the bias to all accumulators before the loop, and spills them.
      stage_columns<kFirst, kCount, kColumns, kSpan>(row, chunk, ptx::unknown(bias0),
                                                     ptx::unknown(bias8));
      __syncwarp();
      constexpr int kMost = 16 / sizeof(Element);
      const int channels = p.out_channels - channel;
      if (p.vector == kMost) {
        sweep<kMost, kSpan>(staging, base, where, inside, first_x, first_y, channels, chunk, width);
      } else if (p.vector == 2) {
        sweep<2, kSpan>(staging, base, where, inside, first_x, first_y, channels, chunk, width);
      } else {
        sweep<1, kSpan>(staging, base, where, inside, first_x, first_y, channels, chunk, width);
      }
    }
  }

  // Puts this lane's accumulators of one chunk into its two rows.
  template <int kFirst, int kCount, int kColumns, int kSpan>
  __device__ __forceinline__ void stage_columns(uint32_t row, int chunk, float bias0,
                                                float bias8) const {
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
            } else if constexpr (kCount == 2) {
              put<4>(row, 2 * q + below, d[0][i] + bias, d[1][i] + bias, d[0][i + 1] + bias,
                     d[1][i + 1] + bias);
            } else {
              const float v = d[0][i] + bias, next = d[0][i + 1] + bias;
              const bool odd = p.column_first[0];
              put<4>(row, 2 * q + below, odd ? bias : v, odd ? v : bias, odd ? bias : next,
                     odd ? next : bias);
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

  // --- Stores of both consumers together ---
  // Each consumer holds one of the two width phases of the same rows. The warps of both that have
  // the same channels stage half a slice each, meet, and write 8 of the 16 rows each, with both
  // phases. What is staged next goes into the other half: who writes there has been met since by
  // all who read it.

  // V neighbouring outputs, from V / 2 staged columns of each phase.
  template <int V>
  __device__ __forceinline__ Vector<V> interleaved(uint32_t even, uint32_t odd) const {
    alignas(16) Element first[V / 2], second[V / 2], both[V];
    ptx::load_shared(*reinterpret_cast<Vector<V / 2>*>(first), even);
    ptx::load_shared(*reinterpret_cast<Vector<V / 2>*>(second), odd);
#pragma unroll
    for (int i = 0; i < V / 2; ++i) both[2 * i] = first[i], both[2 * i + 1] = second[i];
    return *reinterpret_cast<Vector<V>*>(both);
  }

  template <int V>
  __device__ __forceinline__ void sweep_pair(uint32_t even, uint32_t odd, Element* base,
                                             const Unit& where, bool inside, int first_y,
                                             int channels, int chunk, int width) const {
    constexpr int kLanes = kChunk / V;  // that one row of both phases takes
    constexpr int kTogether = kLanes < 32 ? 32 / kLanes : 1, kBatch = 8 / kTogether;
    const int64_t channel_step = out_area();
    const int first_row = 8 * c + threadIdx.x % 32 / kLanes;
#pragma unroll 1
    for (int position = threadIdx.x % 32 % kLanes * V; position < width; position += 32 * V) {
      const int q = position / 2, residue = position % 2;
      const int at = column_offset(where, inside, first_y, chunk + q, residue);
      if (at < 0) continue;
      Element* target = base + (at + residue) + first_row * channel_step;
      const uint32_t offset = (first_row * kPitch + q) * sizeof(Element);
      Vector<V> v[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const uint32_t row = offset + i * kTogether * kPitch * sizeof(Element);
        if constexpr (V == 1) {
          ptx::load_shared(v[i], (residue ? odd : even) + row);
        } else {
          v[i] = interleaved<V>(even + row, odd + row);
        }
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (first_row + i * kTogether < channels) {
          __stcs(reinterpret_cast<Vector<V>*>(target), v[i]);
        }
        target += kTogether * channel_step;
      }
    }
  }

  __device__ __forceinline__ void store_pair(const Sm90Job& job, const Unit& where) const {
    constexpr int kColumns = kChunk / 2;
    const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
    const uint32_t even = shared.staging + warp * kStagingBytes, odd = even + 4 * kStagingBytes;
    const uint32_t row = (c ? odd : even) + lane / 4 * kPitch * sizeof(Element);
    const Sm90Kind& kind = p.kind[job.kind[0]];
    const int fold = warp * 16 / p.fold_rows;
    const int first_y = fold_row(kind, fold), first_z = fold_depth(kind, fold);
    const int channel = job.channel[0] + warp * 16 % p.fold_rows;
    // The same for both consumers.
    if (channel >= p.out_channels || first_y < 0 || !depth_inside(where, first_z)) return;
    const bool inside = unit_inside(where, first_y, 1);
    Element* base =
        static_cast<Element*>(p.y) + unit_offset(where, first_z, first_y, 0) + channel * out_area();
    const int channels = p.out_channels - channel;
    const float bias0 = row_bias(where, channel + lane / 4),
                bias8 = row_bias(where, channel + 8 + lane / 4);
    uint32_t half = 0;
#pragma unroll 1
    for (int chunk = 0; chunk < N; chunk += kColumns) {
      const int width = min(kColumns, N - chunk) * 2;
      stage_columns<0, 1, kColumns, 1>(row + half, chunk, ptx::unknown(bias0), ptx::unknown(bias8));
      __syncwarp();
      ptx::warp_pair_sync(kPairBarrier + warp);
      constexpr int kMost = 16 / sizeof(Element);
      if (p.vector == kMost) {
        sweep_pair<kMost>(even + half, odd + half, base, where, inside, first_y, channels, chunk,
                          width);
      } else if (p.vector == 2) {
        sweep_pair<2>(even + half, odd + half, base, where, inside, first_y, channels, chunk,
                      width);
      } else {
        sweep_pair<1>(even + half, odd + half, base, where, inside, first_y, channels, chunk,
                      width);
      }
      __syncwarp();
      half ^= kColumns * sizeof(Element);
    }
    // The next unit begins with the first half.
    constexpr bool kOdd = (N + kColumns - 1) / kColumns % 2;
    if constexpr (kOdd) ptx::warp_pair_sync(kPairBarrier + warp);
  }

  // channels_last: a warp's 16 channels of a pixel are contiguous, 64 (32) bytes.
  template <int j>
  __device__ __forceinline__ void store_channels_last(const Sm90Job& job, const Unit& where) const {
    constexpr int kE = kWhole<Operand>, kLanes = 16 / kE;
    const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
    const uint32_t staging = shared.staging + (c * 4 + warp) * kStagingBytes;
    const Sm90Kind& kind = p.kind[job.kind[j]];
    const int fold = warp * 16 / p.fold_rows;
    const int first_y = fold_row(kind, fold), first_z = fold_depth(kind, fold);
    const int channel = job.channel[j] + warp * 16 % p.fold_rows;
    if (channel >= p.out_channels || first_y < 0 || !depth_inside(where, first_z)) return;
    const int lane_channel = channel + lane % kLanes * kE;
    const bool inside = unit_inside(where, first_y, kind.first_x);
    Element* base = static_cast<Element*>(p.y) +
                    unit_offset(where, first_z, first_y, kind.first_x) + lane_channel;
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
      } else {
        store_contiguous<j, 1, kChunk, 1>(job, where);
      }
      store_each<j + 1>(job, where);
    }
  }

  // All but lines (sm90_lines.cuh).
  __device__ __forceinline__ void store(const Sm90Job& job, const Unit& where) const {
    if (!p.width_phases) {
      if constexpr (MB == 1 && !Operand::kSplit) {
        if (p.paired) return store_pair(job, where);
      }
      store_each(job, where);
    } else {
      store_contiguous<0, MB, kChunk / 2, 2>(job, where);
    }
  }
};

}  // namespace upconv
