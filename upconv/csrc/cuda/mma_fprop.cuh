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
// shared-memory reads at one 128-byte wavefront for each mma of 6 cycles. Layers that mostly wait
// for memory have a form with 32 pixels, of which a multiprocessor holds twice as many warps.
//   weights  stream from L2 through a ring of kMmaDepth stages, packed in the order of their use
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

// The ring of weight stages. From compute capability 9.0 on one thread starts one bulk copy a
// stage; before, every thread starts its part with cp.async, some 100 instructions a stage.
struct MmaRing {
  const unsigned char* from;  // slice of the stage that is started next
  const int64_t slice_bytes;
  const int stages;  // of one slice
  int stage = 0;     // that is started next
  int left;          // stages to start
  int place = kMmaDepth - 1;
  uint32_t parity = 1;

  __device__ __forceinline__ MmaRing(const MmaParams& p, const MmaUnit& unit, int tile_bytes)
      : slice_bytes(static_cast<int64_t>(p.kind[unit.kind].slice_tiles) * tile_bytes),
        stages(p.kind[unit.kind].stage_end - p.kind[unit.kind].stage_begin),
        left(stages * p.slices) {
    const int64_t before = static_cast<int64_t>(unit.group) * p.chunks + unit.chunk;
    from = reinterpret_cast<const unsigned char*>(p.w) +
           static_cast<int64_t>(p.kind[unit.kind].weights) * tile_bytes +
           before * p.slices * slice_bytes;
  }

  static __device__ __forceinline__ void prepare(const MmaShared& shared) {
#if __CUDA_ARCH__ >= 900
    if (threadIdx.x == 0) {
      for (int i = 0; i < kMmaDepth; ++i) mma_ptx::barrier_init(shared.barriers + 8 * i, 1);
      mma_ptx::barrier_init_fence();
    }
#endif
  }

  // Starts the copy of the next stage into `to`.
  __device__ __forceinline__ void start(const MmaParams& p, const MmaShared& shared, int to) {
    if (left > 0) {
      --left;
#if __CUDA_ARCH__ >= 900
      if (threadIdx.x == 0) {
        uint32_t record[2];
        mma_ptx::load_shared(shared.stages + stage * sizeof(MmaStage), record);
        const uint32_t bytes = (record[1] & 0xffff) * 16, barrier = shared.barriers + 8 * to;
        mma_ptx::barrier_arrive_expect(barrier, bytes);
        mma_ptx::bulk_copy(shared.ring + to * p.stage_bytes, from + record[0], bytes, barrier);
      }
#else
      uint32_t record[2];
      mma_ptx::load_shared(shared.stages + stage * sizeof(MmaStage), record);
      const unsigned char* source = from + record[0] + threadIdx.x * 16;
      uint32_t target = shared.ring + to * p.stage_bytes + threadIdx.x * 16;
      const int jump = blockDim.x * 16;
#pragma unroll 1
      for (int i = threadIdx.x; i < (record[1] & 0xffff); i += blockDim.x) {
        mma_ptx::copy_async16(target, source);
        target += jump;
        source += jump;
      }
#endif
      if (++stage == stages) stage = 0, from += slice_bytes;
    }
#if __CUDA_ARCH__ < 900
    mma_ptx::copy_async_commit();
#endif
  }

  // Waits for the next stage, hands the last one's place on, and returns where the stage lies.
  __device__ __forceinline__ uint32_t next(const MmaParams& p, const MmaShared& shared) {
    const int last = place;
    place = place + 1 == kMmaDepth ? 0 : place + 1;
    if (place == 0) parity ^= 1;
#if __CUDA_ARCH__ < 900
    mma_ptx::copy_async_wait<kMmaDepth - 2>();
#endif
    __syncthreads();
    start(p, shared, last);
#if __CUDA_ARCH__ >= 900
    mma_ptx::barrier_wait(shared.barriers + 8 * place, parity);
#endif
    return shared.ring + place * p.stage_bytes;
  }
};

