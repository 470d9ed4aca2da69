// Hopper kernel for the weight's gradient: what a consumer warpgroup does with a chunk.
#pragma once

#include "sm90_wgrad_layout.cuh"
#include "wgmma_registers.cuh"

namespace upconv::wgrad {

// --- Consumers: main loop --------------------------------------------------------------------

// A run's operand in registers: the 8 points of this thread and those to their right that the other
// taps of the run meet, for the two channels (g and g + 8) that the thread holds. The tensor core
// takes four registers in a row; instruction m of tap t needs points m + t and m + t + 4 (words of
// two pixels: m + t / 2 and m + t / 2 + 2), so that taps share them: 7 sets serve 4 taps, not 16.
template <typename Operand, int T, bool kPairs>
struct Window {
  static constexpr bool kTf32 = Shape<Operand>::kElement == 4;
  static constexpr int kSteps = kTf32 ? 4 : 2;  // instructions that cover a unit of pixels
  static constexpr int kEven = kTf32 ? 4 + T - 1 : 2 + (T - 1) / 2;
  static constexpr int kOdd = kTf32 || T == 1 ? 0 : 2 + (T - 2) / 2;  // sets that start mid-word
  uint32_t a[kEven + kOdd][4];

  // Registers that hold kPoints points in a row.
  template <int kRegisters>
  __device__ static __forceinline__ void load_row(uint32_t (&w)[kRegisters], uint32_t from) {
    if constexpr (kRegisters % 4 == 0 && (kTf32 || kPairs)) {
#pragma unroll
      for (int i = 0; i < kRegisters; i += 4) {
        uint4 four;
        ptx::load_shared(four, from + 4 * i);
        w[i] = four.x, w[i + 1] = four.y, w[i + 2] = four.z, w[i + 3] = four.w;
      }
    } else {
#pragma unroll
      for (int i = 0; i < kRegisters; i += 2) {
        uint2 two;
        ptx::load_shared(two, from + 4 * i);
        w[i] = two.x, w[i + 1] = two.y;
      }
    }
  }

  // `select` picks the width phase where a word holds both.
  __device__ __forceinline__ void load(uint32_t address, uint32_t eight_channels, uint32_t select) {
    constexpr int kPoints = (8 + T - 1 + 3) / 4 * 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t w[kTf32 || kPairs ? kPoints : kPoints / 2];
      load_row(w, address + half * eight_channels);
      if constexpr (kTf32) {
#pragma unroll
        for (int q = 0; q < kEven; ++q) {
          a[q][half] = Operand::prepare(w[q]);
          a[q][half + 2] = Operand::prepare(w[q + 4]);
        }
      } else {
#pragma unroll
        for (int q = 0; q < kEven; ++q) {
          a[q][half] = kPairs ? __byte_perm(w[2 * q], w[2 * q + 1], select) : w[q];
          a[q][half + 2] = kPairs ? __byte_perm(w[2 * q + 4], w[2 * q + 5], select) : w[q + 2];
        }
#pragma unroll
        for (int q = 0; q < kOdd; ++q) {
          a[kEven + q][half] = kPairs ? __byte_perm(w[2 * q + 1], w[2 * q + 2], select)
                                      : __byte_perm(w[q], w[q + 1], 0x5432);
          a[kEven + q][half + 2] = kPairs ? __byte_perm(w[2 * q + 5], w[2 * q + 6], select)
                                          : __byte_perm(w[q + 2], w[q + 3], 0x5432);
        }
      }
    }
  }

  // The set of tap `t` for instruction `m`.
  __device__ __forceinline__ const uint32_t (&set(int m, int t) const)[4] {
    return a[kTf32 ? m + t : t % 2 == 0 ? m + t / 2 : kEven + m + t / 2];
  }
};

template <typename Operand, int N, int G, int T, bool kPairs>
struct Consumer {
  using Runs = Window<Operand, T, kPairs>;
  static constexpr int kTogether = G < 2 ? G : 2;  // runs whose windows are in registers at once
  const WgradParams& p;
  const Shared& shared;
  const Share share;
  const WgradJob& job;
  const WgradConsumer& mine;
  float d[G][T][N / 2];
  Slot slot, release;
  int lead = 0;  // chunks seen and not given back

  __device__ __forceinline__ Consumer(const WgradParams& p, const Shared& shared, int c)
      : p(p), shared(shared), share(p), job(p.job[share.job]), mine(job.consumer[c]) {}

  // The chunk is read; the one `extra_rows` before it is not needed any more.
  __device__ __forceinline__ void next_chunk() {
    slot.advance(p);
    if (lead < job.extra_rows) {
      ++lead;
      return;
    }
    if (threadIdx.x % 128 == 0) ptx::barrier_arrive(shared.empty + 8 * release.index);
    __syncwarp();
    release.advance(p);
  }

