// mma.sync kernel: from the accumulators to the output tensor, as sheets. For layers whose outputs
// are many and whose products are few, in the form of 32 pixels a warp: a block has all phases, so
// that whole rows of the output, or whole segments of them, lie in staging memory as they do in the
// tensor, and leave it by bulk copies. No thread reads or writes what it has laid down but for the
// ends of rows.
//
// Rows, planes and channels of the staging memory are as far apart, modulo 16 bytes, as those of
// the tensor, and the first row begins as far behind 16 bytes; so each number has the same place in
// its 16 bytes here and there, however odd the rows are.
#pragma once

#include "mma_store.cuh"

namespace upconv {

template <typename Operand>
struct MmaSheet : MmaStore<Operand, 2> {
  static constexpr int kFragments = 2;
  using Base = MmaStore<Operand, kFragments>;
  using Element = typename Operand::Element;
  using Base::channels, Base::p, Base::shared, Base::staging, Base::unit;
  static constexpr int kTiles = Operand::kTiles;
  static constexpr int kBytes = static_cast<int>(sizeof(Element));
  static constexpr int kVector = 16 / kBytes;  // elements
  Element* const first;                        // where the block's outputs begin
  const int behind;                            // elements behind 16 bytes

  __device__ __forceinline__ MmaSheet(const MmaParams& p, const MmaShared& shared,
                                      const MmaUnit& unit)
      : Base(p, shared, unit),
        first(static_cast<Element*>(p.y) +
              (((static_cast<int64_t>(unit.o) * p.groups + unit.group) * p.out_channels +
                this->first_channel) *
                   p.out_d +
               unit.z * p.out_step_z) *
                  p.out_h * p.out_w +
              static_cast<int64_t>(unit.y * p.out_step_y) * p.out_w + unit.x * p.out_step_x),
        behind(static_cast<int>(reinterpret_cast<uintptr_t>(first) / kBytes % kVector)) {}

  // What a run of elements has before its first whole 16 bytes, in them, and behind them.
  struct Run {
    int head, body;
    __device__ __forceinline__ Run(int behind, int length)
        : head(min(-behind & (kVector - 1), length)), body((length - head) & -kVector) {}
  };

  // The bias everywhere, where some phase has no tap.
  __device__ __forceinline__ void prefill() const {
    for (int c = threadIdx.x / 32; c < channels; c += blockDim.x / 32) {
      const int from = behind + c * p.channel_pitch;
      const Run run(from, p.channel_pitch);
      const Element value = Operand::from_float(shared.bias[c]);
      Element* const to = staging + from;
      alignas(16) Element all[kVector];
#pragma unroll
      for (int i = 0; i < kVector; ++i) all[i] = value;
      const uint4 vector = *reinterpret_cast<const uint4*>(all);
      const int lane = threadIdx.x % 32;
      for (int i = lane * kVector; i < run.body; i += 32 * kVector) {
        *reinterpret_cast<uint4*>(to + run.head + i) = vector;
      }
      if (lane < run.head) to[lane] = value;
      if (lane < p.channel_pitch - run.head - run.body) to[run.head + run.body + lane] = value;
    }
  }

  // A lane has 2 columns of each tile for 2 pixels of each fragment. Points past the tile's end are
  // its last one once more.
  __device__ __forceinline__ void stage(const float (&d)[kFragments][kTiles][4]) const {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int warp_m = warp % p.warps_m, warp_n = warp / p.warps_m;
    const int last = p.tile_z * p.tile_y * p.tile_x - 1;
    uint32_t place[kFragments][2];
#pragma unroll
    for (int i = 0; i < kFragments; ++i)
#pragma unroll
      for (int v = 0; v < 2; ++v) {
        const int m = min(warp_m * 16 * kFragments + i * 16 + v * 8 + lane / 4, last);
        const int row = quotient(m, p.by_tile_x), x = m - row * p.tile_x;
        const int z = quotient(row, p.by_tile_y), y = row - z * p.tile_y;
        const int at = z * p.out_step_z * p.plane_pitch + y * p.out_step_y * p.segment;
        place[i][v] = shared.tile + (behind + at + x * p.out_step_x) * kBytes;
      }
    const int phases = this->kind.phase_end - this->kind.phase_begin;
    const int end = MmaColumn::end(p, warp_n);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      MmaColumn column = this->first_column(warp_n, h);
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

  // A warp for each row of each plane of each channel.
  __device__ __forceinline__ void copy_out() const {
    const int planes = min(p.tile_z * p.out_step_z, p.out_d - unit.z * p.out_step_z);
    const int rows = min(p.tile_y * p.out_step_y, p.out_h - unit.y * p.out_step_y);
    const int length = min(p.tile_x * p.out_step_x, p.out_w - unit.x * p.out_step_x);
    const int64_t area = static_cast<int64_t>(p.out_h) * p.out_w;
    const int warps = blockDim.x / 32;
#pragma unroll 1
    for (int i = threadIdx.x / 32; i < channels * planes * rows; i += warps) {
      const int plane = i / rows, y = i - plane * rows;  // of all channels
      const int c = plane / planes, z = plane - c * planes;
      const int at = behind + c * p.channel_pitch + z * p.plane_pitch + y * p.segment;
      copy_row(staging + at, first + (static_cast<int64_t>(c) * p.out_d + z) * area + y * p.out_w,
               Run(at, length), length);
    }
#if __CUDA_ARCH__ >= 900
    mma_ptx::bulk_store_commit();
    mma_ptx::bulk_store_wait();
#endif
  }

  __device__ __forceinline__ void copy_row(const Element* from, Element* to, Run run,
                                           int length) const {
    const int lane = threadIdx.x % 32, behind_body = run.head + run.body;
#if __CUDA_ARCH__ >= 900
    if (lane == 0 && run.body > 0) {
      mma_ptx::bulk_store(to + run.head, mma_ptx::shared_address(from + run.head),
                          static_cast<uint32_t>(run.body * kBytes));
    }
#else
    for (int i = run.head + lane * kVector; i < behind_body; i += 32 * kVector) {
      *reinterpret_cast<uint4*>(to + i) = *reinterpret_cast<const uint4*>(from + i);
    }
#endif
    // Half a warp for what is before the body, half for what is behind it.
    const int i = lane < 16 ? lane : behind_body + lane - 16;
    if (i < (lane < 16 ? run.head : length)) to[i] = from[i];
  }

  __device__ __forceinline__ void run(const float (&d)[kFragments][kTiles][4]) const {
    if (this->kind.prefill) {
      prefill();
      __syncthreads();
    }
    if (this->kind.step_end > this->kind.step_begin) stage(d);
#if __CUDA_ARCH__ >= 900
    mma_ptx::fence_async_proxy();
#endif
    __syncthreads();
    copy_out();
  }
};

}  // namespace upconv
