// Transposed convolution on mma.sync: any GPU since compute capability 8.0, any groups, 1 to 3
// dimensions, TF32, BF16, FP16, and float32 by three TF32 products. No scratch memory, no atomics.
//
// The idea. A tile of the input lies in shared memory as [channel block][pixel][16 bytes]. ldmatrix
// takes the address of every row of an operand by itself, so that a box of pixels of any shape is
// an operand, and every tap of every phase is the same tile at another offset. Pixels are the rows
// of the product; its columns are phases times output channels, in tiles of 8. A step multiplies
// the pixels at one shift with the weights of all columns that have a tap there; a bit mask says
// which tiles these are, so that phases with different taps share the loads of their pixels and no
// zeros are multiplied.
//
// Every warp does the same: 64 pixels times 64 columns (32 when float32 is split), which keeps the
// shared-memory reads at one 128-byte wavefront for each mma of 6 cycles.
//   weights  stream from L2 through a ring of kMmaDepth stages with cp.async, packed in the order
//   of
//            their use
//   input    the next slice of channels is read into registers in chunks, and put into the other
//            tile buffer after the steps that hide the latency (mma_fill.cuh)
//   output   goes through staging memory in whole rows (mma_store.cuh)
// One __syncthreads a stage; stages are cut by the planner. Other blocks of the multiprocessor hide
// a block's start and its stores.
#pragma once

#include "mma_fill.cuh"
#include "mma_store.cuh"

namespace upconv {

// --- Main loop -------------------------------------------------------------------------------

template <typename Operand>
struct MmaFragment {
  uint32_t a[kMmaFragments][4];
  uint32_t b[Operand::kTiles][Operand::kWords];
  uint32_t tiles;  // which of b are in use
};

template <typename Operand>
struct MmaLoop {
  static constexpr int kTiles = Operand::kTiles;
  static constexpr uint32_t kAll = (1u << kTiles) - 1;
  static constexpr int kTileBytes = kMmaTileBytes<Operand>;
  const MmaParams& p;
  const MmaShared& shared;
  const MmaKind& kind;
  const int warp_n;
  const bool upper;  // the lane gives addresses of the step's second half
  const uint4* weights;
  const int stages;  // of one slice
  uint32_t pixel[kMmaFragments];

  __device__ __forceinline__ MmaLoop(const MmaParams& p, const MmaShared& shared,
                                     const MmaUnit& unit)
      : p(p),
        shared(shared),
        kind(p.kind[unit.kind]),
        warp_n(threadIdx.x / 32 / p.warps_m),
        upper(threadIdx.x % 32 >= 16),
        stages(kind.stage_end - kind.stage_begin) {
    const int64_t before = static_cast<int64_t>(unit.group) * p.chunks + unit.chunk;
    weights = p.w + (kind.weights + before * p.slices * kind.slice_tiles) * (kTileBytes / 16);
    const int pixels = p.tile_o * p.tile_z * p.tile_y * p.tile_x;
    const int first = threadIdx.x / 32 % p.warps_m * kMmaWarpPixels + threadIdx.x % 16;
#pragma unroll
    for (int i = 0; i < kMmaFragments; ++i) {
      const int m = min(first + i * 16, pixels - 1);
      const int x = m % p.tile_x, row = m / p.tile_x;
      const int y = row % p.tile_y, z = row / p.tile_y % p.tile_z, o = row / p.tile_y / p.tile_z;
      pixel[i] =
          16 * (o * p.pitch_o + z * p.in_step_z * p.pitch_z + y * p.in_step_y * p.pitch_y + x);
    }
  }

  // Starts the copy of stage `index`, counted over all slices, into its place in the ring.
  __device__ __forceinline__ void fetch(int index) const {
    const int slice = index / stages;
    if (slice < p.slices) {
      const MmaStage& stage = p.stage[kind.stage_begin + index - slice * stages];
      const uint4* from = weights +
                          static_cast<int64_t>(slice) * kind.slice_tiles * (kTileBytes / 16) +
                          stage.first;
      const uint32_t to = shared.ring + index % kMmaDepth * p.stage_bytes;
      for (int i = threadIdx.x; i < stage.count; i += blockDim.x) {
        mma_ptx::copy_async16(to + i * 16, from + i);
      }
    }
    mma_ptx::copy_async_commit();
  }

