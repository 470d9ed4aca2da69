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

// Threads for the rows of a plane: 1 << this, so that a row has 2, 4 or 8 of them.
__device__ __forceinline__ int log_sum_rows(const WgradParams& p) {
  return p.rows > 32 ? 6 : p.rows > 16 ? 5 : 4;
}

template <typename Operand>
struct Sums {
  using Element = typename Operand::Element;
  static constexpr int kElement = sizeof(Element), kPerWord = 4 / kElement;
  static constexpr int kNoting = kProducers - 1;  // a thread without boxes and slabs

  const WgradParams& p;
  const Shared& shared;
  const WgradJob& job;

  __device__ __forceinline__ Sums(const WgradParams& p, const Shared& shared, const WgradJob& job)
      : p(p), shared(shared), job(job) {
    if (slabs(p)) ptx::store_shared(total_at(), 0u);
  }

  // Both in the part of the producers' notes that is for copies.
  __device__ __forceinline__ uint32_t note_at(int stage) const {
    return shared.spots + 2 * kProducers * 16 + stage * 16;
  }
  // This thread's sum: weaving has no register to spare.
  __device__ __forceinline__ uint32_t total_at() const {
    return note_at(kWgradMaxStages) + 4 * threadIdx.x;
  }

  // What is to be added of the unit's i-th chunk. Rows of grad_output that a unit needs before its
  // first row of the input belong to the unit before, if there is one.
  __device__ __forceinline__ void note(int stage, const Unit& unit, int i, int channels) const {
    if (threadIdx.x != kNoting) return;
    const int turn = unit.row + i + unit.column / p.segment + unit.image / p.images;
    const bool mine = (i >= job.extra_rows || unit.row == 0) && turn % p.channel_blocks == channels;
    ptx::store_shared(note_at(stage), uint4{static_cast<uint32_t>(unit.image),
                                            static_cast<uint32_t>(unit.column), mine, 0u});
  }

  __device__ static __forceinline__ float element(uint32_t word, int e) {
    if constexpr (kElement == 4) {
      return __uint_as_float(word);
    } else {
      const unsigned short bits = static_cast<unsigned short>(word >> 16 * e);
      return Operand::to_float(*reinterpret_cast<const Element*>(&bits));
    }
  }

  // Bytes `from` to `to` of a row. Four sums, since one addition waits for the one before.
  __device__ static __forceinline__ float row_sum(uint32_t row, int from, int to, int part,
                                                  int parts) {
    float sum[4] = {};
    const auto add = [&](int vector, bool whole) {
      uint4 four;
      ptx::load_shared(four, row + vector * 16);
      const uint32_t words[] = {four.x, four.y, four.z, four.w};
#pragma unroll
      for (int k = 0; k < 4; ++k)
#pragma unroll
        for (int e = 0; e < kPerWord; ++e) {
          const int at = vector * 16 + k * 4 + e * kElement;
          if (whole || (at >= from && at < to)) sum[k] += element(words[k], e);
        }
    };
    const int first = (from + 15) / 16, last = to / 16;
    if (part == 0 && from % 16 != 0) add(from / 16, false);
    if (part == parts - 1 && to % 16 != 0 && (from % 16 == 0 || to / 16 != from / 16))
      add(last, false);
#pragma unroll 4
    for (int vector = first + part; vector < last; vector += parts) add(vector, true);
    return (sum[0] + sum[1]) + (sum[2] + sum[3]);
  }

  __device__ __forceinline__ float plane_sum(int stage, int k, int image, int column) const {
    const WgradPlane& plane = job.plane[k];
    // Computed anew for each plane: registers are short.
    const int thread = ptx::computed_here(threadIdx.x);
    const int log_rows = log_sum_rows(p), row = thread & ((1 << log_rows) - 1);
    if (row >= p.rows) return 0.f;
    const int point = point_bytes(p), begin = column * p.spread;
    const int line = p.out_w * kElement / point;
    const bool last = column + p.segment >= p.strips * p.segment;
    const int end = last ? line : min(line, begin + p.segment * p.spread);
    // Where the box begins a little before the plane.
    int late = 0;
    if (p.flat) {
      unsigned short first;
      ptx::load_shared(first, shared.late_at(stage, k));
      late = (first + row / class_rows(p) * volume_points(p)) & (16 / point - 1);
    }
    const int from = late - plane.start, to = from + end - begin;
    const uint32_t base = shared.stages + stage * p.stage_bytes + p.input_bytes +
                          k * p.plane_bytes + row * p.pitch * point;
    if (to <= from) return 0.f;
    float sum = 0.f;
#pragma unroll 1
    for (int i = 0; i < p.images; ++i) {
      const int z = p.in_d == 1 ? 0 : (image + i) % p.in_d;
      if (z + plane.sum < p.in_d) continue;
      sum += row_sum(base + i * p.segment_pitch * point, from * point, to * point,
                     thread >> log_rows, kProducers >> log_rows);
    }
    return sum;
  }

  // A chunk, when it has come. Then its stage may be filled again.
  __device__ __forceinline__ void add(const Slot& slot) const {
    const int stage = slot.index();
    ptx::barrier_wait(shared.full + 8 * stage, slot.parity());
    uint4 note;
    ptx::load_shared(note, note_at(stage));
    if (note.z) {
      uint32_t total;
      ptx::load_shared(total, total_at());
      float sum = 0.f;
#pragma unroll 1
      for (int k = 0; k < job.planes; ++k)
        if (job.plane[k].sum > 0) sum += plane_sum(stage, k, note.x, note.y);
      ptx::store_shared(total_at(), __float_as_uint(__uint_as_float(total) + sum));
    }
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::barrier_arrive(shared.empty + 8 * stage);
  }

  __device__ __forceinline__ void store() const {
    uint32_t total;
    ptx::load_shared(total, total_at());
    p.workspace[p.bias_at + static_cast<int64_t>(blockIdx.x) * kProducers + threadIdx.x] =
        __uint_as_float(total);
  }
};

// --- Adding up blocks ------------------------------------------------------------------------

// One block for each row of the planes, that is, for each channel: the sums of all blocks that have
// it, in an order that is always the same.
template <typename Operand>
__device__ __forceinline__ void add_bias(const WgradParams& p, int row) {
  extern __shared__ __align__(1024) unsigned char memory[];
  float* sums = reinterpret_cast<float*>(memory);
  const int out = channel_of_row(p, row), rows = 1 << log_sum_rows(p), parts = kProducers / rows;
  if (out >= p.out_channels) return;
  float sum = 0.f;
  for (int number = 0; number < p.jobs; ++number) {
    const WgradJob& job = p.job[number];
    if (job.sums == 0 || job.sum_channel != row / kRows * kRows) continue;
    const int each = p.channel_blocks * parts;
    for (int i = threadIdx.x; i < job.workers * each; i += kProducers) {
      const int worker = i / each, rest = i - worker * each, channels = rest / parts;
      const int64_t block = block_of(p, worker, number, channels);
      sum += p.workspace[p.bias_at + block * kProducers + (rest - channels * parts) * rows +
                         row % kRows];
    }
  }
  sums[threadIdx.x] = sum;
  __syncthreads();
#pragma unroll 1
  for (int half = kProducers / 2; half > 0; half /= 2) {
    if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
    __syncthreads();
  }
  if (threadIdx.x == 0)
    static_cast<typename Operand::Element*>(p.gb)[out] = Operand::from_float(sums[0]);
}

}  // namespace upconv::wgrad
