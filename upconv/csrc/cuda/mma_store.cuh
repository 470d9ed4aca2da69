// mma.sync kernel: from the accumulators to the output tensor.
//
// The accumulators go to staging memory as [row phase][channel][row of the tile][column], with the
// width phases side by side, and from there to the output in long contiguous runs: every sector is
// written whole, whatever the stride. Output rows that no tap reaches get the bias.
#pragma once

#include "mma_layout.cuh"

namespace upconv {

template <typename Operand, int kFragments>
struct MmaStore {
  using Element = typename Operand::Element;
  static constexpr int kTiles = Operand::kTiles;
  static constexpr int kBareVector = 16 / static_cast<int>(sizeof(Element));
  const MmaParams& p;
  const MmaShared& shared;
  const MmaUnit& unit;
  const MmaKind& kind;
  const int first_channel;  // of the chunk, in the group
  const int channels;       // of the chunk that exist
  const int tile_rows;
  Element* const staging;

  __device__ __forceinline__ MmaStore(const MmaParams& p, const MmaShared& shared,
                                      const MmaUnit& unit)
      : p(p),
        shared(shared),
        unit(unit),
        kind(p.kind[unit.kind]),
        first_channel(unit.chunk * p.chunk),
        channels(min(p.chunk, p.out_channels - first_channel)),
        tile_rows(p.tile_o * p.tile_z * p.tile_y),
        staging(reinterpret_cast<Element*>(shared.memory)) {}

  // Of a channel of the chunk.
  __device__ __forceinline__ float bias(int channel) const {
    if (p.bias == nullptr || channel >= channels) return 0.f;
    const int index = unit.group * p.out_channels + first_channel + channel;
    return Operand::to_float(static_cast<const Element*>(p.bias)[index]);
  }

  // What a column needs, in shared memory: parameters that lie apart take some 100 cycles each.
  __device__ __forceinline__ void list_columns() const {
    for (int c = threadIdx.x; c < p.chunk; c += blockDim.x) shared.bias[c] = bias(c);
    for (int i = threadIdx.x; i < kind.phase_end - kind.phase_begin; i += blockDim.x) {
      shared.phases[i] = p.phase_base[kind.phase_begin + i];
    }
  }

  // Sums begin at the bias.
  __device__ __forceinline__ void begin(float (&d)[kFragments][kTiles][4]) const {
    const int warp_n = threadIdx.x / 32 / p.warps_m, end = MmaColumn::end(p, warp_n);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      MmaColumn column = first_column(warp_n, h);
#pragma unroll
      for (int j = 0; j < kTiles; ++j, column.next(p, end)) {
        const float value = shared.bias[min(column.channel, p.chunk - 1)];
#pragma unroll
        for (int i = 0; i < kFragments; ++i) d[i][j][h] = d[i][j][2 + h] = value;
      }
    }
  }

  // Of a lane's two in the warp's first tile.
  __device__ __forceinline__ MmaColumn first_column(int warp_n, int h) const {
    return MmaColumn::of<Operand>(p, warp_n * kTiles * 8 + threadIdx.x % 4 * 2 + h);
  }

  __device__ __forceinline__ void list_rows() const {
    for (int i = threadIdx.x; i < tile_rows; i += blockDim.x) {
      const int plane = quotient(i, p.by_tile_y), image = quotient(plane, p.by_tile_z);
      const int z = unit.z + plane - image * p.tile_z, y = unit.y + i - plane * p.tile_y;
      shared.rows[i] = unit.o + image < p.batch ? unit.o + image : -1;
      shared.rows[tile_rows + i] = z * p.out_step_z;
      shared.rows[2 * tile_rows + i] = y * p.out_step_y;
    }
  }

  // Bias for the width phases that no tap reaches.
  __device__ __forceinline__ void prefill() const {
    for (int r = kind.row_begin; r < kind.row_end; ++r) {
      for (int c = threadIdx.x / 32; c < channels; c += blockDim.x / 32) {
        Element* to = staging + p.row[r].base + c * p.channel_pitch;
        const Element value = Operand::from_float(shared.bias[c]);
        for (int i = threadIdx.x % 32; i < tile_rows * p.segment; i += 32) to[i] = value;
      }
    }
  }