  // Operands of one step; moves `at` behind its weights.
  __device__ __forceinline__ void load(MmaFragment<Operand>& to, uint32_t tile, int step,
                                       uint32_t& at) const {
    uint32_t record[2];
    mma_ptx::load_shared(shared.steps + (step - kind.step_begin) * sizeof(MmaStep), record);
    const uint32_t slot = upper ? record[0] >> 16 : record[0] & 0xffff;
#pragma unroll
    for (int i = 0; i < kMmaFragments; ++i) {
      mma_ptx::load_matrices(tile + pixel[i] + slot * 16, to.a[i]);
    }
    const int skip = warp_n * kTiles;
    to.tiles = record[1] >> skip & kAll;
    uint32_t from = at + __popc(record[1] & ((1u << skip) - 1)) * kTileBytes +
                    threadIdx.x % 32 * (4 * Operand::kWords);
    if (to.tiles == kAll) {
#pragma unroll
      for (int j = 0; j < kTiles; ++j) mma_ptx::load_shared(from + j * kTileBytes, to.b[j]);
    } else {
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
        if (to.tiles >> j & 1) {
          mma_ptx::load_shared(from, to.b[j]);
          from += kTileBytes;
        }
      }
    }
    at += __popc(record[1]) * kTileBytes;
  }

  __device__ __forceinline__ void multiply(float (&d)[kMmaFragments][kTiles][4],
                                           MmaFragment<Operand>& f) const {
    uint32_t tail[kMmaFragments][4];
    if constexpr (Operand::kSplit) {
#pragma unroll
      for (int i = 0; i < kMmaFragments; ++i)
#pragma unroll
        for (int k = 0; k < 4; ++k) Operand::split(f.a[i][k], f.a[i][k], tail[i][k]);
    }
    const auto column = [&](int j) {
#pragma unroll
      for (int i = 0; i < kMmaFragments; ++i) {
        if constexpr (Operand::kSplit) {
          Operand::multiply(d[i][j], f.a[i], tail[i], f.b[j]);
        } else {
          Operand::multiply(d[i][j], f.a[i], f.b[j]);
        }
      }
    };
    if (f.tiles == kAll) {
#pragma unroll
      for (int j = 0; j < kTiles; ++j) column(j);
    } else {
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
        if (f.tiles >> j & 1) column(j);
      }
    }
  }

  // Steps [begin, end), the operands of the next one loading while one multiplies.
  __device__ __forceinline__ void steps(float (&d)[kMmaFragments][kTiles][4], uint32_t tile,
                                        int begin, int end, uint32_t& at) const {
    if (begin >= end) return;
    MmaFragment<Operand> even, odd;
    load(even, tile, begin, at);
    for (int s = begin; s < end; s += 2) {
      if (s + 1 < end) load(odd, tile, s + 1, at);
      multiply(d, even);
      if (s + 2 < end) load(even, tile, s + 2, at);
      if (s + 1 < end) multiply(d, odd);
    }
  }

  __device__ __forceinline__ void run(float (&d)[kMmaFragments][kTiles][4],
                                      MmaFill<Operand>& fill) const {
#pragma unroll
    for (int i = 0; i < kMmaDepth - 1; ++i) fetch(i);
    const int chunks = fill.chunks();
    for (int c = 0; c < chunks; ++c) {
      fill.read(0, c);
      fill.put(shared.tile, c);
    }
    const uint32_t buffer = p.slice_blocks * p.plane * 16;
    const int share = (chunks + stages - 1) / stages;  // chunks of one stage
    int index = 0;
    for (int slice = 0; slice < p.slices; ++slice) {
      const uint32_t tile = shared.tile + slice % 2 * buffer;
      const uint32_t next = shared.tile + (slice + 1) % 2 * buffer;
      const int left = slice + 1 < p.slices ? chunks : 0;
      for (int s = 0; s < stages; ++s, ++index) {
        mma_ptx::copy_async_wait<kMmaDepth - 2>();
        // The stage and, at the first of a slice, the tile are there; the last stage is spent.
        __syncthreads();
        fetch(index + kMmaDepth - 1);
        const MmaStage& stage = p.stage[kind.stage_begin + s];
        uint32_t at = shared.ring + index % kMmaDepth * p.stage_bytes;
        int step = stage.step_begin;
        for (int c = 0; c < share; ++c) {
          const int chunk = s * share + c;
          if (chunk < left) fill.read(slice + 1, chunk);
          const int end = step + (stage.step_end - step) / (share - c);
          steps(d, tile, step, end, at);
          step = end;
          if (chunk < left) fill.put(next, chunk);
        }
      }
    }
    mma_ptx::copy_async_wait<0>();
  }
};

