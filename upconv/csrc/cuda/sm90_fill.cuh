// Hopper kernel: output rows that no tap reaches, which are the bias alone. They are no units of
// work: every warp of the block writes its share of them when it has nothing else to do. Short rows
// share too many sectors with their neighbours for that: there the whole output is filled before.
#pragma once

#include "sm90_layout.cuh"

namespace upconv {

// --- Rows without taps -----------------------------------------------------------------------

constexpr int kFillThreads = 256;  // where the whole output is filled first
constexpr int kFillBytes = 16384;  // of a task and more; what a task costs besides is hidden then

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

template <typename Operand>
__device__ __forceinline__ void fill_rows(const Sm90Params& p) {
  using Element = typename Operand::Element;
  if (!(p.fill_z | p.fill_y) || p.fill_first) return;
  __syncwarp();  // the feeder is one thread of its warp
  const int step = p.out_step_y / p.lanes, channels = p.conv_groups * p.out_channels;
  const int period = step * p.out_w * static_cast<int>(sizeof(Element));
  const int tall = step * ((kFillBytes + period - 1) / period);
  const int pieces = (p.out_h + tall - 1) / tall;
  const uint32_t tasks = static_cast<uint32_t>(p.batch) * channels * p.out_d * pieces;
  const uint32_t warps = gridDim.x * (kThreads / 32);
  for (uint32_t task = threadIdx.x / 32 * gridDim.x + blockIdx.x; task < tasks; task += warps) {
    const uint32_t plane = task / pieces, piece = task - plane * pieces;  // plane: of one depth
    const uint32_t image = plane / p.out_d, z = plane - image * p.out_d;
    Element value;
    const uint4 vector = bias_vector<Operand>(p, image % channels, &value);
    int y = piece * tall;
    const int end = min(y + tall, p.out_h);
    Element* row =
        static_cast<Element*>(p.y) + (static_cast<int64_t>(plane) * p.out_h + y) * p.out_w;
    if (p.fill_z >> z % p.out_step_z & 1) {
      fill_run(row, (end - y) * p.out_w, value, vector);
      continue;
    }
    for (int residue = 0; y < end; ++y, row += p.out_w) {
      if (p.fill_y >> residue & 1) fill_run(row, p.out_w, value, vector);
      residue = residue + 1 == step ? 0 : residue + 1;
    }
  }
}

// Every output. A block's warps take neighbouring pieces.
template <typename Operand>
__global__ void sm90_fill(const __grid_constant__ Sm90Params p) {
  using Element = typename Operand::Element;
  constexpr int kPiece = kFillBytes / sizeof(Element);
  const int64_t size = static_cast<int64_t>(p.out_d) * p.out_h * p.out_w;
  const int64_t pieces = (size + kPiece - 1) / kPiece;
  const int channels = p.conv_groups * p.out_channels;
  const int warps = blockDim.x / 32;
  for (int64_t task = static_cast<int64_t>(blockIdx.x) * warps + threadIdx.x / 32;
       task < pieces * p.batch * channels; task += static_cast<int64_t>(gridDim.x) * warps) {
    const int64_t plane = task / pieces, first = (task - plane * pieces) * kPiece;
    Element value;
    const uint4 vector = bias_vector<Operand>(p, static_cast<int>(plane % channels), &value);
    const int count = static_cast<int>(min(size - first, static_cast<int64_t>(kPiece)));
    fill_run(static_cast<Element*>(p.y) + plane * size + first, count, value, vector);
  }
}

}  // namespace upconv
