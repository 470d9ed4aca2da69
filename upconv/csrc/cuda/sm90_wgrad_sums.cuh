// Hopper kernel for the weight's gradient: the bias's gradient on the way.
//
// A pass of its own over grad_output takes as long as the memory needs for it, 10 to 25 % of the
// backward pass of large layers. Here the producers add up what the TMA has brought for the
// products. The planner marks planes (`sum`) that hold every phase once; of those, every element is
// added by exactly one block: strips share the columns, units of work the rows, and blocks of input
// channels, which all read the same chunks, take turns.
#pragma once

#include <type_traits>

#include "sm90_wgrad_layout.cuh"

namespace upconv::wgrad {

// --- Adding up chunks ------------------------------------------------------------------------

// Which rows of a plane a thread adds up, and which share of their columns.
//
// float32: a row, of which every `parts`-th 16 bytes are the thread's; rows side by side are lanes
// side by side, whose 16 bytes are on different banks.
// 16-bit types: the tensor cores add, as a product with ones (one instruction for 256 numbers
// instead of 17 for 8), and so a warp has 16 rows. A lane has rows g and g + 8 and of every 128
// bytes the vectors 2 t and 2 t + 1; whatever it takes for the columns 2 t of the operand is right.
template <int kElement>
struct Rows {
  int row, part, parts;

  __device__ __forceinline__ Rows(const WgradParams& p, int thread) {
    if constexpr (kElement == 4) {
      const int log_rows = p.rows > 32 ? 6 : p.rows > 16 ? 5 : 4;
      row = thread & ((1 << log_rows) - 1);
      part = thread >> log_rows;
      parts = kProducers >> log_rows;
    } else {
      const int blocks = p.rows / 16, warp = thread / 32;
      part = blocks == 1 ? warp : blocks == 2 ? warp / 2 : warp / blocks;
      parts = blocks == 1 ? 4 : blocks == 2 ? 2 : 1;
      row = (warp - part * blocks) * 16 + thread % 32 / 4;
    }
  }

  __device__ __forceinline__ bool none(const WgradParams& p) const {
    return row >= p.rows || part >= parts;
  }
};

template <typename Operand>
struct Sums {
  static constexpr int kElement = sizeof(typename Operand::Element);
  static constexpr int kNoting = kProducers - 1;  // a thread without boxes and slabs

  const WgradParams& p;
  const Shared& shared;
  const WgradJob& job;

  __device__ __forceinline__ Sums(const WgradParams& p, const Shared& shared, const WgradJob& job)
      : p(p), shared(shared), job(job) {
    if (job.sums == 0) return;
    const Rows<kElement> rows(p, threadIdx.x);
    const int late = p.flat ? rows.row / class_rows(p) * volume_points(p) : 0;
    ptx::store_shared(place_at(), rows.none(p)
                                      ? ~0u
                                      : (p.input_bytes + rows.row * p.pitch * point_bytes(p)) |
                                            (late & (16 / point_bytes(p) - 1)) << 24);
    ptx::store_shared(place_at() + 4 * kProducers, 0u);
    if constexpr (kElement == 2) ptx::store_shared(place_at() + 8 * kProducers, 0u);
  }

  // In the part of the producers' notes that is for copies: what is to be added of each stage, and
  // each thread's place in a stage and its sums. There are no registers to spare.
  __device__ __forceinline__ uint32_t note_at(int stage) const {
    return shared.spots + 2 * kProducers * 16 + stage * 16;
  }
  __device__ __forceinline__ uint32_t place_at() const {
    return note_at(kWgradMaxStages) + 4 * threadIdx.x;
  }

  // What the chunks of a unit of work have in common: image, bytes of the strip, whose turn it is.
  __device__ __forceinline__ void begin(const Unit& unit) const {
    if (threadIdx.x != kNoting) return;
    const int point = point_bytes(p), line = p.out_w * kElement / point;
    const int first = unit.column * p.spread, strip = unit.column / p.segment;
    const int end = strip == p.strips - 1 ? line : min(line, first + p.segment * p.spread);
    ptx::store_shared(
        shared.spots + kNoting * 16,
        uint4{static_cast<uint32_t>(unit.image), static_cast<uint32_t>(max(end - first, 0) * point),
              static_cast<uint32_t>(strip + unit.image / p.images), 0u});
  }

  // What is to be added of the unit's i-th chunk. Rows of grad_output that a unit needs before its
  // first row of the input belong to the unit before, if there is one.
  __device__ __forceinline__ void note(int stage, int row, int i, int channels) const {
    if (threadIdx.x != kNoting) return;
    uint4 unit;
    ptx::load_shared(unit, shared.spots + kNoting * 16);
    bool mine = i >= job.extra_rows || row == 0;
    if (p.channel_blocks > 1) mine &= (unit.z + row + i) % p.channel_blocks == channels;
    ptx::store_shared(note_at(stage), uint4{unit.x, mine ? unit.y : 0u,
                                            static_cast<uint32_t>(row + job.shift_y + i), 0u});
  }