// --- The kernel ------------------------------------------------------------------------------

template <typename Operand>
__global__ void __launch_bounds__(kMmaMaxThreads, 1)
    mma_fprop_kernel(const __grid_constant__ MmaParams p) {
  extern __shared__ __align__(128) unsigned char memory[];
  const MmaShared shared(p, memory);
  const MmaUnit unit(p);
  const MmaKind& kind = p.kind[unit.kind];
  float d[kMmaFragments][Operand::kTiles][4];
#pragma unroll
  for (int i = 0; i < kMmaFragments; ++i)
#pragma unroll
    for (int j = 0; j < Operand::kTiles; ++j)
#pragma unroll
      for (int k = 0; k < 4; ++k) d[i][j][k] = 0.f;
  if (kind.step_end > kind.step_begin) {
    list_pixels(p, unit, shared);
    uint2* steps = reinterpret_cast<uint2*>(memory + p.steps_at);
    for (int i = threadIdx.x; i < kind.step_end - kind.step_begin; i += blockDim.x) {
      steps[i] = *reinterpret_cast<const uint2*>(&p.step[kind.step_begin + i]);
    }
    __syncthreads();
    MmaFill<Operand> fill(p, shared, unit);
    MmaLoop<Operand>(p, shared, unit).run(d, fill);
    __syncthreads();
  }
  MmaStore<Operand>(p, shared, unit).run(d);
}

// --- Weight packing --------------------------------------------------------------------------

// Weights -> [kind][group][chunk][slice][step][tile][lane][words], rounded or split, zero where a
// column has no tap at the shift or a channel does not exist. A block packs one step of one chunk
// and slice; a thread the words of one lane.
template <typename Operand>
__global__ void mma_pack_weights(const __grid_constant__ MmaParams p,
                                 const __grid_constant__ MmaPack pack,
                                 const typename Operand::Element* weight, uint32_t* packed) {
  using Element = typename Operand::Element;
  constexpr int kE = Operand::kChannels, kHalf = kE / 4;  // channels of a lane in half a step
  int k = 0;
  while (static_cast<int>(blockIdx.x) >= p.kind[k].step_end) ++k;
  const MmaKind& kind = p.kind[k];
  const MmaStep& step = p.step[blockIdx.x];
  const MmaPack::Source& source = pack.source[blockIdx.x];
  const int slice = blockIdx.y, group = blockIdx.z / p.chunks, chunk = blockIdx.z % p.chunks;
  const int phases = kind.phase_end - kind.phase_begin;
  const int64_t unit = static_cast<int64_t>(blockIdx.z) * p.slices + slice;
  const int lane = threadIdx.x % 32;
  const int tile = threadIdx.x / 32;  // of all column tiles
  if (!(step.tiles >> tile & 1)) return;
  const int column = tile * 8 + lane / 4;
  const int phase = column / p.phase_columns, c = column - phase * p.phase_columns;
  const int out = chunk * p.chunk + c;
  const bool exists = phase < phases && c < p.chunk && out < p.out_channels;
  alignas(16) Element values[2][kHalf];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int tap =
        exists ? pack.tap[kind.taps + source.shift[h] * phases + min(phase, phases - 1)] : -1;
#pragma unroll
    for (int e = 0; e < kHalf; ++e) {
      const int in = (slice * p.slice_blocks + source.block[h]) * kE + lane % 4 * kHalf + e;
      const bool on = tap >= 0 && source.block[h] >= 0 && in < p.in_channels;
      const int64_t at = static_cast<int64_t>(group) * p.weight_group +
                         static_cast<int64_t>(in) * p.weight_in +
                         static_cast<int64_t>(out) * p.weight_out + tap;
      values[h][e] = on ? weight[at] : Operand::from_float(0.f);
    }
  }
  const int before = source.first + __popc(step.tiles & ((1u << tile) - 1));
  packed += (kind.weights + unit * kind.slice_tiles + before) * (kMmaTileBytes<Operand> / 4) +
            lane * Operand::kWords;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const uint32_t word = *reinterpret_cast<const uint32_t*>(values[h]);
    if constexpr (Operand::kSplit) {
      Operand::split(word, packed[h], packed[2 + h]);
    } else {
      packed[h] = Operand::prepare(word);
    }
  }
}

}  // namespace upconv