// Only two warps share a scheduler, so that every instruction beside the products shows: the loops
// below hold nothing that can be known before them.
template <typename Operand, int kFragments>
struct MmaLoop {
  static constexpr int kTiles = Operand::kTiles;
  static constexpr uint32_t kAll = (1u << kTiles) - 1;
  static constexpr int kTileBytes = kMmaTileBytes<Operand>;
  using Pixels = uint32_t[kFragments][4];
  using Weights = uint32_t[kTiles][Operand::kWords];
  using Accumulator = float[kFragments][kTiles][4];
  const MmaParams& p;
  const MmaShared& shared;
  const MmaKind& kind;
  const int warp_n;
  const int stages;  // of one slice
  const int uniform;
  const int half;  // bits to the step's slot that the lane gives addresses for
  uint32_t pixel[kFragments];

  __device__ __forceinline__ MmaLoop(const MmaParams& p, const MmaShared& shared,
                                     const MmaUnit& unit)
      : p(p),
        shared(shared),
        kind(p.kind[unit.kind]),
        warp_n(threadIdx.x / 32 / p.warps_m),
        stages(kind.stage_end - kind.stage_begin),
        uniform(kind.uniform),
        half(threadIdx.x % 32 < 16 ? 0 : 16) {
    const int pixels = p.tile_o * p.tile_z * p.tile_y * p.tile_x;
    const int first = threadIdx.x / 32 % p.warps_m * (16 * kFragments) + threadIdx.x % 16;
#pragma unroll
    for (int i = 0; i < kFragments; ++i) {
      const int m = min(first + i * 16, pixels - 1);
      const int row = quotient(m, p.by_tile_x), plane = quotient(row, p.by_tile_y);
      const int o = quotient(plane, p.by_tile_z), z = plane - o * p.tile_z;
      const int y = row - plane * p.tile_y, x = m - row * p.tile_x;
      const int slot = z * p.in_step_z * p.pitch_z + y * p.in_step_y * p.pitch_y + x;
      pixel[i] = 16 * (o * p.pitch_o + slot);
    }
  }

  // Pixels of one step; returns the tiles of its record.
  __device__ __forceinline__ uint32_t load_pixels(Pixels& to, uint32_t tile,
                                                  uint32_t record) const {
    uint32_t words[2];
    mma_ptx::load_shared(record, words);
    const uint32_t slot = (words[0] >> half & 0xffff) * 16 + tile;
#pragma unroll
    for (int i = 0; i < kFragments; ++i) mma_ptx::load_matrices(slot + pixel[i], to[i]);
    return words[1];
  }

  // Of the tiles [kFirst, kEnd); `at` is where those of tile kBase lie.
  template <int kBase, int kFirst, int kEnd>
  __device__ __forceinline__ void load_weights(Weights& to, uint32_t at) const {
#pragma unroll
    for (int j = kFirst; j < kEnd; ++j) {
      mma_ptx::load_shared(at + (j - kBase) * kTileBytes, to[j]);
    }
  }

  // Products of the column tiles [kFirst, kEnd) for which `use(j)`.
  template <int kFirst, int kEnd, typename Use>
  __device__ __forceinline__ void multiply(Accumulator& d, const Pixels& a, const Pixels& tail,
                                           const Weights& b, const Use& use) const {
#pragma unroll
    for (int j = kFirst; j < kEnd; ++j) {
      if (use(j)) {
        if constexpr (Operand::kSplit) {
          float sum[kFragments][4] = {};
#pragma unroll
          for (int part = 0; part < 3; ++part)  // tail x head, head x tail, head x head
#pragma unroll
            for (int i = 0; i < kFragments; ++i) {
              const int first = part == 1 ? 2 : 0;
              Operand::multiply(d[i][j], sum[i], part == 0 ? tail[i] : a[i], b[j][first],
                                b[j][first + 1], part == 2);
            }
        } else {
#pragma unroll
          for (int i = 0; i < kFragments; ++i) Operand::multiply(d[i][j], a[i], b[j]);
        }
      }
    }
  }

  __device__ __forceinline__ void split(Pixels& a, Pixels& tail) const {
    if constexpr (Operand::kSplit) {
#pragma unroll
      for (int i = 0; i < kFragments; ++i)
#pragma unroll
        for (int k = 0; k < 4; ++k) Operand::split(a[i][k], a[i][k], tail[i][k]);
    }
  }

