// Hopper kernel for the weight's gradient: what a consumer warpgroup does with a chunk.
#pragma once

#include <type_traits>

#include "sm90_wgrad_layout.cuh"
#include "wgmma_registers.cuh"

namespace upconv::wgrad {

// --- Consumers: windows ----------------------------------------------------------------------

// A run's operand in registers, four of them in a row for each instruction, as the tensor core
// takes them: channels g and g + 8, and two places along K. Neighbouring taps share what they can.
//
// `part` counts the batches of `kTogether` instructions in which a unit of pixels is multiplied,
// `piece` says where this thread's pixels lie in a row of the plane.
template <typename Operand, int T, bool kPairs, int kElement>
struct Window;

__device__ __forceinline__ void load_four(uint32_t* words, uint32_t address) {
  uint4 four;
  ptx::load_shared(four, address);
  words[0] = four.x, words[1] = four.y, words[2] = four.z, words[3] = four.w;
}

// TF32: a thread holds 8 neighbouring pixels and those to their right that the other taps meet.
// Instruction m of tap t needs points m + t and m + t + 4: 7 sets serve 4 taps, not 16.
template <typename Operand, int T>
struct Window<Operand, T, false, 4> {
  using Piece = int;
  static constexpr int kSteps = 4, kTogether = 4;  // instructions that cover a unit of pixels
  static constexpr int kSets = 3 + T;
  uint32_t a[kSets][4];

  __device__ static __forceinline__ Piece piece(const int* pieces) {
    return pieces[threadIdx.x % 4] * 4;
  }

  template <int kSkew>
  __device__ __forceinline__ void load_at(uint32_t from, uint32_t eight_channels) {
    constexpr int kPoints = (kSkew + 4 + kSets + 3) / 4 * 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t w[kPoints];
#pragma unroll
      for (int i = 0; i < kPoints; i += 4) load_four(w + i, from + half * eight_channels + 4 * i);
#pragma unroll
      for (int q = 0; q < kSets; ++q) {
        a[q][half] = Operand::prepare(w[kSkew + q]);
        a[q][half + 2] = Operand::prepare(w[kSkew + q + 4]);
      }
    }
  }

  __device__ __forceinline__ void load(uint32_t base, uint32_t eight_channels, Piece piece, int,
                                       int skew, int) {
    // Copies start at multiples of 16 bytes, windows are read in vectors: the rest is done here.
    const uint32_t from = base + piece;
    if (skew == 0) return load_at<0>(from, eight_channels);
    if (skew == 1) return load_at<1>(from, eight_channels);
    if (skew == 2) return load_at<2>(from, eight_channels);
    load_at<3>(from, eight_channels);
  }

  // The set of tap `t` for instruction `m` of a part.
  __device__ __forceinline__ const uint32_t (&set(int m, int t) const)[4] { return a[m + t]; }
};

// TF32 with both width phases in the plane, two points a pixel: a thread holds 4 pixels of either
// half of the unit, so that four threads read 32 words in a row (8 pixels, 16 points, would meet in
// the same banks). Instruction m of tap t needs points 2 m + t of both. All 10 sets of 4 taps leave
// no room beside 128 accumulators, and so the unit goes in two parts.
template <typename Operand, int T>
struct Window<Operand, T, true, 4> {
  using Piece = int2;
  static constexpr int kSteps = 4, kTogether = T > 2 ? 2 : 4;
  static constexpr int kSets = (kTogether - 1) * 2 + T;
  uint32_t a[kSets][4];

  __device__ static __forceinline__ Piece piece(const int* pieces) {
    const int t = threadIdx.x % 4, inside = t % 2 * 8;
    return {(pieces[t / 2] + inside) * 4, (pieces[2 + t / 2] + inside) * 4};
  }

  template <int kSkew>
  __device__ __forceinline__ void load_at(uint32_t base, uint32_t eight_channels, Piece piece) {
    constexpr int kPoints = (kSkew + kSets + 3) / 4 * 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t row = base + half * eight_channels;
      uint32_t low[kPoints], high[kPoints];
#pragma unroll
      for (int i = 0; i < kPoints; i += 4) {
        load_four(low + i, row + piece.x + 4 * i);
        load_four(high + i, row + piece.y + 4 * i);
      }
#pragma unroll
      for (int q = 0; q < kSets; ++q) {
        a[q][half] = Operand::prepare(low[kSkew + q]);
        a[q][half + 2] = Operand::prepare(high[kSkew + q]);
      }
    }
  }

  __device__ __forceinline__ void load(uint32_t base, uint32_t eight_channels, Piece piece,
                                       int part, int skew, int) {
    base += part * kTogether * 2 * 4;
    if (skew == 0) return load_at<0>(base, eight_channels, piece);
    if (skew == 1) return load_at<1>(base, eight_channels, piece);
    if (skew == 2) return load_at<2>(base, eight_channels, piece);
    load_at<3>(base, eight_channels, piece);
  }

  __device__ __forceinline__ const uint32_t (&set(int m, int t) const)[4] { return a[2 * m + t]; }
};

