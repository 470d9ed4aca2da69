// mma.sync kernel: from the accumulators to the output tensor.
//
// The accumulators go to staging memory as [row phase][channel][row of the tile][column], with the
// width phases side by side, and from there to the output in long contiguous runs: every sector is
// written whole, whatever the stride. Output rows that no tap reaches get the bias directly.
#pragma once

#include "mma_layout.cuh"

namespace upconv {

template <typename Operand>
struct MmaStore {
  using Element = typename Operand::Element;
  static constexpr int kTiles = Operand::kTiles;
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

  __device__ __forceinline__ void list_rows() const {
    for (int i = threadIdx.x; i < tile_rows; i += blockDim.x) {
      const int y = unit.y + i % p.tile_y;
      const int z = unit.z + i / p.tile_y % p.tile_z;
      const int o = unit.o + i / p.tile_y / p.tile_z;
      shared.rows[i] = o < p.batch ? o : -1;
      shared.rows[tile_rows + i] = z * p.out_step_z;
      shared.rows[2 * tile_rows + i] = y * p.out_step_y;
    }
  }

  // Bias for the width phases that no tap reaches.
  __device__ __forceinline__ void prefill() const {
    for (int r = kind.row_begin; r < kind.row_end; ++r) {
      for (int c = threadIdx.x / 32; c < channels; c += blockDim.x / 32) {
        Element* to = staging + p.row[r].base + c * p.channel_pitch;
        const Element value = Operand::from_float(bias(c));
        for (int i = threadIdx.x % 32; i < tile_rows * p.segment; i += 32) to[i] = value;
      }
    }
  }

  // A lane has 2 columns of each tile for 2 pixels of each fragment.
  __device__ __forceinline__ void stage(const float (&d)[kMmaFragments][kTiles][4]) const {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int warp_m = warp % p.warps_m, warp_n = warp / p.warps_m;
    const int pixels = tile_rows * p.tile_x;
    const int phases = kind.phase_end - kind.phase_begin;
    int place[kMmaFragments][2];
#pragma unroll
    for (int i = 0; i < kMmaFragments; ++i)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int m = warp_m * kMmaWarpPixels + i * 16 + h * 8 + lane / 4;
        const int row = m / p.tile_x, x = m - row * p.tile_x;
        place[i][h] = m < pixels ? row * p.segment + x * p.out_step_x : -1;
      }
#pragma unroll
    for (int j = 0; j < kTiles; ++j)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int column = (warp_n * kTiles + j) * 8 + lane % 4 * 2 + h;
        const MmaColumn which = MmaColumn::of<Operand>(p, column);
        const int c = which.channel;
        if (which.phase >= phases || c >= channels) continue;
        const float b = bias(c);
        Element* to = staging + p.phase_base[kind.phase_begin + which.phase] + c * p.channel_pitch;
#pragma unroll
        for (int i = 0; i < kMmaFragments; ++i)
#pragma unroll
          for (int v = 0; v < 2; ++v) {
            if (place[i][v] >= 0) to[place[i][v]] = Operand::from_float(d[i][j][2 * v + h] + b);
          }
      }
  }

  template <typename Vector>
  static __device__ __forceinline__ Vector repeated(Element value) {
    alignas(16) uint32_t words[4];
    uint32_t word = 0;
    if constexpr (sizeof(Element) == 2) {
      word = static_cast<uint32_t>(reinterpret_cast<const unsigned short&>(value)) * 0x10001u;
    } else {
      word = __float_as_uint(value);
    }
#pragma unroll
    for (uint32_t& each : words) each = word;
    return *reinterpret_cast<const Vector*>(words);
  }

  // Staging memory -> output, `Vector` at a time: row_lanes lanes a row of the tile, a warp every
  // few channels. The inner loop is nothing but loads, stores and two additions.
  template <typename Vector>
  __device__ __forceinline__ void copy_out() const {
    constexpr int kElements = sizeof(Vector) / sizeof(Element);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    const int shift = __ffs(p.row_lanes) - 1;
    const int first_x = unit.x * p.out_step_x;
    const int length = min(p.segment, p.out_w - first_x);
    const int64_t area = static_cast<int64_t>(p.out_d) * p.out_h * p.out_w;
    const int64_t image = area * p.groups * p.out_channels;
    const int64_t channel =
        static_cast<int64_t>(unit.group) * p.out_channels + first_channel + warp;
    Element* const to = static_cast<Element*>(p.y) + channel * area + first_x;
    for (int r = kind.row_begin; r < kind.row_end; ++r) {
      const MmaRow row = p.row[r];
      for (int i = lane >> shift; i < tile_rows; i += 32 >> shift) {
        const int o = shared.rows[i];
        const int z = shared.rows[tile_rows + i] + row.first_z;
        const int y = shared.rows[2 * tile_rows + i] + row.first_y;
        if (o < 0 || z >= p.out_d || y >= p.out_h) continue;
        Element* const line = to + o * image + (static_cast<int64_t>(z) * p.out_h + y) * p.out_w;
        for (int x = (lane & (p.row_lanes - 1)) * kElements; x < length;
             x += p.row_lanes * kElements) {
          Element* out = line + x;
          if (row.base < 0) {
            for (int c = warp; c < channels; c += warps, out += warps * area) {
              *reinterpret_cast<Vector*>(out) = repeated<Vector>(Operand::from_float(bias(c)));
            }
          } else {
            const Element* from = staging + row.base + warp * p.channel_pitch + i * p.segment + x;
            const int pitch = warps * p.channel_pitch;
#pragma unroll 4
            for (int c = warp; c < channels; c += warps, out += warps * area, from += pitch) {
              *reinterpret_cast<Vector*>(out) = *reinterpret_cast<const Vector*>(from);
            }
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

  __device__ __forceinline__ void run(const float (&d)[kMmaFragments][kTiles][4]) const {
    list_rows();
    if (kind.prefill) {
      prefill();
      __syncthreads();
    }
    if (kind.step_end > kind.step_begin) stage(d);
    __syncthreads();
    copy_out();
  }
};

}  // namespace upconv
