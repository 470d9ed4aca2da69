// Hopper kernel: depths and rows of the output that no tap reaches, which are the bias alone. They
// are no units of work: the loaders, which have the least to do, write those around the rows that a
// unit computes when they have loaded its input, slice by slice. Rows that share a sector are then
// written at about the same time.
#pragma once

#include "sm90_layout.cuh"

namespace upconv {

// --- Loaders: rows without taps --------------------------------------------------------------

// `count` neighbouring elements, by `lanes` threads of which this is number `lane`: whole vectors
// from the first 16 bytes on.
template <typename Element>
__device__ __forceinline__ void fill_run(Element* to, int count, Element value, uint4 vector,
                                         int lane, int lanes) {
  constexpr int kE = 16 / sizeof(Element);
  const int early = static_cast<int>(reinterpret_cast<uintptr_t>(to) / sizeof(Element)) & (kE - 1);
  const int head = min(count, (kE - early) & (kE - 1)), body = (count - head) / kE;
  const int tail = count - head - body * kE;
  uint4* vectors = reinterpret_cast<uint4*>(to + head);
  if (count <= 0) return;
  if (lane < head) __stcs(to + lane, value);
  for (int i = lane; i < body; i += lanes) __stcs(vectors + i, vector);
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

// Ones before the lowest zero.
__device__ __forceinline__ int lowest_ones(int bits) { return __popc(bits & ~(bits + 1)); }

// The depths or rows without taps (residues are bits of `fill`) around one with taps, which are its
// to fill: those up to the next with taps, before the first residue of a step those before it, and
// behind the last with taps of all what is left.
struct Around {
  int before, after, next;  // `next`: from one with taps to the next such

  __device__ __forceinline__ Around(int fill, int residue, int step) {
    const int first = lowest_ones(fill);
    before = residue == first ? first : 0;
    after = lowest_ones(fill >> (residue + 1));
    next = after + 1 + (residue + after + 1 == step ? first : 0);
  }
  // Where those after `own` end.
  __device__ __forceinline__ int end(int own, int size) const {
    return own + next < size ? own + after + 1 : size;
  }
};

// Piece `piece` of `pieces` of what a unit fills, in the columns of its tile, by all loaders. Some
// lanes together take a line: an output channel and a row phase. Not inlined: every loader calls it
// and none is the better for it.
template <typename Operand>
__device__ __noinline__ void fill_unit(const Sm90Params& p, int unit, int piece, int pieces) {
  using Element = typename Operand::Element;
  const Unit where(p, unit);
  const int group = group_of(p, unit), jobs = p.alternate ? 1 : 2;
  const int blocks = p.width_phases ? 1 : p.job_blocks;
  const int first = where.x * p.out_step_x, out_d = p.out_d, out_h = p.out_h, out_w = p.out_w;
  const int width = min(p.tile_w * p.out_step_x, out_w - first), step_y = p.out_step_y;
  int lanes = 32;  // for a row
  while (lanes > 8 && lanes * 12 > width * static_cast<int>(sizeof(Element))) lanes /= 2;
  const int lane = threadIdx.x % lanes, row_step = step_y / p.lanes;
  const int lines = 4 * p.warp_lines, total = jobs * blocks * lines;
  const int end_line = total * (piece + 1) / pieces;
  const bool whole_rows = width == out_w;
  for (int i = total * piece / pieces + threadIdx.x / lanes; i < end_line; i += kLoaders / lanes) {
    const int block = i / lines, line = i - block * lines, fold = line / p.fold_rows;
    const Sm90Job& job = p.job[job_of(p, group, block / blocks)];
    const int j = block % blocks, channel = job.channel[j] + line - fold * p.fold_rows;
    const Sm90Kind kind = p.kind[job.kind[j]];
    const int phase = kind.row + fold, own_z = where.z * p.out_step_z + kind.first_z;
    // Width phases in blocks by themselves: the first one's fills.
    const bool on = fold < p.folds && phase < p.row_phases && channel < p.out_channels;
    if (!on || own_z >= out_d || (!p.width_phases && kind.first_x)) continue;
    const int first_y = p.row_first[phase];
    const Around depth(p.fill_z, kind.first_z, p.out_step_z);
    const Around rows(p.fill_y, first_y % row_step, row_step);
    const bool whole_step = whole_rows && rows.next == step_y;
    const int at = where.conv_group * p.out_channels + channel;
    Element value;
    const uint4 vector = bias_vector<Operand>(p, at, &value);
    const int from_y = where.y * step_y + first_y, end_z = depth.end(own_z, out_d);
    const int end_y = min(from_y + p.tile_h * step_y, out_h);
    const int channels = p.conv_groups * p.out_channels, batch = min(where.o + p.tile_o, p.batch);
    for (int image = where.o; image < batch; ++image) {
      for (int z = own_z - depth.before; z < end_z; ++z) {
        const int64_t plane = (static_cast<int64_t>(image) * channels + at) * out_d + z;
        Element* base = static_cast<Element*>(p.y) + plane * out_h * out_w + first;
        // Rows from `top` to before `bottom`.
        const auto fill_rows = [=](int top, int bottom) {
          Element* to = base + static_cast<int64_t>(top) * out_w;
          if (whole_rows) return fill_run(to, (bottom - top) * out_w, value, vector, lane, lanes);
          for (; top < bottom; ++top, to += out_w) fill_run(to, width, value, vector, lane, lanes);
        };
        if (z != own_z && whole_step) {  // the rows of a step follow each other
          const int last = from_y + (end_y - 1 - from_y) / step_y * step_y;
          if (from_y < end_y) fill_rows(from_y - rows.before, rows.end(last, out_h));
          continue;
        }
        for (int own = from_y; own < end_y; own += step_y) {
          const int bottom = rows.end(own, out_h);
          fill_rows(own - rows.before, z == own_z ? own : bottom);
          if (z == own_z) fill_rows(own + 1, bottom);
        }
      }
    }
  }
}

__device__ __forceinline__ bool fills(const Sm90Params& p) { return p.fill_z | p.fill_y; }

}  // namespace upconv
