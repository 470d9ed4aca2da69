// Hopper kernel: stores by lines, for few output channels, more than two width phases, and rows
// whose vectors do not begin on 16 bytes.
#pragma once

#include "sm90_epilogue.cuh"

namespace upconv {

// --- Consumers: epilogue by lines ------------------------------------------------------------

// A line is an output row of one channel. Width phases are blocks of the job, neighbouring rows
// of a block, or both; a warp holds all phases of its lines, and stages them as they lie in the
// output. Phases without taps are staged once a unit: nothing writes over them.
template <typename Operand, int N, int MB>
struct LineEpilogue : Epilogue<Operand, N, MB> {
  using Base = Epilogue<Operand, N, MB>;
  using typename Base::Element;
  template <int V>
  using Vector = typename Base::template Vector<V>;
  using Base::c, Base::d, Base::p, Base::shared;
  using Base::depth_inside, Base::first_column, Base::fold_depth, Base::fold_row, Base::out_area;
  using Base::row_bias, Base::unit_inside, Base::unit_offset;

  // Behind the lines of a staging slice, 16 bytes for each: bytes from the unit's first output, the
  // first output row (none for lines that do not exist), the bias. Of shifted lines instead of the
  // row: elements in this tile and, in the last 8 bits, lines of the warp from this one on.
  static constexpr int kLineRoom = kStagingBytes - 16 * 16, kLastLine = kStagingBytes - 16;
  static constexpr int kNoLine = 0x7fffffff, kE = kWhole<Operand>;

  // Do lines begin where they do in the output? In the tiles with most sums it made ptxas spill
  // what a consumer keeps of its unit; the planner does not ask for it there.
  __device__ __forceinline__ bool shifted() const { return N * MB < 256 && p.shifted; }

  // Are the lines of every warp neighbouring channels of the same output row?
  __device__ __forceinline__ bool channel_lines() const {
    return p.folds == 1 || p.fold_rows % p.warp_lines == 0;
  }

  // Elements of a line in this tile.
  __device__ __forceinline__ int line_length(const Unit& where) const {
    const int columns = min(p.tile_w - first_column(), N) * p.out_step_x;
    return max(min(columns, p.out_w - (where.x + first_column()) * p.out_step_x), 0);
  }

  // Puts down where this warp's lines go and what their columns without taps hold.
  __device__ __forceinline__ void begin_lines(const Sm90Job& job, const Unit& where,
                                              uint32_t staging) const {
    const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
    __syncwarp();
    if (lane < 16) {
      const Sm90Kind& kind = p.kind[job.kind[0]];
      const int line = warp * p.warp_lines + lane, fold = line / p.fold_rows;
      const int within = line - fold * p.fold_rows, channel = job.channel[0] + within;
      const int row = fold_row(kind, fold), first_z = fold_depth(kind, fold);
      const bool on = lane < p.warp_lines && channel < p.out_channels && row >= 0 &&
                      depth_inside(where, first_z);
      int place = on ? row : kNoLine;
      if (shifted()) {
        const int lines = min(p.fold_rows, p.out_channels - job.channel[0]) - within;
        const bool inside = on && where.y * p.out_step_y + row < p.out_h;
        place = inside ? line_length(where) << 8 | min(p.warp_lines - lane, lines) : 0;
      }
      const int64_t rows = static_cast<int64_t>(first_z - kind.first_z) * p.out_h + row;
      const int64_t offset = channel * out_area() + rows * p.out_w;
      const uint64_t bytes = offset * sizeof(Element);
      ptx::store_shared(staging + kLineRoom + 16 * lane,
                        make_uint4(static_cast<uint32_t>(bytes), bytes >> 32, place,
                                   __float_as_uint(row_bias(where, channel))));
    }
    __syncwarp();
    if (p.width_phases == p.out_step_x) return;
    const int lanes = 32 / p.warp_lines, line = lane / lanes;
    if (line >= p.warp_lines) return;
    uint32_t bits;
    ptx::load_shared(bits, staging + kLineRoom + 16 * line + 12);
    const Element bias = Operand::from_float(__uint_as_float(bits));
    alignas(16) Element values[kE];
#pragma unroll
    for (int i = 0; i < kE; ++i) values[i] = bias;
    const uint4 vector = *reinterpret_cast<const uint4*>(values);
    const uint32_t row = staging + line * p.line_pitch * static_cast<int>(sizeof(Element));
#pragma unroll 1
    for (int i = lane - line * lanes; i < p.line_pitch / kE; i += lanes) {
      ptx::store_shared(row + 16 * i, vector);
    }
  }