  // A lane has 2 columns of each tile for 2 pixels of each fragment. Points past the tile's end lie
  // down behind its last row, where nobody looks.
  __device__ __forceinline__ void stage(const float (&d)[kFragments][kTiles][4]) const {
    constexpr int kBytes = static_cast<int>(sizeof(Element));
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int warp_m = warp % p.warps_m, warp_n = warp / p.warps_m;
    const int pixels = tile_rows * p.tile_x;
    const int phases = kind.phase_end - kind.phase_begin;
    uint32_t place[kFragments][2];
#pragma unroll
    for (int i = 0; i < kFragments; ++i)
#pragma unroll
      for (int v = 0; v < 2; ++v) {
        const int m = warp_m * 16 * kFragments + i * 16 + v * 8 + lane / 4;
        const int row = quotient(m, p.by_tile_x), x = m - row * p.tile_x;
        const int at = m < pixels ? row * p.segment + x * p.out_step_x : tile_rows * p.segment;
        place[i][v] = shared.tile + at * kBytes;
      }
    const int end = MmaColumn::end(p, warp_n);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      MmaColumn column = first_column(warp_n, h);
#pragma unroll
      for (int j = 0; j < kTiles; ++j, column.next(p, end)) {
        if (column.phase >= phases || column.channel >= channels) continue;
        const uint32_t to =
            kBytes * (shared.phases[column.phase] + column.channel * p.channel_pitch);
#pragma unroll
        for (int i = 0; i < kFragments; ++i) {
          Operand::store_two(place[i][0] + to, place[i][1] + to, d[i][j][h], d[i][j][2 + h]);
        }
      }
    }
  }

  // Rows that no tap reaches: a vector of the bias for each channel stands for all of them.
  __device__ __forceinline__ bool bare() const { return kind.phase_begin == kind.phase_end; }

  __device__ __forceinline__ void stage_bias() const {
    for (int i = threadIdx.x; i < channels * kBareVector; i += blockDim.x) {
      staging[i] = Operand::from_float(bias(i / kBareVector));
    }
  }

  // Staging memory -> output, `Vector` at a time: row_lanes lanes store a row of the tile together.
  // Warps divide the rows, and the channels only where rows are few: a look at a row serves many
  // channels, and the inner loop is nothing but loads, stores and additions, four at a time.
  template <typename Vector>
  __device__ __forceinline__ void copy_out() const {
    constexpr int kElements = sizeof(Vector) / sizeof(Element), kBatch = 4;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    const int shift = __ffs(p.row_lanes) - 1;
    int row_warps = __ffs(warps) - 1;  // as a power of two
    while (row_warps > 0 && 32 << row_warps >> shift > tile_rows) --row_warps;
    const int first_row = (lane >> shift) + ((warp & ((1 << row_warps) - 1)) << (5 - shift));
    const int row_step = 32 << row_warps >> shift;
    const int begin = warp >> row_warps, step = warps >> row_warps;  // channels
    const int first_x = unit.x * p.out_step_x;
    const int length = min(p.segment, p.out_w - first_x);
    const int64_t area = static_cast<int64_t>(p.out_d) * p.out_h * p.out_w;
    const int64_t image = area * p.groups * p.out_channels;
    const int64_t channel =
        static_cast<int64_t>(unit.group) * p.out_channels + first_channel + begin;
    Element* const to = static_cast<Element*>(p.y) + channel * area + first_x;
    const int pitch = step * (bare() ? kBareVector : p.channel_pitch);
    const int64_t jump = step * area;
    for (int r = kind.row_begin; r < kind.row_end; ++r) {
      const MmaRow row = p.row[r];
      for (int i = first_row; i < tile_rows; i += row_step) {
        const int o = shared.rows[i];
        const int z = shared.rows[tile_rows + i] + row.first_z;
        const int y = shared.rows[2 * tile_rows + i] + row.first_y;
        if (o < 0 || z >= p.out_d || y >= p.out_h) continue;
        Element* const line = to + o * image + (static_cast<int64_t>(z) * p.out_h + y) * p.out_w;
        const Element* const sums =
            staging +
            (bare() ? begin * kBareVector : row.base + begin * p.channel_pitch + i * p.segment);
        for (int x = (lane & (p.row_lanes - 1)) * kElements; x < length;
             x += p.row_lanes * kElements) {
          Element* out = line + x;
          const Element* from = sums + (bare() ? 0 : x);
          int c = begin;
          for (; c + (kBatch - 1) * step < channels; c += kBatch * step) {
            Vector v[kBatch];
#pragma unroll
            for (int k = 0; k < kBatch; ++k, from += pitch) {
              v[k] = *reinterpret_cast<const Vector*>(from);
            }
#pragma unroll
            for (int k = 0; k < kBatch; ++k, out += jump) *reinterpret_cast<Vector*>(out) = v[k];
          }
          for (; c < channels; c += step, out += jump, from += pitch) {
            *reinterpret_cast<Vector*>(out) = *reinterpret_cast<const Vector*>(from);
          }
        }
      }
    }
  }

  __device__ __forceinline__ void copy_out() const {
    const int bytes = p.vector * static_cast<int>(sizeof(Element));
    if (bytes == 16) {
      copy_out<uint4>();
    } else if (bytes == 8) {
      copy_out<uint2>();
    } else if (bytes == 4) {
      copy_out<uint32_t>();
    } else if constexpr (sizeof(Element) == 2) {
      copy_out<unsigned short>();
    }
  }

  __device__ __forceinline__ void run(const float (&d)[kFragments][kTiles][4]) const {
    list_rows();
    if (kind.prefill) {
      prefill();
      __syncthreads();
    }
    if (bare()) {
      stage_bias();
    } else {
      stage(d);
    }
    __syncthreads();
    copy_out();
  }
};

}  // namespace upconv
