// Hopper kernel for the weight's gradient: what a consumer warpgroup does with a chunk.
#pragma once

#include "sm90_wgrad_layout.cuh"
#include "wgmma_registers.cuh"

namespace upconv::wgrad {

// --- Consumers: main loop --------------------------------------------------------------------

// A run's operand in registers, four of them in a row for each instruction, as the tensor core
// takes them: channels g and g + 8, and two places along K. Neighbouring taps share what they can.
//
// Woven: a thread holds 8 neighbouring points and those to their right that the other taps meet.
// Instruction m of tap t needs points m + t and m + t + 4 (16-bit: words of two, m + t / 2 and
// m + t / 2 + 2): 7 sets serve 4 taps, not 16. Where a word holds both width phases of a point,
// `select` picks one, and `skew` moves the window by one point.
template <typename Operand, int T, bool kPairs, bool kWoven>
struct Window {
  static constexpr bool kTf32 = Shape<Operand, kPairs>::kElement == 4;
  static constexpr int kSteps = kTf32 ? 4 : 2;  // instructions that cover a unit of pixels
  static constexpr int kEven = kTf32 ? 4 + T - 1 : 2 + (T - 1) / 2;
  static constexpr int kOdd = kTf32 || T == 1 ? 0 : 2 + (T - 2) / 2;  // sets that start mid-word
  uint32_t a[kEven + kOdd][4];

  __device__ __forceinline__ void load(uint32_t base, uint32_t eight_channels, const int* pieces,
                                       int high) {
    constexpr int kPoints = (8 + T - 1 + 3) / 4 * 4;
    const uint32_t from = base + pieces[threadIdx.x % 4] * 4;
    const uint32_t select = high % 2 ? 0x7632 : 0x5410;
    const bool skew = kPairs && T > 1 && high >= 2;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t w[kPoints];
#pragma unroll
      for (int i = 0; i < kPoints; i += 4) {
        uint4 four;
        ptx::load_shared(four, from + half * eight_channels + 4 * i);
        w[i] = four.x, w[i + 1] = four.y, w[i + 2] = four.z, w[i + 3] = four.w;
      }
#pragma unroll
      for (int i = 0; i + 1 < kPoints; ++i) w[i] = skew ? w[i + 1] : w[i];
#pragma unroll
      for (int q = 0; q < kEven; ++q) {
        a[q][half] = kTf32 ? Operand::prepare(w[q]) : __byte_perm(w[2 * q], w[2 * q + 1], select);
        a[q][half + 2] =
            kTf32 ? Operand::prepare(w[q + 4]) : __byte_perm(w[2 * q + 4], w[2 * q + 5], select);
      }
#pragma unroll
      for (int q = 0; q < kOdd; ++q) {
        a[kEven + q][half] = __byte_perm(w[2 * q + 1], w[2 * q + 2], select);
        a[kEven + q][half + 2] = __byte_perm(w[2 * q + 5], w[2 * q + 6], select);
      }
    }
  }

  // The set of tap `t` for instruction `m`.
  __device__ __forceinline__ const uint32_t (&set(int m, int t) const)[4] {
    return a[kTf32 ? m + t : t % 2 == 0 ? m + t / 2 : kEven + m + t / 2];
  }
};

// Pixels in order: instruction m of tap t needs pixels 2 t' and 2 t' + 1, moved by t, of the
// 8-pixel pieces 2 m and 2 m + 1. An odd tap starts in the middle of a word.
template <typename Operand, int T>
struct Window<Operand, T, false, false> {
  static constexpr int kSteps = 2;
  static constexpr int kWords = 1 + T / 2;
  uint32_t a[2][T][4];

  __device__ __forceinline__ void load(uint32_t base, uint32_t eight_channels, const int* pieces,
                                       int) {
    const int4 piece = *reinterpret_cast<const int4*>(pieces);
    const int at[4] = {piece.x, piece.y, piece.z, piece.w};
    base += threadIdx.x % 4 * 4;
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t w[kWords];
#pragma unroll
        for (int k = 0; k < kWords; ++k)
          ptx::load_shared(w[k], base + half * eight_channels + at[i] * 2 + 4 * k);
#pragma unroll
        for (int t = 0; t < T; ++t)
          a[i / 2][t][half + i % 2 * 2] =
              t % 2 == 0 ? w[t / 2] : __byte_perm(w[t / 2], w[t / 2 + 1], 0x5432);
      }
  }

  __device__ __forceinline__ const uint32_t (&set(int m, int t) const)[4] { return a[m][t]; }
};

template <typename Operand, int N, int G, int T, bool kPairs>
struct Consumer {
  using Layout = Shape<Operand, kPairs>;
  using Runs = Window<Operand, T, kPairs, Layout::kWoven>;
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
  __device__ __forceinline__ void multiply(const uint32_t (&base)[G], const int* pieces,
                                           uint32_t tile) {
    constexpr int kLast = kFirst + kTogether < G ? kFirst + kTogether : G;
    constexpr int kVector = Layout::vector_step(N) / 16;
    const uint32_t eight = 8 * p.pitch * point_bytes(p);
    // From one instruction to the next, and from the first half of K to the second.
    constexpr int kStep = Layout::kWoven ? kVector : 2 * kVector;
    constexpr int kHalf = Layout::kWoven ? Layout::kVectors / 2 * kVector : kVector;
    Runs window[kTogether];
#pragma unroll
    for (int g = kFirst; g < kLast; ++g) {
      window[g - kFirst].load(base[g], eight, pieces, mine.group[g].high);
    }
    // K-major without swizzle: 8 channels are 128 bytes.
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
    if constexpr (kLast < G) multiply<kLast>(base, pieces, tile);
  }

  __device__ __forceinline__ void chunk() {
    uint32_t base[G];
#pragma unroll
    for (int g = 0; g < G; ++g) base[g] = window_base(mine.group[g]);
    uint32_t tile = shared.stages + slot.index * p.stage_bytes;
    const int* pieces = shared.pieces;
#pragma unroll 1
    for (int left = chunk_pixels(p); left > 0; left -= kUnit) {
      multiply<0>(base, pieces, tile);
      pieces += 4;
      tile += Layout::kVectors * Layout::vector_step(N);
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