  // Bytes `from` to `to` of the thread's row: of two rows, with 16-bit types.
  __device__ __forceinline__ void add_row(float (&sum)[4], uint32_t row, int from, int to) const {
    const Rows<kElement> rows(p, ptx::computed_here(threadIdx.x));
    const int first = from / 16, last = (to + 15) / 16;
    if constexpr (kElement == 4) {
#pragma unroll 2
      for (int v = first + rows.part; v < last; v += rows.parts) {
        uint4 four;
        ptx::load_shared(four, row + v * 16);
        const int skip = from - v * 16, end = to - v * 16;
        if (skip > 0 || end < 16) {
          if (skip > 0 || end <= 0) four.x = 0u;
          if (skip > 4 || end <= 4) four.y = 0u;
          if (skip > 8 || end <= 8) four.z = 0u;
          if (skip > 12 || end <= 12) four.w = 0u;
        }
        sum[0] += __uint_as_float(four.x), sum[1] += __uint_as_float(four.y);
        sum[2] += __uint_as_float(four.z), sum[3] += __uint_as_float(four.w);
      }
    } else {
      const uint32_t eight = 8 * p.pitch * point_bytes(p);
      // Rows of an even number of vectors: neighbours would meet on the same banks.
      const int turn = eight % 256 == 0 ? threadIdx.x / 4 % 2 : 0;
#pragma unroll 1
      for (int v = first + 8 * rows.part; v < last; v += 8 * rows.parts) {
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          const int mine = v + threadIdx.x % 4 * 2 + (k ^ turn);
          uint4 low{}, high{};
          if (mine < last) {
            ptx::load_shared(low, row + mine * 16);
            ptx::load_shared(high, row + eight + mine * 16);
            if (mine * 16 < from || mine * 16 + 16 > to) {
              keep(low, from - mine * 16, to - mine * 16);
              keep(high, from - mine * 16, to - mine * 16);
            }
          }
          __syncwarp();
          constexpr bool kBfloat16 = std::is_same_v<Operand, Bf16>;
          ptx::add_rows<kBfloat16>(sum, {low.x, high.x, low.y, high.y});
          ptx::add_rows<kBfloat16>(sum, {low.z, high.z, low.w, high.w});
        }
      }
    }
  }

  // Of 8 numbers those from byte `from` to byte `to`; zeros for the others.
  __device__ static __forceinline__ void keep(uint4& v, int from, int to) {
    const auto mask = [&](int at) {
      const uint32_t low = at >= from && at < to ? 0xffffu : 0u;
      return low | (at + 2 >= from && at + 2 < to ? 0xffff0000u : 0u);
    };
    v.x &= mask(0), v.y &= mask(4), v.z &= mask(8), v.w &= mask(12);
  }

  __device__ __forceinline__ void add_plane(float (&sum)[4], int stage, int k, int image, int bytes,
                                            int plane_row) const {
    // A row beyond the tensor is none of its zeros where rows follow each other as one.
    const int y = plane_row * p.step_y + job.plane[k].phase_y;
    if (y < 0 || y >= p.out_h) return;
    uint32_t place;
    ptx::load_shared(place, place_at());
    if (place == ~0u) return;
    const WgradPlane& plane = job.plane[k];
    const int point = point_bytes(p);
    int from = -plane.start;
    if (p.flat) {
      // The box begins a little before the plane, in each class of channels as much as it must.
      unsigned short late;
      ptx::load_shared(late, shared.late_at(stage, k));
      from += (late + (place >> 24)) & (16 / point - 1);
    }
    from *= point;
    uint32_t row = shared.stages + stage * p.stage_bytes + k * p.plane_bytes + (place & 0xffffff);
#pragma unroll 1
    for (int i = 0; i < p.images; ++i) {
      const int z = p.in_d == 1 ? 0 : (image + i) % p.in_d;
      if (z + plane.sum >= p.in_d) add_row(sum, row, from, from + bytes);
      row += p.segment_pitch * point;
    }
  }

  __device__ __forceinline__ void add_to(uint32_t total_at, float sum) const {
    uint32_t total;
    ptx::load_shared(total, total_at);
    ptx::store_shared(total_at, __float_as_uint(__uint_as_float(total) + sum));
  }

  // A chunk, when it has come. Then its stage may be filled again.
  __device__ __forceinline__ void add(const Slot& slot) const {
    const int stage = slot.index();
    ptx::barrier_wait(shared.full + 8 * stage, slot.parity());
    uint4 note;
    ptx::load_shared(note, note_at(stage));
    if (note.y > 0) {
      float sum[4] = {};
#pragma unroll 1
      for (int k = 0; k < job.planes; ++k)
        if (job.plane[k].sum > 0) add_plane(sum, stage, k, note.x, note.y, note.z);
      if constexpr (kElement == 4) {
        add_to(place_at() + 4 * kProducers, (sum[0] + sum[1]) + (sum[2] + sum[3]));
      } else if (threadIdx.x % 4 == 0) {
        add_to(place_at() + 4 * kProducers, sum[0]);  // of row g; the columns are all the same
        add_to(place_at() + 8 * kProducers, sum[2]);  // of row g + 8
      }
    }
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::barrier_arrive(shared.empty + 8 * stage);
  }

  // [part][row], up to 128 of a block.
  __device__ __forceinline__ void store() const {
    const Rows<kElement> rows(p, threadIdx.x);
    if (rows.none(p) || (kElement == 2 && threadIdx.x % 4 != 0)) return;
    float* target = p.workspace + p.bias_at + static_cast<int64_t>(blockIdx.x) * kProducers +
                    rows.part * p.rows + rows.row;
#pragma unroll
    for (int half = 0; half < (kElement == 4 ? 1 : 2); ++half) {
      uint32_t total;
      ptx::load_shared(total, place_at() + 4 * (1 + half) * kProducers);
      target[8 * half] = __uint_as_float(total);
    }
  }
};

}  // namespace upconv::wgrad
