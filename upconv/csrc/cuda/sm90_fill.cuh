// Hopper kernel: depths and rows of the output that no tap reaches, which are the bias alone. They
// are no units of work: whoever stores a row fills those around it, so that rows which share a
// sector are written at about the same time, and while the other consumer multiplies.
#pragma once

#include "sm90_layout.cuh"

namespace upconv {

// --- Consumers: rows without taps ------------------------------------------------------------

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

// What block `j` of a job fills, in the columns of its tile. Some lanes together take a line, an
// output channel and row phase; lines are divided among `shares` consumers.
template <typename Operand>
__device__ __forceinline__ void fill_around(const Sm90Params& p, const Sm90Job& job, int j,
                                            const Unit& where, int share, int shares) {
  using Element = typename Operand::Element;
  const Sm90Kind& kind = p.kind[job.kind[j]];
  if (!p.width_phases && kind.first_x) return;  // the block of the first width phase does it
  const int first = where.x * p.out_step_x;
  const int width = min(p.tile_w * p.out_step_x, p.out_w - first);
  int lanes = 32;  // for a row
  while (lanes > 8 && lanes * 12 > width * static_cast<int>(sizeof(Element))) lanes /= 2;
  const int groups = 32 / lanes, group = threadIdx.x % 32 / lanes, lane = threadIdx.x % lanes;
  const int row_step = p.out_step_y / p.lanes;
  const Around depth(p.fill_z, kind.first_z, p.out_step_z);
  const int own_z = where.z * p.out_step_z + kind.first_z;
  const int end_z = depth.end(own_z, p.out_d);
  const bool whole_rows = width == p.out_w;
  if (own_z >= p.out_d) return;
  for (int line = share * groups + group; line < p.warp_lines; line += shares * groups) {
    const int row = threadIdx.x % 128 / 32 * p.warp_lines + line, fold = row / p.fold_rows;
    const int channel = job.channel[j] + row - fold * p.fold_rows, phase = kind.row + fold;
    if (fold >= p.folds || phase >= p.row_phases || channel >= p.out_channels) continue;
    const int first_y = p.row_first[phase];
    const Around rows(p.fill_y, first_y % row_step, row_step);
    const bool whole_step = whole_rows && rows.next == p.out_step_y;
    const int at = where.conv_group * p.out_channels + channel;
    Element value;
    const uint4 vector = bias_vector<Operand>(p, at, &value);
    for (int image = where.o; image < min(where.o + p.tile_o, p.batch); ++image) {
      const int64_t planes =
          (static_cast<int64_t>(image) * p.conv_groups * p.out_channels + at) * p.out_d;
      for (int z = own_z - depth.before; z < end_z; ++z) {
        Element* plane = static_cast<Element*>(p.y) + (planes + z) * p.out_h * p.out_w + first;
        // Rows from `top` to before `bottom`.
        const auto fill_rows = [&](int top, int bottom) {
          if (whole_rows) {
            const int count = (bottom - top) * p.out_w;
            fill_run(plane + static_cast<int64_t>(top) * p.out_w, count, value, vector, lane,
                     lanes);
            return;
          }
          for (; top < bottom; ++top) {
            fill_run(plane + static_cast<int64_t>(top) * p.out_w, width, value, vector, lane,
                     lanes);
          }
        };
        int own = where.y * p.out_step_y + first_y;
        const int end = min(own + p.tile_h * p.out_step_y, p.out_h);
        if (z != own_z && whole_step) {  // the rows of a step follow each other
          const int last = own + (end - 1 - own) / p.out_step_y * p.out_step_y;
          if (own < end) fill_rows(own - rows.before, rows.end(last, p.out_h));
          continue;
        }
        for (; own < end; own += p.out_step_y) {
          const int bottom = rows.end(own, p.out_h);
          fill_rows(own - rows.before, z == own_z ? own : bottom);
          if (z == own_z) fill_rows(own + 1, bottom);
        }
      }
    }
  }
}

}  // namespace upconv
