// Hopper kernel: depths and rows of the output that no tap reaches, which are the bias alone. They
// are no units of work, and written before the others by a kernel of their own: at the end of the
// main kernel they cost every layer registers (kb69 in BF16 0.84 -> 0.89 ms).
#pragma once

#include "sm90_layout.cuh"

namespace upconv {

// --- Rows without taps -----------------------------------------------------------------------

constexpr int kFillThreads = 256;
constexpr int kFillBytes = 16384;  // of a warp's task and more; what a task costs besides is hidden

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

// The bias of a channel, and as many of it as make 16 bytes.
template <typename Operand>
__device__ __forceinline__ uint4 bias_vector(const Sm90Params& p, int channel,
                                             typename Operand::Element* value) {
  using Element = typename Operand::Element;
  *value = p.bias ? static_cast<const Element*>(p.bias)[channel] : Operand::from_float(0.f);
  const VectorOf<sizeof(Element)> bits = *reinterpret_cast<VectorOf<sizeof(Element)>*>(value);
  const uint32_t word = sizeof(Element) == 4 ? bits : bits * 0x10001u;
  return make_uint4(word, word, word, word);
}

// Images and channels: `planes` of them have the same bias for all outputs.
__host__ __device__ inline int64_t fill_planes(const Sm90Params& p) {
  return static_cast<int64_t>(p.batch) * p.conv_groups * p.out_channels;
}

// Rows of a warp's task, those of a step and more, where rows are filled by themselves.
template <typename Operand>
__host__ __device__ inline int fill_height(const Sm90Params& p) {
  const int step = p.out_step_y / p.lanes;
  const int period = step * p.out_w * static_cast<int>(sizeof(typename Operand::Element));
  return step * ((kFillBytes + period - 1) / period);
}

// Tasks of one of those planes. Short rows share too many sectors with rows beside them that are
// written at another time (fill_first): there every output is filled.
template <typename Operand>
__host__ __device__ inline int64_t fill_pieces(const Sm90Params& p) {
  const int64_t size = static_cast<int64_t>(p.out_d) * p.out_h * p.out_w;
  const int64_t piece = kFillBytes / sizeof(typename Operand::Element);
  const int height = fill_height<Operand>(p);
  if (p.fill_first) return (size + piece - 1) / piece;
  return static_cast<int64_t>(p.out_d) * ((p.out_h + height - 1) / height);
}

template <typename Operand>
__global__ void sm90_fill(const __grid_constant__ Sm90Params p) {
  using Element = typename Operand::Element;
  constexpr int kPiece = kFillBytes / sizeof(Element);
  const int64_t task = static_cast<int64_t>(blockIdx.x) * (kFillThreads / 32) + threadIdx.x / 32;
  const int64_t pieces = fill_pieces<Operand>(p), plane = task / pieces;
  const int64_t size = static_cast<int64_t>(p.out_d) * p.out_h * p.out_w;
  if (plane >= fill_planes(p)) return;
  Element value;
  const int channel = static_cast<int>(plane % (p.conv_groups * p.out_channels));
  const uint4 vector = bias_vector<Operand>(p, channel, &value);
  Element* to = static_cast<Element*>(p.y) + plane * size;
  const int64_t piece = task - plane * pieces;
  if (p.fill_first) {
    const int64_t left = size - piece * kPiece;
    const int count = left < kPiece ? static_cast<int>(left) : kPiece;
    return fill_run(to + piece * kPiece, count, value, vector);
  }
  const int height = fill_height<Operand>(p), across = (p.out_h + height - 1) / height;
  const int z = static_cast<int>(piece / across);
  int y = static_cast<int>(piece - static_cast<int64_t>(z) * across) * height;
  const int end = min(y + height, p.out_h);
  to += (static_cast<int64_t>(z) * p.out_h + y) * p.out_w;
  if (p.fill_z >> z % p.out_step_z & 1) {
    return fill_run(to, (end - y) * p.out_w, value, vector);
  }
  const int step = p.out_step_y / p.lanes;
  for (int residue = 0; y < end; ++y, to += p.out_w) {
    if (p.fill_y >> residue & 1) fill_run(to, p.out_w, value, vector);
    residue = residue + 1 == step ? 0 : residue + 1;
  }
}

}  // namespace upconv
