// Hopper kernel for the weight's gradient: what a consumer warpgroup does with a chunk.
#pragma once

#include <type_traits>

#include "sm90_wgrad_odd.cuh"
#include "sm90_wgrad_windows.cuh"
#include "wgmma_registers.cuh"

namespace upconv::wgrad {

// --- Consumers: main loop --------------------------------------------------------------------

// Of grad_output that the TMA has brought: rounded already.
template <typename Operand>
struct Boxed : Operand {
  static __device__ __forceinline__ uint32_t prepare(uint32_t bits) { return bits; }
};

template <typename Operand, int N, int G, int T, bool kPairs, int kOdd, bool kBoxed>
struct Consumer {
  using Layout = Shape<Operand, kPairs, T>;
  using Read = std::conditional_t<kBoxed, Boxed<Operand>, Operand>;
  using Runs =
      std::conditional_t<(kOdd > 0), OddWindow<T, kOdd>, Window<Read, T, kPairs, Layout::kElement>>;
  // Where a window begins: its address and skew. Of odd rows every row begins at a place of its
  // own.
  using Base = std::conditional_t<(kOdd > 0), OddBase, uint32_t>;
  // Runs whose windows are in registers at once: 64 registers beside 128 sums are too many.
  static constexpr int kTogether = G < 2 || sizeof(Runs) > 112 ? 1 : 2;
  // Windows of 16-bit pixels in order begin with any word, all others with 16 bytes.
  static constexpr bool kInOrder = !kPairs && Layout::kElement == 2;
  static constexpr uint32_t kSkew = kInOrder ? 1 : 3, kPacked = kInOrder ? 4 : 16;
  static constexpr uint32_t kVectorPoints = kSkew + 1;
  const WgradParams& p;
  const Shared& shared;
  const Share share;
  float d[G][T][N / 2];
  // Registers are short: where a run's first window lies in a stage (18 bits, of which the lowest
  // are zero), its skew and high in those, above it its chunks back (4 bits), plane (3) and how
  // much later its class of channels begins than the first (3).
  uint32_t place[G];
  Slot slot;  // and the job's extra rows

  __device__ __forceinline__ Consumer(const WgradParams& p, const Shared& shared, int c)
      : p(p),
        shared(shared),
        share(p),
        slot(ptx::pinned(static_cast<int>(p.job[share.job].extra_rows))) {
    const int thread = ptx::this_thread() % 128;
#pragma unroll
    for (int g = 0; g < G; ++g) {
      const WgradRun& run = p.job[share.job].run[c * G + g][thread / 32];
      const int row = run.channel % kRows + thread % 32 / 4;
      const uint32_t address = shared.stages + p.input_bytes + run.plane * p.plane_bytes +
                               (row * p.pitch + run.offset) * point_bytes(p);
      // Rows of a warp are of one class. Points, of which every 16 bytes begin anew.
      const int later = run.channel % kRows / class_rows(p) * volume_points(p);
      uint32_t all = (later & (vector_points(p) - 1)) << 25;
      if constexpr (kOdd > 0) all = OddBase::later(p, row) << 25 | OddBase::later(p, row + 8) << 28;
      place[g] =
          ptx::pinned(address | run.skew | run.high << 2 | run.back << 18 | run.plane << 22 | all);
    }
  }

  // Has any run all T taps?
  __device__ static __forceinline__ bool full_runs(const WgradJob& job, int c) {
    bool full = false;
    for (int g = 0; g < G; ++g)
      for (int warp = 0; warp < kWgradWarps; ++warp) full |= job.run[c * G + g][warp].count == T;
    return full;
  }

  // `back` chunks before the present one.
  __device__ __forceinline__ int stage_before(int back) const {
    const int stage = slot.index() - back;
    return stage < 0 ? stage + p.stages : stage;
  }

  // The chunk is read; the one `extra_rows` before it is not needed any more.
  __device__ __forceinline__ void next_chunk() {
    if (ptx::this_thread() % 128 == 0)
      ptx::barrier_arrive(shared.empty + 8 * stage_before(slot.kept()));
    __syncwarp();
    slot.advance(p.stages);
  }