// 16-bit types, a word for each point, of which `high` picks one half: 0 or 1, or by turns (odd
// strides) from the first (2) or second (3) half on. Words of two pixels, m + t / 2 and m + t / 2 +
// 2 for instruction m; an odd tap starts in mid-word.
template <typename Operand, int T>
struct Window<Operand, T, true, 2> {
  using Piece = int;
  static constexpr int kSteps = 2, kTogether = 2;
  static constexpr int kEven = 2 + (T - 1) / 2;
  static constexpr int kOdd = T == 1 ? 0 : 2 + (T - 2) / 2;
  uint32_t a[kEven + kOdd][4];

  __device__ static __forceinline__ Piece piece(const int* pieces) {
    return pieces[threadIdx.x % 4] * 4;
  }

  // From the words `w` of eight channels, of which the run's first is the first.
  __device__ __forceinline__ void take(const uint32_t* w, int half, int high) {
    const uint32_t turn = high == 2 ? 0x7610 : 0x5432, other = high == 2 ? 0x5432 : 0x7610;
    const uint32_t same = high == 1 ? 0x7632 : 0x5410;
    const uint32_t even = high >= 2 ? turn : same, odd = high >= 2 ? other : same;
    const auto two = [&](int i) { return __byte_perm(w[i], w[i + 1], i % 2 == 0 ? even : odd); };
#pragma unroll
    for (int q = 0; q < kEven; ++q) a[q][half] = two(2 * q), a[q][half + 2] = two(2 * q + 4);
#pragma unroll
    for (int q = 0; q < kOdd; ++q)
      a[kEven + q][half] = two(2 * q + 1), a[kEven + q][half + 2] = two(2 * q + 5);
  }

  // With `kTwo` also for another run that finds its points in the same words.
  template <int kSkew, bool kTwo>
  __device__ __forceinline__ void load_at(uint32_t from, uint32_t eight_channels, int high,
                                          Window& second, int second_high) {
    constexpr int kPoints = (kSkew + 8 + T - 1 + 3) / 4 * 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t w[kPoints];
#pragma unroll
      for (int i = 0; i < kPoints; i += 4) load_four(w + i, from + half * eight_channels + 4 * i);
      take(w + kSkew, half, high);
      if constexpr (kTwo) second.take(w + kSkew, half, second_high);
    }
  }

  template <bool kTwo>
  __device__ __forceinline__ void load_runs(uint32_t base, uint32_t eight_channels, Piece piece,
                                            int skew, int high, Window& second, int second_high) {
    const uint32_t from = base + piece;
    if (skew == 0) return load_at<0, kTwo>(from, eight_channels, high, second, second_high);
    if (skew == 1) return load_at<1, kTwo>(from, eight_channels, high, second, second_high);
    if (skew == 2) return load_at<2, kTwo>(from, eight_channels, high, second, second_high);
    load_at<3, kTwo>(from, eight_channels, high, second, second_high);
  }

  __device__ __forceinline__ void load(uint32_t base, uint32_t eight_channels, Piece piece, int,
                                       int skew, int high) {
    load_runs<false>(base, eight_channels, piece, skew, high, *this, 0);
  }

  __device__ __forceinline__ const uint32_t (&set(int m, int t) const)[4] {
    return a[t % 2 == 0 ? m + t / 2 : kEven + m + t / 2];
  }
};

// 16-bit pixels in order: instruction m of tap t needs pixels 2 t' and 2 t' + 1, moved by t, of the
// 8-pixel pieces 2 m and 2 m + 1. A tap that starts in the middle of a word takes two halves.
template <typename Operand, int T>
struct Window<Operand, T, false, 2> {
  using Piece = int4;
  static constexpr int kSteps = 2, kTogether = 2;
  uint32_t a[2][T][4];

  __device__ static __forceinline__ Piece piece(const int* pieces) {
    return *reinterpret_cast<const int4*>(pieces);
  }