  // One step with the tiles [kFirst, kEnd). The first half of its weights is in registers; the
  // second half, the next step's pixels and then its first half of weights load while others
  // multiply.
  template <int kFirst, int kEnd>
  __device__ __forceinline__ void dense_step(Accumulator& d, Pixels& now, Pixels& next, Weights& b,
                                             uint32_t tile, uint32_t record, uint32_t at,
                                             int step_bytes, bool more) const {
    constexpr int kMiddle = (kFirst + kEnd + 1) / 2;
    const auto use = [](int) { return true; };
    Pixels tail;
    load_weights<kFirst, kMiddle, kEnd>(b, at);
    split(now, tail);
    if (more) load_pixels(next, tile, record + sizeof(MmaStep));
    multiply<kFirst, kMiddle>(d, now, tail, b, use);
    if (more) load_weights<kFirst, kFirst, kMiddle>(b, at + step_bytes);
    multiply<kMiddle, kEnd>(d, now, tail, b, use);
  }

  template <int kFirst, int kEnd>
  __device__ __forceinline__ void dense(Accumulator& d, uint32_t tile, uint32_t record, int count,
                                        uint32_t at, int step_bytes) const {
    Pixels even, odd;
    Weights b;
    load_pixels(even, tile, record);
    load_weights<kFirst, kFirst, (kFirst + kEnd + 1) / 2>(b, at);
#pragma unroll 1
    for (; count > 1; count -= 2) {
      dense_step<kFirst, kEnd>(d, even, odd, b, tile, record, at, step_bytes, true);
      record += sizeof(MmaStep);
      at += step_bytes;
      dense_step<kFirst, kEnd>(d, odd, even, b, tile, record, at, step_bytes, count > 2);
      record += sizeof(MmaStep);
      at += step_bytes;
    }
    if (count) dense_step<kFirst, kEnd>(d, even, odd, b, tile, record, at, step_bytes, false);
  }

  // Steps whose tiles differ; moves `at` behind their weights.
  __device__ __forceinline__ void some(Accumulator& d, uint32_t tile, uint32_t record, int count,
                                       uint32_t& at) const {
    const int skip = warp_n * kTiles;
    const uint32_t before = (1u << skip) - 1;
    Pixels now, next, tail;
    Weights b;
    uint32_t all = load_pixels(now, tile, record);
#pragma unroll 1
    for (; count > 0; --count) {
      const uint32_t mine = all >> skip;
      uint32_t from = at + __popc(all & before) * kTileBytes;
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
        if (mine >> j & 1) {
          mma_ptx::load_shared(from, b[j]);
          from += kTileBytes;
        }
      }
      at += __popc(all) * kTileBytes;
      record += sizeof(MmaStep);
      if (count > 1) all = load_pixels(next, tile, record);
      split(now, tail);
      multiply<0, kTiles>(d, now, tail, b, [&](int j) { return (mine >> j & 1) != 0; });
#pragma unroll
      for (int i = 0; i < kFragments; ++i)
#pragma unroll
        for (int k = 0; k < 4; ++k) now[i][k] = next[i][k];
    }
  }

  // Steps [begin, begin + count) of the kind; `at` is this lane's place in their weights.
  __device__ __forceinline__ void steps(Accumulator& d, uint32_t tile, int begin, int count,
                                        uint32_t& at) const {
    if (count <= 0) return;
    const uint32_t record = shared.steps + begin * sizeof(MmaStep);
    if (!uniform) return some(d, tile, record, count, at);
    uint32_t words[2];
    mma_ptx::load_shared(record, words);
    const int skip = warp_n * kTiles;
    const uint32_t mine = words[1] >> skip & kAll;
    const int bytes = __popc(words[1]) * kTileBytes;
    uint32_t first = at, behind = at + count * bytes;
    at += __popc(words[1] & ((1u << skip) - 1)) * kTileBytes;
    if (mine == kAll) {
      dense<0, kTiles>(d, tile, record, count, at, bytes);
    } else if (mine == (1u << kTiles / 2) - 1) {
      dense<0, kTiles / 2>(d, tile, record, count, at, bytes);
    } else if (mine == (kAll & ~((1u << kTiles / 2) - 1))) {
      dense<kTiles / 2, kTiles>(d, tile, record, count, at, bytes);
    } else if (mine == (1u << kTiles * 3 / 4) - 1) {
      dense<0, kTiles * 3 / 4>(d, tile, record, count, at, bytes);
    } else if (kTiles == 8 && mine == 0x07) {
      dense<0, 3>(d, tile, record, count, at, bytes);
    } else if (kTiles == 8 && mine == 0x38) {
      dense<3 % kTiles, 3 + kTiles * 3 / 8>(d, tile, record, count, at, bytes);
    } else if (mine != 0) {
      some(d, tile, record, count, first);
    }
    at = behind;
  }

  __device__ __forceinline__ void run(Accumulator& d, MmaFill<Operand, kFragments>& fill,
                                      MmaRing& ring) const {
    const uint32_t lane = threadIdx.x % 32 * (4 * Operand::kWords);
    const uint32_t buffer = p.slice_blocks * p.plane * 16;
    const int share = (fill.chunks + stages - 1) / stages;  // chunks of one stage
#pragma unroll 1
    for (int slice = 0; slice < p.slices; ++slice) {
      const uint32_t tile = shared.tile + (slice & 1) * buffer;
      const uint32_t next = shared.tile + (~slice & 1) * buffer;
      const int left = slice + 1 < p.slices ? fill.chunks : 0;
      fill.next_slice();
      int chunk = 0, step = 0;
#pragma unroll 1
      for (int s = 0; s < stages; ++s) {
        // The stage and, at the first of a slice, the tile are there; the last stage is spent.
        uint32_t at = ring.next(p, shared) + lane;
        uint32_t record[2];
        mma_ptx::load_shared(shared.stages + s * sizeof(MmaStage), record);
        int count = record[1] >> 16;
#pragma unroll 1
        for (int c = chunk < left ? share : 1; c > 0; --c, ++chunk) {
          if (kFragments == 4 && chunk < left) fill.read(chunk);
          const int part = c == 1 ? count : count / c;
          steps(d, tile, step, part, at);
          step += part;
          count -= part;
          if (kFragments == 4 && chunk < left) fill.put(next, chunk);
        }
      }
    }
  }
};