  // Chunks before the unit's first input row has all its plane rows. Before the very first there is
  // none to give back. No product keeps the warps together here: they wait for each other, or one
  // could sleep through two phases of a barrier.
  __device__ __forceinline__ void skip_extra_rows(bool first) {
#pragma unroll 1
    for (int i = 0; i < slot.kept(); ++i) {
      ptx::barrier_wait(shared.full + 8 * slot.index(), slot.parity());
      ptx::warpgroup_sync(1 + ptx::this_thread() / 128);  // the producers have barrier 1
      if (first) {
        slot.advance(p.stages);
      } else {
        next_chunk();
      }
    }
  }

  // The windows of runs kFirst to kLast - 1. With one tap for each of both width phases of stride 2
  // (kernel = stride) two runs read the same words: once.
  template <int kFirst, int kLast>
  __device__ __forceinline__ void load_windows(Runs (&window)[kTogether], const Base (&base)[G],
                                               uint32_t eight, typename Runs::Piece piece,
                                               int part) const {
    if constexpr (kOdd > 0) {
#pragma unroll
      for (int g = kFirst; g < kLast; ++g) window[g - kFirst].load(base[g], piece);
    } else {
      load_even<kFirst, kLast>(window, base, eight, piece, part);
    }
  }

  template <int kFirst, int kLast>
  __device__ __forceinline__ void load_even(Runs (&window)[kTogether], const uint32_t (&base)[G],
                                            uint32_t eight, typename Runs::Piece piece,
                                            int part) const {
    if constexpr (kPairs && T == 1 && kLast - kFirst == 2) {
      // Both in the same words: TF32 as neighbouring points, 16-bit types as halves of a point.
      const uint32_t from = min(base[kFirst], base[kFirst + 1]);
      const uint32_t first = base[kFirst] - from, second = base[kFirst + 1] - from;
      const bool together =
          Layout::kElement == 4 ? first + second == 1 && from % 2 == 0 : first + second == 0;
      if (together) {
        const bool small = Layout::kElement == 2;
        return window[0].template load_runs<true>(from & ~(kPacked - 1), eight, piece, from & kSkew,
                                                  small ? place[kFirst] >> 2 & 3 : first, window[1],
                                                  small ? place[kFirst + 1] >> 2 & 3 : second);
      }
    }
#pragma unroll
    for (int g = kFirst; g < kLast; ++g)
      window[g - kFirst].load(base[g] & ~(kPacked - 1), eight, piece, part, base[g] & kSkew,
                              place[g] >> 2 & 3);
  }

  // The products of one unit of pixels with `kTaps` taps of `kTogether` runs, from the first-th on;
  // `base` holds their windows' addresses and skews.
  template <int kTaps, int kFirst>
  __device__ __forceinline__ void multiply(const Base (&base)[G], uint32_t eight,
                                           typename Runs::Piece piece, uint32_t tile) {
    constexpr int kLast = kFirst + kTogether < G ? kFirst + kTogether : G;
    const uint32_t first = p.operand_low | tile >> 4;
#pragma unroll
    for (int part = 0; part < Runs::kSteps / Runs::kTogether; ++part) {
      Runs window[kTogether];
      load_windows<kFirst, kLast>(window, base, eight, piece, part);
      ptx::wgmma_fence();
#pragma unroll
      for (int m = 0; m < Runs::kTogether; ++m) {
        // K-major. Only the lower half ever changes.
        const int step = part * Runs::kTogether + m;
        const uint64_t b = static_cast<uint64_t>(p.operand_high) << 32 |
                           (first + step % 2 * p.operand_one + step / 2 * p.operand_two);
#pragma unroll
        for (int g = kFirst; g < kLast; ++g)
#pragma unroll
          for (int t = 0; t < kTaps; ++t)
            WgmmaRegisters<Operand, N>::run(d[g][t], window[g - kFirst].set(m, t), b);
      }
      ptx::wgmma_commit();
      ptx::wgmma_wait<0>();
    }
    if constexpr (kLast < G) multiply<kTaps, kLast>(base, eight, piece, tile);
  }

  __device__ __forceinline__ uint32_t even_base(uint32_t packed, int stage) const {
    uint32_t base = (packed & (0x3ffff - (kPacked - 1) + kSkew)) + stage * p.stage_bytes;
    if (p.flat) {
      unsigned short late;
      ptx::load_shared(late, shared.late_at(stage, packed >> 22 & 7));
      const uint32_t later = late + (packed >> 25);
      const uint32_t points = (packed & kSkew) + (later & (vector_points(p) - 1));
      base += points / kVectorPoints * kPacked + points % kVectorPoints - (packed & kSkew);
    }
    return base;
  }

