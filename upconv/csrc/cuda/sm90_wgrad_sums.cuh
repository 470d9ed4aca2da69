// Hopper kernel for the weight's gradient: the bias's gradient on the way.
//
// A pass of its own over grad_output takes as long as the memory needs for it, 10 to 25 % of the
// backward pass of large layers. Here the producers add up what the TMA has brought for the
// products. The planner marks planes (`sum`) that hold every phase once; of those, every element is
// added by exactly one block: strips share the columns, units of work the rows, and blocks of input
// channels, which all read the same chunks, take turns.
#pragma once

#include "sm90_wgrad_layout.cuh"

namespace upconv::wgrad {

// --- Adding up chunks ------------------------------------------------------------------------

// Which row of a plane a thread adds up: every `parts`-th 16 bytes of it. Lanes side by side have
// rows side by side, whose 16 bytes are on different banks. (The tensor cores, as a product with
// ones, were no help: mma.sync waits for the WGMMAs of the consumers.)
struct SummedRow {
  int row, part, parts;

  __device__ __forceinline__ SummedRow(const WgradParams& p, int thread) {
    const int log_rows = p.rows > 32 ? 6 : p.rows > 16 ? 5 : 4;
    row = thread & ((1 << log_rows) - 1);
    part = thread >> log_rows;
    parts = kProducers >> log_rows;
    // Rows of an even number of vectors: every second four of them begin with the next.
    if (p.pitch * point_bytes(p) % 32 == 0) part ^= row >> 2 & 1;
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
    const int row = SummedRow(p, ptx::this_thread()).row;
    const int late = p.flat ? row / class_rows(p) * volume_points(p) : 0;
    ptx::store_shared(place_at(), row >= p.rows ? ~0u
                                                : (p.input_bytes + row * p.pitch * point_bytes(p)) |
                                                      (late & (vector_points(p) - 1)) << 24);
    ptx::store_shared(total_at(), uint2{0u, 0u});
  }

  // In the part of the producers' notes that is for copies: what is to be added of each stage, and
  // each thread's place in a stage and its sum. There are no registers to spare. The sum is a
  // float64: a thread adds up thousands of chunks, and in float32 the bias of kb57 had 3.4 times
  // the error of PyTorch's.
  __device__ __forceinline__ uint32_t note_at(int stage) const {
    return shared.spots + 2 * kProducers * 16 + stage * 16;
  }
  __device__ __forceinline__ uint32_t place_at() const {
    return note_at(kWgradMaxStages) + 4 * ptx::this_thread();
  }
  __device__ __forceinline__ uint32_t total_at() const {
    return note_at(kWgradMaxStages) + 4 * kProducers + 8 * ptx::this_thread();
  }
  static_assert(16 * kWgradMaxStages + 12 * kProducers <= 16 * kProducers, "beyond the header");

  __device__ __forceinline__ double total() const {
    uint2 bits;
    ptx::load_shared(bits, total_at());
    return __hiloint2double(bits.y, bits.x);
  }

  // What the chunks of a unit of work have in common: image, bytes of the strip, whose turn it is.
  __device__ __forceinline__ void begin(const Unit& unit) const {
    if (ptx::this_thread() != kNoting) return;
    const int point = point_bytes(p), line = row_points(p);
    const int first = unit.column * p.spread, strip = p.by_segment(unit.column);
    const int end = strip == p.strips - 1 ? line : min(line, first + p.segment * p.spread);
    ptx::store_shared(
        shared.spots + kNoting * 16,
        uint4{static_cast<uint32_t>(unit.image), static_cast<uint32_t>(max(end - first, 0) * point),
              static_cast<uint32_t>(strip + p.by_images(unit.image)), 0u});
  }

  // What is to be added of the unit's i-th chunk. Rows of grad_output that a unit needs before its
  // first row of the input belong to the unit before, if there is one.
  __device__ __forceinline__ void note(int stage, int row, int i, int channels) const {
    if (ptx::this_thread() != kNoting) return;
    uint4 unit;
    ptx::load_shared(unit, shared.spots + kNoting * 16);
    bool mine = i >= job.extra_rows || row == 0;
    const int turn = static_cast<int>(unit.z) + row + i;
    mine &= turn - p.by_channel_blocks(turn) * p.channel_blocks == channels;
    ptx::store_shared(note_at(stage), uint4{unit.x, mine ? unit.y : 0u,
                                            static_cast<uint32_t>(row + job.shift_y + i), 0u});
  }

  // Of a word bytes `from` to `to`, and zeros for the others.
  __device__ static __forceinline__ uint32_t kept(uint32_t word, int from, int to) {
    if constexpr (kElement == 4) return from <= 0 && to > 0 ? word : 0u;
    return word & ((from <= 0 && to > 0 ? 0xffffu : 0u) | (from <= 2 && to > 2 ? ~0xffffu : 0u));
  }

  __device__ static __forceinline__ float number(uint32_t bits) {
    const unsigned short half = static_cast<unsigned short>(bits);
    return Operand::to_float(*reinterpret_cast<const typename Operand::Element*>(&half));
  }
  __device__ static __forceinline__ float word_sum(uint32_t word) {
    if constexpr (kElement == 4) return __uint_as_float(word);
    return number(word) + number(word >> 16);
  }

  // Bytes `from` to `to` of the thread's row. Four sums, since an addition waits for the one
  // before.
  __device__ __forceinline__ void add_row(float (&sum)[4], uint32_t row, int from, int to) const {
    const SummedRow mine(p, ptx::this_thread());
    const int last = (to + 15) / 16;
#pragma unroll 2
    for (int v = from / 16 + mine.part; v < last; v += mine.parts) {
      uint4 four;
      ptx::load_shared(four, row + v * 16);
      const int skip = from - v * 16, end = to - v * 16;
      if (skip > 0 || end < 16) {
        four.x = kept(four.x, skip, end), four.y = kept(four.y, skip - 4, end - 4);
        four.z = kept(four.z, skip - 8, end - 8), four.w = kept(four.w, skip - 12, end - 12);
      }
      sum[0] += word_sum(four.x), sum[1] += word_sum(four.y);
      sum[2] += word_sum(four.z), sum[3] += word_sum(four.w);
    }
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
      from += (late + (place >> 24)) & (vector_points(p) - 1);
    }
    from *= point;
    uint32_t row = shared.stages + stage * p.stage_bytes + k * p.plane_bytes + (place & 0xffffff);
#pragma unroll 1
    for (int i = 0; i < p.images; ++i) {
      const int z = image + i - p.by_in_d(image + i) * p.in_d;
      if (z + plane.sum >= p.in_d) add_row(sum, row, from, from + bytes);
      row += p.segment_pitch * point;
    }
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
      const double now = total() + ((sum[0] + sum[1]) + (sum[2] + sum[3]));
      ptx::store_shared(total_at(), uint2{static_cast<uint32_t>(__double2loint(now)),
                                          static_cast<uint32_t>(__double2hiint(now))});
    }
    __syncwarp();
    if (ptx::this_thread() % 32 == 0) ptx::barrier_arrive(shared.empty + 8 * stage);
  }

  // [thread]: parts of rows.
  __device__ __forceinline__ void store() const {
    p.workspace[p.bias_at + static_cast<int64_t>(blockIdx.x) * kProducers + ptx::this_thread()] =
        static_cast<float>(total());
  }
};

}  // namespace upconv::wgrad
