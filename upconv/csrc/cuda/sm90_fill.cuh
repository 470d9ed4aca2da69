// Hopper kernel: output rows that no tap reaches, which are the bias alone. They are no units of
// work: every warp of the block writes its share of them when it has nothing else to do.
#pragma once

#include "sm90_layout.cuh"

namespace upconv {

// --- Rows without taps -----------------------------------------------------------------------

constexpr int kFillRows = 4;  // lattice points of a task

// `count` neighbouring elements, by one warp: whole vectors from the first 16 bytes on.
template <typename Element>
__device__ __forceinline__ void fill_run(Element* to, int count, Element value, uint4 vector) {
  constexpr int kE = 16 / sizeof(Element);
  const int lane = threadIdx.x % 32;
  const int early = static_cast<int>(reinterpret_cast<uintptr_t>(to) / sizeof(Element)) & (kE - 1);
  const int head = min(count, (kE - early) & (kE - 1)), body = (count - head) / kE;
  const int tail = count - head - body * kE;
  uint4* vectors = reinterpret_cast<uint4*>(to + head);
  if (lane < head) __stcs(to + lane, value);
  for (int i = lane; i < body; i += 32) __stcs(vectors + i, vector);
  if (lane < tail) __stcs(to + count - tail + lane, value);
}

template <typename Operand>
__device__ __forceinline__ void fill_rows(const Sm90Params& p) {
  using Element = typename Operand::Element;
  if (!(p.fill_z | p.fill_y)) return;
  __syncwarp();  // the feeder is one thread of its warp
  const int step = p.out_step_y / p.lanes, channels = p.conv_groups * p.out_channels;
  const int tall = kFillRows * step, pieces = (p.out_h + tall - 1) / tall;
  const uint32_t tasks = static_cast<uint32_t>(p.batch) * channels * p.out_d * pieces;
  const uint32_t warps = gridDim.x * (kThreads / 32);
  for (uint32_t task = threadIdx.x / 32 * gridDim.x + blockIdx.x; task < tasks; task += warps) {
    const uint32_t plane = task / pieces, piece = task - plane * pieces;  // plane: of one depth
    const uint32_t image = plane / p.out_d, z = plane - image * p.out_d;
    Element value = Operand::from_float(0.f);
    if (p.bias) value = static_cast<const Element*>(p.bias)[image % channels];
    VectorOf<sizeof(Element)> bits = *reinterpret_cast<VectorOf<sizeof(Element)>*>(&value);
    const uint32_t word = sizeof(Element) == 4 ? bits : bits * 0x10001u;
    const uint4 vector = make_uint4(word, word, word, word);
    const bool whole = p.fill_z >> z % p.out_step_z & 1;
    Element* first = static_cast<Element*>(p.y) + static_cast<int64_t>(plane) * p.out_h * p.out_w;
    int y = piece * tall;
    const int end = min(y + tall, p.out_h);
    for (int residue = 0; y < end;) {
      int rows = 0;  // that lie together
      while (y + rows < end && (whole || p.fill_y >> residue & 1)) {
        ++rows;
        residue = residue + 1 == step ? 0 : residue + 1;
      }
      if (rows) fill_run(first + static_cast<int64_t>(y) * p.out_w, rows * p.out_w, value, vector);
      y += rows + 1;  // the one after them has taps
      residue = residue + 1 == step ? 0 : residue + 1;
    }
  }
}

}  // namespace upconv