  // Shared address of this thread's first window row of a run.
  __device__ __forceinline__ uint32_t window_base(const WgradGroup& group) const {
    const int thread = threadIdx.x % 128;
    const int channel = thread / 32 * 16 + thread % 32 / 4;
    int stage = slot.index - group.back;
    if (stage < 0) stage += p.stages;
    return shared.stages + stage * p.stage_bytes + p.input_bytes + group.plane * p.plane_bytes +
           (channel * p.pitch + group.offset) * point_bytes(p);
  }

  // The products of one unit of pixels with `kTogether` runs from the first-th on.
  template <int kFirst>
  __device__ __forceinline__ void multiply(const uint32_t (&base)[G], uint32_t piece,
                                           uint32_t tile) {
    constexpr int kLast = kFirst + kTogether < G ? kFirst + kTogether : G;
    constexpr int kStep = Shape<Operand>::vector_step(N) / 16;
    const uint32_t eight = 8 * p.pitch * point_bytes(p);
    constexpr int kHalf = Shape<Operand>::kVectors / 2 * kStep;
    Runs window[kTogether];
#pragma unroll
    for (int g = kFirst; g < kLast; ++g) {
      window[g - kFirst].load(base[g] + piece, eight, mine.group[g].high ? 0x7632 : 0x5410);
    }
    // K-major without swizzle: 8 channels are 128 bytes, the second half of K half a unit further.
    const uint64_t b = static_cast<uint64_t>(128 >> 4) << 32 | kHalf << 16 | tile >> 4;
    ptx::wgmma_fence();
#pragma unroll
    for (int m = 0; m < Runs::kSteps; ++m)
#pragma unroll
      for (int g = kFirst; g < kLast; ++g)
#pragma unroll
        for (int t = 0; t < T; ++t)
          WgmmaRegisters<Operand, N>::run(d[g][t], window[g - kFirst].set(m, t), b + m * kStep);
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    if constexpr (kLast < G) multiply<kLast>(base, piece, tile);
  }

  __device__ __forceinline__ void chunk() {
    uint32_t base[G];
#pragma unroll
    for (int g = 0; g < G; ++g) base[g] = window_base(mine.group[g]);
    uint32_t tile = shared.stages + slot.index * p.stage_bytes;
    const int* piece = shared.pieces + threadIdx.x % 4;
#pragma unroll 1
    for (int left = chunk_pixels(p); left > 0; left -= kUnit) {
      multiply<0>(base, *piece * point_bytes(p), tile);
      piece += 4;
      tile += Shape<Operand>::kVectors * Shape<Operand>::vector_step(N);
    }
  }

  __device__ __forceinline__ void walk() {
    for (int index = share.first; index < share.end; ++index) {
      const Unit unit(p, index);
#pragma unroll 1
      for (int i = 0; i < job.extra_rows; ++i) {
        ptx::barrier_wait(shared.full + 8 * slot.index, slot.parity);
        next_chunk();
      }
#pragma unroll 1
      for (int i = 0; i < unit.rows; ++i) {
        ptx::barrier_wait(shared.full + 8 * slot.index, slot.parity);
        chunk();
        next_chunk();
      }
    }
  }

  // A warpgroup without taps only passes the chunks on.
  __device__ __forceinline__ void idle() {
    for (int index = share.first; index < share.end; ++index) {
      const Unit unit(p, index);
#pragma unroll 1
      for (int i = 0; i < job.extra_rows + unit.rows; ++i) {
        ptx::barrier_wait(shared.full + 8 * slot.index, slot.parity);
        next_chunk();
      }
    }
  }

  // --- Epilogue ------------------------------------------------------------------------------

  __device__ __forceinline__ void run(int c) {
    if (!mine.active) return idle();
#pragma unroll
    for (int g = 0; g < G; ++g)
#pragma unroll
      for (int t = 0; t < T; ++t)
#pragma unroll
        for (int i = 0; i < N / 2; ++i) d[g][t][i] = 0.f;
    walk();
    constexpr int kSums = G * T * (N / 2);
    float* target = p.workspace +
                    (static_cast<int64_t>(blockIdx.x) * p.consumers + c) * kSums * 128 +
                    threadIdx.x % 128;
#pragma unroll
    for (int g = 0; g < G; ++g)
#pragma unroll
      for (int t = 0; t < T; ++t)
#pragma unroll
        for (int i = 0; i < N / 2; ++i) target[((g * T + t) * (N / 2) + i) * 128] = d[g][t][i];
  }
};

}  // namespace upconv::wgrad
