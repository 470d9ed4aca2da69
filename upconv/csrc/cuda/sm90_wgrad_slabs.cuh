// Hopper kernel for the weight's gradient: input that the TMA has brought, in the order in which
// the taps share registers.
#pragma once

#include "sm90_wgrad_layout.cuh"

namespace upconv::wgrad {

// --- Weaving ---------------------------------------------------------------------------------

// A step of WGMMA takes vectors m and m + V / 2 of a unit's V vectors; in a slab they are
// neighbours.
template <int kVectors>
__host__ __device__ constexpr int slot_of(int vector) {
  return vector % (kVectors / 2) * 2 + vector / (kVectors / 2);
}

__device__ __forceinline__ void load_words(uint32_t (&words)[4], uint32_t address) {
  uint4 four;
  ptx::load_shared(four, address);
  words[0] = four.x, words[1] = four.y, words[2] = four.z, words[3] = four.w;
}

// A channel's pixels of one unit.
struct Row {
  const WgradParams& p;
  uint32_t stage;
  int along, channel;

  __device__ __forceinline__ uint32_t place(int vector) const {
    return stage + slab_place(p, along + vector * 16, channel);
  }
};

// Turns `kSquares` squares of 4 x 4 words around: all are read before any is written. A square has
// 4 vectors, `kStep` apart from `kFirst` on: with 2, the other one of each pair is the next
// square's.
template <int kVectors, int kSquares, int kFirst, int kStep>
__device__ __forceinline__ void turn(Row row) {
  uint32_t v[kSquares][4][4];
#pragma unroll
  for (int s = 0; s < kSquares; ++s)
#pragma unroll
    for (int t = 0; t < 4; ++t) load_words(v[s][t], row.place(kFirst + 4 * s + t * kStep));
  row.along = ptx::computed_here(row.along);  // places are computed anew: registers are short
#pragma unroll
  for (int s = 0; s < kSquares; ++s)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int vector = (kStep == 2 ? 4 * kFirst : 4 * s) + e;
      ptx::store_shared(row.place(slot_of<kVectors>(vector)),
                        uint4{v[s][0][e], v[s][1][e], v[s][2][e], v[s][3][e]});
    }
}

// The rows of a chunk, one after the other, each by one thread. Lanes side by side have channels
// side by side, which the swizzle spreads over the banks.
template <typename Operand, int N, bool kPairs, int T>
__device__ __forceinline__ void weave_slabs(const WgradParams& p, uint32_t stage) {
  constexpr int kVectors = Shape<Operand, kPairs, T>::kVectors;
  const int rows = chunk_pixels(p) / kUnit * N;
#pragma unroll 1
  for (int item = ptx::this_thread(); item < rows; item += kProducers) {
    const int unit = item / N;
    const Row row{p, stage, unit * kVectors * 16, item - unit * N};
    if constexpr (kVectors == 4) {
      turn<4, 1, 0, 1>(row);
    } else if constexpr (kPairs) {
      turn<8, 2, 0, 1>(row);
    } else {
      turn<8, 1, 0, 2>(row);
      turn<8, 1, 1, 2>(row);
    }
  }
}

}  // namespace upconv::wgrad