  // Whether the first tap starts in mid-word: known here (0 or 1), or (2) by `even` and `odd`.
  template <int kSkew>
  __device__ __forceinline__ void load_at(uint32_t base, uint32_t eight_channels, Piece piece,
                                          uint32_t even = 0, uint32_t odd = 0) {
    constexpr int kWords = kSkew == 2 ? 1 + (T + 1) / 2 : (kSkew + T + 2) / 2;
    const int at[4] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t w[kWords];
#pragma unroll
        for (int k = 0; k < kWords; ++k)
          ptx::load_shared(w[k], base + half * eight_channels + at[i] * 2 + 4 * k);
#pragma unroll
        for (int t = 0; t < T; ++t) {
          const int first = kSkew == 2 ? t / 2 : (t + kSkew) / 2;
          uint32_t& to = a[i / 2][t][half + i % 2 * 2];
          if constexpr (kSkew == 2) {
            to = __byte_perm(w[first], w[first + 1], t % 2 == 0 ? even : odd);
          } else {
            to = (t + kSkew) % 2 == 0 ? w[first] : __byte_perm(w[first], w[first + 1], 0x5432);
          }
        }
      }
  }

  // With an odd number of taps the branch saves a word of two or three (kb69 1.20 -> 1.00 ms), with
  // 4 some registers (kb71 0.45 -> 0.37). With 2 it cost 6 to 10 %.
  __device__ __forceinline__ void load(uint32_t base, uint32_t eight_channels, Piece piece, int,
                                       int skew, int) {
    base += threadIdx.x % 4 * 4;
    if constexpr (T == 2) {
      const uint32_t even = skew ? 0x5432 : 0x3210, odd = skew ? 0x7654 : 0x5432;
      return load_at<2>(base, eight_channels, piece, even, odd);
    } else {
      if (skew == 0) return load_at<0>(base, eight_channels, piece);
      load_at<1>(base, eight_channels, piece);
    }
  }

  __device__ __forceinline__ const uint32_t (&set(int m, int t) const)[4] { return a[m][t]; }
};

// --- Consumers: main loop --------------------------------------------------------------------

// Of grad_output that the TMA has brought: rounded already.
template <typename Operand>
struct Boxed : Operand {
  static __device__ __forceinline__ uint32_t prepare(uint32_t bits) { return bits; }
};

template <typename Operand, int N, int G, int T, bool kPairs, bool kBoxed>
struct Consumer {
  using Layout = Shape<Operand, kPairs>;
  using Read = std::conditional_t<kBoxed, Boxed<Operand>, Operand>;
  using Runs = Window<Read, T, kPairs, Layout::kElement>;
  // Runs whose windows are in registers at once: 64 registers beside 128 sums are too many.
  static constexpr int kTogether = G < 2 || sizeof(Runs) > 112 ? 1 : 2;
  // Windows of 16-bit pixels in order begin with any word, all others with 16 bytes.
  static constexpr uint32_t kSkew = Layout::kWoven ? 3 : 1, kPacked = Layout::kWoven ? 16 : 4;
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
    const int thread = threadIdx.x % 128;
#pragma unroll
    for (int g = 0; g < G; ++g) {
      const WgradRun& run = p.job[share.job].run[c * G + g][thread / 32];
      const int row = run.channel % kRows + thread % 32 / 4;
      const uint32_t address = shared.stages + p.input_bytes + run.plane * p.plane_bytes +
                               (row * p.pitch + run.offset) * point_bytes(p);
      // Rows of a warp are of one class. Points, of which every 16 bytes begin anew.
      const int later = run.channel % kRows / class_rows(p) * volume_points(p);
      place[g] = ptx::pinned(address | run.skew | run.high << 2 | run.back << 18 | run.plane << 22 |
                             (later & (16 / point_bytes(p) - 1)) << 25);
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
    if (threadIdx.x % 128 == 0) ptx::barrier_arrive(shared.empty + 8 * stage_before(slot.kept()));
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
      ptx::warpgroup_sync(1 + threadIdx.x / 128);  // the producers have barrier 1
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
  __device__ __forceinline__ void load_windows(Runs (&window)[kTogether], const uint32_t (&base)[G],
                                               uint32_t eight, typename Runs::Piece piece,
                                               int part) const {
    if constexpr (kPairs && Layout::kElement == 2 && T == 1 && kLast - kFirst == 2) {
      if (base[kFirst] == base[kFirst + 1]) {
        return window[0].template load_runs<true>(base[kFirst] & ~(kPacked - 1), eight, piece,
                                                  base[kFirst] & kSkew, place[kFirst] >> 2 & 3,
                                                  window[1], place[kFirst + 1] >> 2 & 3);
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
  __device__ __forceinline__ void multiply(const uint32_t (&base)[G], uint32_t eight,
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

  template <int kTaps>
  __device__ __forceinline__ void chunk(uint32_t eight) {
    uint32_t base[G];
#pragma unroll
    for (int g = 0; g < G; ++g) {
      const uint32_t packed = ptx::computed_here(place[g]);
      const int stage = stage_before(packed >> 18 & 15);
      base[g] = (packed & (0x3ffff - (kPacked - 1) + kSkew)) + stage * p.stage_bytes;
      if (p.flat) {
        unsigned short late;
        ptx::load_shared(late, shared.late_at(stage, packed >> 22 & 7));
        const uint32_t later = late + (packed >> 25);
        const uint32_t points = (packed & kSkew) + (later & (16 / point_bytes(p) - 1));
        base[g] += points / kVectorPoints * kPacked + points % kVectorPoints - (packed & kSkew);
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
    const uint32_t eight = ptx::pinned(8 * p.pitch * point_bytes(p));
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
    if (threadIdx.x % 128 != 0) return;
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