// --- The kernel ------------------------------------------------------------------------------

// Registers for one block of 8 warps or two of 4; with half as many pixels, for twice as many.
template <typename Operand, int kFragments>
__global__ void __launch_bounds__(kMmaMaxThreads, 4 / kFragments)
    mma_fprop_kernel(const __grid_constant__ MmaParams p) {
  extern __shared__ __align__(128) unsigned char memory[];
  const MmaShared shared(p, memory);
  const MmaUnit unit(p);
  const MmaKind& kind = p.kind[unit.kind];
  float d[kFragments][Operand::kTiles][4];
  if (kind.step_end > kind.step_begin) {
    MmaStep* steps = reinterpret_cast<MmaStep*>(memory + p.steps_at);
    MmaStage* stages = reinterpret_cast<MmaStage*>(memory + p.stages_at);
    for (int i = threadIdx.x; i < kind.step_end - kind.step_begin; i += blockDim.x) {
      steps[i] = p.step[kind.step_begin + i];
    }
    for (int i = threadIdx.x; i < kind.stage_end - kind.stage_begin; i += blockDim.x) {
      stages[i] = p.stage[kind.stage_begin + i];
    }
    MmaRing::prepare(shared);
    __syncthreads();
    MmaRing ring(p, unit, kMmaTileBytes<Operand>);
    for (int i = 0; i < kMmaDepth - 1; ++i) ring.start(p, shared, i);
    MmaStore<Operand, kFragments>(p, shared, unit).list_columns();
    list_pixels(p, unit, shared);
    __syncthreads();
    MmaFill<Operand, kFragments> fill(p, shared, unit);
    fill.first_slice();
    MmaStore<Operand, kFragments>(p, shared, unit).begin(d);
    MmaLoop<Operand, kFragments>(p, shared, unit).run(d, fill, ring);
    __syncthreads();
  }
  MmaStore<Operand, kFragments>(p, shared, unit).run(d);
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
  const MmaColumn which = MmaColumn::of<Operand>(p, column);
  const int phase = which.phase, c = which.channel;
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
      Operand::split_rounded(word, packed[h], packed[2 + h]);
    } else {
      packed[h] = Operand::prepare(word);
    }
  }
}

}  // namespace upconv