  template <int kTaps>
  __device__ __forceinline__ void chunk(uint32_t eight) {
    Base base[G];
#pragma unroll
    for (int g = 0; g < G; ++g) {
      const uint32_t packed = ptx::computed_here(place[g]);
      const int stage = stage_before(packed >> 18 & 15);
      if constexpr (kOdd > 0) {
        unsigned short late;
        ptx::load_shared(late, shared.late_at(stage, packed >> 22 & 7));
        base[g] = OddBase(p, packed, stage * p.stage_bytes, late,
                          ptx::this_thread() % 4 * 4 * Runs::kSpread);
      } else {
        base[g] = even_base(packed, stage);
      }
    }
    const uint32_t tile = shared.stages + slot.index() * p.stage_bytes;
#pragma unroll 1
    for (uint32_t unit = 0; (unit + 1) * kUnit <= chunk_pixels(p); ++unit) {
      const uint32_t here = ptx::computed_here(unit);
      const typename Runs::Piece piece = Runs::piece(shared.pieces + 4 * here);
      multiply<kTaps, 0>(base, eight, piece, tile + unit_at(here));
    }
  }

  // Where a unit of the input begins. Two units of 16-bit pixels share a slab of 128 bytes.
  __device__ __forceinline__ uint32_t unit_at(uint32_t unit) const {
    constexpr uint32_t kCopied = Layout::kVectors * Layout::vector_step(N);
    constexpr uint32_t kRow = kUnit * Layout::kElement;
    if (!slabs(p)) return unit * kCopied;
    if (kRow == 128 || p.slab < 128) return unit * N * kRow;
    return unit / 2 * N * 2 * kRow + unit % 2 * kRow;
  }

  template <int kTaps>
  __device__ __forceinline__ void walk() {
    const uint32_t eight = kOdd ? 0 : ptx::pinned(8 * p.pitch * point_bytes(p));
    for (int from = share.first; from < share.end;) {
      const Unit unit(p, from, share.end);
      skip_extra_rows(from == share.first);
      from += unit.rows;
#pragma unroll 1
      for (int left = unit.rows; left > 0; --left) {
        ptx::barrier_wait(shared.full + 8 * slot.index(), slot.parity());
        chunk<kTaps>(eight);
        next_chunk();
      }
    }
  }

  // A warpgroup without taps only passes the chunks on, for which one thread is enough.
  __device__ __forceinline__ void idle() {
    if (ptx::this_thread() % 128 != 0) return;
    for (int from = share.first; from < share.end;) {
      const Unit unit(p, from, share.end);
#pragma unroll 1
      for (int i = 0; i < slot.kept() + unit.rows; ++i) {
        ptx::barrier_wait(shared.full + 8 * slot.index(), slot.parity());
        if (i >= slot.kept() || from != share.first)
          ptx::barrier_arrive(shared.empty + 8 * stage_before(slot.kept()));
        slot.advance(p.stages);
      }
      from += unit.rows;
    }
  }

  // --- Epilogue ------------------------------------------------------------------------------

  __device__ __forceinline__ void run(int c) {
    if (c >= p.job[share.job].consumers) return idle();
#pragma unroll
    for (int g = 0; g < G; ++g)
#pragma unroll
      for (int t = 0; t < T; ++t)
#pragma unroll
        for (int i = 0; i < N / 2; ++i) d[g][t][i] = 0.f;
    if (full_runs(p.job[share.job], c)) {
      walk<T>();
    } else {
      walk<(T > 1 ? T - 1 : 1)>();
    }
    constexpr int kSums = G * T * (N / 2);
    float* target = p.workspace +
                    (static_cast<int64_t>(blockIdx.x) * p.consumers + c) * kSums * 128 +
                    ptx::this_thread() % 128;
#pragma unroll
    for (int g = 0; g < G; ++g)
#pragma unroll
      for (int t = 0; t < T; ++t)
#pragma unroll
        for (int i = 0; i < N / 2; ++i) target[((g * T + t) * (N / 2) + i) * 128] = d[g][t][i];
  }
};

}  // namespace upconv::wgrad