  // Elements from the last 16 bytes to where a line begins.
  __device__ __forceinline__ static int line_shift(const char* base, uint4 line) {
    const uint32_t address = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(base)) + line.x;
    return address / static_cast<uint32_t>(sizeof(Element)) & (kE - 1);
  }

  __device__ __forceinline__ static int64_t line_bytes(uint4 line) {
    return static_cast<int64_t>(static_cast<uint64_t>(line.y) << 32 | line.x);
  }

  // The accumulators of kGroup columns from n on; registers cannot be indexed, so the right ones
  // among [kLow, kHigh) are found by halving. `at`: bytes from column 0 of the chunk.
  template <int kLow, int kHigh, int kGroup>
  __device__ __forceinline__ void stage_group(int n, uint32_t at, const uint32_t (&place)[2][MB],
                                              uint32_t step, float bias0, float bias8) const {
    if constexpr (kHigh - kLow <= kGroup) {
#pragma unroll
      for (int column = kLow; column < kHigh; column += 8)
#pragma unroll
        for (int j = 0; j < MB; ++j)
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const float bias = half ? bias8 : bias0;
            const int i = column / 2 + 2 * half;
            const uint32_t to = place[half][j] + at + (column - kLow) * step;
            if (place[half][j]) {
              Base::template put<1>(to, 0, d[j][i] + bias);
              Base::template put<1>(to + step, 0, d[j][i + 1] + bias);
            }
          }
    } else {
      constexpr int kMiddle = kLow + ((kHigh - kLow) / kGroup + 1) / 2 * kGroup;
      if (n < kMiddle) {
        stage_group<kLow, kMiddle, kGroup>(n, at, place, step, bias0, bias8);
      } else {
        stage_group<kMiddle, kHigh, kGroup>(n, at, place, step, bias0, bias8);
      }
    }
  }

  // Writes `count` columns of the staged lines from `chunk` on, V elements a lane. Some lines are
  // read before any is written, as in `sweep`. kChannels: the lines are neighbouring channels of
  // one output row, `lines` of them, and need not be looked up.
  template <int V, bool kChannels>
  __device__ __forceinline__ void sweep_lines(uint32_t staging, char* base, const Unit& where,
                                              bool inside, int chunk, int count, int lines) const {
    constexpr int kBatch = kChannels ? 4 : 2;
    const int span = p.out_step_x, vectors = count * span / V;
    const uint32_t per_point = (1u << 20) / span + 1;  // exact for what a staging slice holds
    const uint32_t pitch = p.line_pitch * sizeof(Element);
#pragma unroll 1
    for (int i = threadIdx.x % 32; i < vectors; i += 32) {
      const int position = i * V, q = position * per_point >> 20, residue = position - q * span;
      const int column = first_column() + chunk + q, at = shared.places[column];
      int rows = kNoLine;  // the lines of this column begin above this row
      bool on = at >= 0;
      if (!inside) {
        const int entry = shared.columns[column];
        rows = p.out_h - (where.y + (entry >> 8 & 255)) * p.out_step_y;
        on = on && where.o + (entry >> 16) < p.batch &&
             (where.x + (entry & 255)) * p.out_step_x + residue < p.out_w;
      }
      if (!on) continue;
      char* target = base + static_cast<int64_t>(at + residue) * sizeof(Element);
      uint32_t source = staging + position * sizeof(Element), entry_at = staging + kLineRoom;
      if (kChannels) {
        uint4 entry;
        ptx::load_shared(entry, entry_at);
        if (static_cast<int>(entry.z) >= rows) continue;
        target += line_bytes(entry);
      }
#pragma unroll 1
      for (int left = lines; left > 0; left -= kBatch) {
        uint4 entry[kBatch];
        Vector<V> v[kBatch];
#pragma unroll
        for (int k = 0; k < kBatch; ++k) {
          if (!kChannels) ptx::load_shared(entry[k], min(entry_at + 16 * k, staging + kLastLine));
          // A line past the last may lie in the slice of another warp, which writes to it.
          ptx::load_shared(v[k], source + (k < left ? k * pitch : 0));
        }
#pragma unroll
        for (int k = 0; k < kBatch; ++k) {
          char* to = kChannels ? target : target + line_bytes(entry[k]);
          const bool here = k < left && (kChannels || static_cast<int>(entry[k].z) < rows);
          if (here) __stcs(reinterpret_cast<Vector<V>*>(to), v[k]);
          if (kChannels) target += out_area() * sizeof(Element);
        }
        source += kBatch * pitch;
        entry_at += kBatch * 16;
      }
    }
  }

  template <bool kChannels>
  __device__ __forceinline__ void sweep_lines(uint32_t staging, char* base, const Unit& where,
                                              bool inside, int chunk, int count, int lines) const {
    if (p.vector == kE) {
      sweep_lines<kE, kChannels>(staging, base, where, inside, chunk, count, lines);
    } else if (p.vector == 2) {
      sweep_lines<2, kChannels>(staging, base, where, inside, chunk, count, lines);
    } else {
      sweep_lines<1, kChannels>(staging, base, where, inside, chunk, count, lines);
    }
  }

  // The same for lines that begin anywhere in 16 bytes and are staged as far from there, `position`
  // elements of them and more: whole vectors, which begin on 16 bytes whatever the line. 16 lanes
  // take a line. They are neighbouring channels of one output row.
  __device__ __forceinline__ void sweep_shifted(uint32_t staging, char* base, int position,
                                                int vectors) const {
    constexpr int kBatch = 2;
    const int half = threadIdx.x % 32 / 16;
    const uint32_t pitch = 2 * p.line_pitch * static_cast<int>(sizeof(Element));
    const int64_t area = out_area() * static_cast<int>(sizeof(Element));
    uint4 entry;
    ptx::load_shared(entry, staging + kLineRoom);
    const int length = static_cast<int>(entry.z >> 8);
    base += line_bytes(entry) + half * area;
#pragma unroll 1
    for (int i = threadIdx.x % 16; i < vectors; i += 16) {
      const int at = position + i * kE;
      char* target = base + at * static_cast<int>(sizeof(Element));
      uint32_t source = staging + half * (pitch / 2) + i * 16;
#pragma unroll 1
      for (int left = static_cast<int>(entry.z & 255) - half; left > 0; left -= 2 * kBatch) {
        uint4 v[kBatch];
#pragma unroll
        for (int k = 0; k < kBatch; ++k) {
          // A line past the last may lie in the slice of another warp, which writes to it.
          ptx::load_shared(v[k], source + (2 * k < left ? k * pitch : 0));
        }
#pragma unroll
        for (int k = 0; k < kBatch; ++k) {
          const uintptr_t address = reinterpret_cast<uintptr_t>(target);
          const int shift = static_cast<int>(address / sizeof(Element)) & (kE - 1);
          const bool on = 2 * k < left && at >= shift && at - shift + kE <= length;
          if (on) __stcs(reinterpret_cast<uint4*>(address & ~uintptr_t{15}), v[k]);
          target += 2 * area;
        }
        source += kBatch * pitch;
      }
    }
  }

  // What such lines have before their first whole vector, and after their last, one element at a
  // time: of the `count` elements from `position` on.
  __device__ __forceinline__ void store_ends(uint32_t staging, const char* base, int position,
                                             int count) const {
    const int line = threadIdx.x % 16;
    const bool last = threadIdx.x % 32 / 16;
    uint4 entry;
    ptx::load_shared(entry, staging + kLineRoom + 16 * line);
    const int shift = line_shift(base, entry), end = shift + static_cast<int>(entry.z >> 8);
    int at = last ? max(end & -kE, kE) : shift;
    const int stop = last ? end : min(end, shift || end < kE ? kE : 0);
    if (line >= p.warp_lines || !entry.z) return;
    if (at < position || at >= position + count) return;
    char* to = const_cast<char*>(base) + line_bytes(entry);
#pragma unroll 1
    for (; at < stop; ++at) {
      VectorOf<sizeof(Element)> v;
      const int from = line * p.line_pitch + at - position;
      ptx::load_shared(v, staging + from * static_cast<int>(sizeof(Element)));
      __stcs(reinterpret_cast<VectorOf<sizeof(Element)>*>(to) + (at - shift), v);
    }
  }

  // Takes what is left of the last vector, when all others are written, to where the next columns
  // are staged.
  __device__ __forceinline__ void carry_rest(uint32_t staging) const {
    const int line = threadIdx.x % 32;
    const uint32_t to = staging + line * p.line_pitch * static_cast<int>(sizeof(Element));
    if (line < p.warp_lines) {
      uint4 v;
      ptx::load_shared(v, to + p.line_columns * p.out_step_x * static_cast<int>(sizeof(Element)));
      ptx::store_shared(to, v);
    }
    __syncwarp();
  }

  template <int kGroup>
  __device__ __forceinline__ void store_lines(const Sm90Job& job, const Unit& where) const {
    const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
    const uint32_t staging = shared.staging + (c * 4 + warp) * kStagingBytes;
    const Sm90Kind& kind = p.kind[job.kind[0]];
    if (job.channel[0] >= p.out_channels || !depth_inside(where, kind.first_z)) return;
    begin_lines(job, where, staging);
    char* base = reinterpret_cast<char*>(static_cast<Element*>(p.y) +
                                         unit_offset(where, kind.first_z, 0, 0) +
                                         (shifted() ? first_column() * p.out_step_x : 0));
    // Where this lane's two accumulator rows are staged, for each block; 0 for rows of nothing.
    uint32_t place[2][MB];
    float bias[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = lane / 4 + 8 * half, line = row / p.width_folds;
      const int fold = row - line * p.width_folds;
      uint4 entry;
      ptx::load_shared(entry, staging + kLineRoom + 16 * line);
      bias[half] = __uint_as_float(entry.w);
#pragma unroll
      for (int j = 0; j < MB; ++j) {
        const int phase = j * p.width_folds + fold;
        const bool on = line < p.warp_lines && phase < p.width_phases;
        const int first_x = on ? p.column_first[phase] : 0;
        const int shift = shifted() ? line_shift(base, entry) : 0;
        const int at = line * p.line_pitch + lane % 4 * 2 * p.out_step_x + first_x + shift;
        place[half][j] = on ? staging + at * static_cast<int>(sizeof(Element)) : 0;
      }
    }
    const uint32_t step = p.out_step_x * sizeof(Element);
    const bool inside = unit_inside(where, p.out_step_y - 1, p.out_step_x - 1);
    // Channels of this warp, where its lines are such.
    const int channel = warp * p.warp_lines % p.fold_rows;
    const int lines =
        min(p.warp_lines, min(p.fold_rows, p.out_channels - job.channel[0]) - channel);
#pragma unroll 1
    for (int chunk = 0; chunk < N; chunk += p.line_columns) {
      const int count = min(p.line_columns, N - chunk);
      __syncwarp();
      if (shifted() && chunk) carry_rest(staging);
#pragma unroll 1
      for (int n = 0; n < count; n += kGroup) {
        // Else the compiler adds the bias to all accumulators before the loop, and spills them.
        stage_group<0, N, kGroup>(chunk + n, n * step, place, step, ptx::unknown(bias[0]),
                                  ptx::unknown(bias[1]));
      }
      __syncwarp();
      if (shifted()) {
        const int rest = chunk + count == N ? kE : 0, here = count * p.out_step_x + rest;
        const int position = chunk * p.out_step_x;
        sweep_shifted(staging, base, position, here / kE);
        uint32_t length;
        ptx::load_shared(length, staging + kLineRoom + 8);
        if (chunk == 0 || position + here + kE > static_cast<int>(length >> 8)) {
          store_ends(staging, base, position, here);
        }
      } else if (channel_lines()) {
        sweep_lines<true>(staging, base, where, inside, chunk, count, lines);
      } else {
        sweep_lines<false>(staging, base, where, inside, chunk, count, p.warp_lines);
      }
    }
  }

  // Many columns at a time are found once for 32 of them.
  static constexpr int kManyColumns = 32;

  __device__ __forceinline__ void store(const Sm90Job& job, const Unit& where) const {
    if (MB == 1 && p.line_columns >= kManyColumns) {
      store_lines<kManyColumns>(job, where);
    } else if (p.line_columns) {
      store_lines<8>(job, where);
    } else {
      Base::store(job, where);
    }
  }
};

}  // namespace upconv
