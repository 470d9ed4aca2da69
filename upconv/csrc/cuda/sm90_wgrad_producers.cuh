// Hopper kernel for the weight's gradient: the producers, which bring input and grad_output.
#pragma once

#include "sm90_wgrad_layout.cuh"

namespace upconv::wgrad {

// --- Producers -------------------------------------------------------------------------------

// What one thread copies of each row of a chunk: always the same place, in every `jump`-th channel.
// Every division is done once, before the first chunk.
struct Place {
  int image, point, channel, shift, count;

  // `per_image` items of `points` points each, `images` times; they begin at point `first`.
  __device__ __forceinline__ Place(int per_image, int images, int points, int first, int channels) {
    const int row = max(per_image * images, 1), thread = threadIdx.x;
    // A power of two, so that the channels divide evenly.
    shift = 31 - __clz(min(kProducers / row, channels));
    channel = thread / row;
    count = per_image > 0 && channel < jump() ? channels >> shift : 0;
    image = per_image > 0 ? thread % row / per_image : 0;
    point = first + (per_image > 0 ? thread % per_image * points : 0);
  }
  __device__ __forceinline__ int jump() const { return 1 << shift; }
  // How many of this thread's channels exist, `channels` of them counted from its first.
  __device__ __forceinline__ int existing(int channels) const {
    return (channels + jump() - 1) >> shift;
  }
};

template <typename Operand, bool kPairs>
struct Producer {
  using Element = typename Operand::Element;
  using Layout = Shape<Operand, kPairs>;
  static constexpr int kElement = Layout::kElement;
  static constexpr int kPerWord = 4 / kElement;
  const WgradParams& p;
  const Shared& shared;
  const Share share;
  const WgradJob& job;
  const Place x;           // a word of the input
  const Place main, halo;  // a copy of grad_output: under the strip, and to the right of it
  uint32_t x_target;

  __device__ __forceinline__ Producer(const WgradParams& p, const Shared& shared)
      : p(p),
        shared(shared),
        share(p),
        job(p.job[share.job]),
        x(p.segment / per_input(), p.images, per_input(), 0, p.tile_n),
        main(p.segment / per_copy(), p.images, per_copy(), 0, kRows),
        halo((p.filled - p.segment) / per_copy(), p.images, per_copy(), p.segment, kRows) {
    constexpr int kWords = Layout::kWords, kVectors = Layout::kVectors;
    const int word = (x.image * p.segment + x.point) / kPerWord;
    const int unit = word / kWords, in_unit = word % kWords;
    const int vector = Layout::kWoven ? in_unit % kVectors : in_unit / 4;
    const int place = Layout::kWoven ? in_unit / kVectors : in_unit % 4;
    x_target =
        (unit * kVectors + vector) * Layout::vector_step(p.tile_n) + place * 4 + x.channel * 16;
  }

  // Pixels of the input in one copy.
  __device__ __forceinline__ int per_input() const {
    return max(p.copy_input / kElement, kPerWord);
  }

  // Points of grad_output in one copy.
  __device__ __forceinline__ int per_copy() const {
    return job.copy == 2 ? kPerWord : job.copy / point_bytes(p);
  }

  // Two 16-bit elements as one word; each is zero where its column does not exist.
  __device__ static __forceinline__ uint32_t two_elements(const Element* first, int64_t step,
                                                          bool has_first, bool has_second) {
    uint32_t v = 0;
    if (has_first) v = __ldg(reinterpret_cast<const unsigned short*>(first));
    if (has_second) {
      v |= static_cast<uint32_t>(__ldg(reinterpret_cast<const unsigned short*>(first + step)))
           << 16;
    }
    return v;
  }

  // `count` channels of one place, `step` elements apart in memory; those from `exist` on are zero.
  // Several at a time: one after the other, the latency of the address arithmetic set the pace (12
  // to 24 cycles a copy and multiprocessor).
  template <int kBytes, int kBatch>
  __device__ static __forceinline__ void copy_channels(uint32_t target, uint32_t jump,
                                                       const Element* source, int64_t step,
                                                       int count, int exist, bool inside) {
    const int bytes = inside ? kBytes : 0;
    if (exist >= count && count % kBatch == 0) {
#pragma unroll 1
      for (int i = 0; i < count; i += kBatch) {
#pragma unroll
        for (int k = 0; k < kBatch; ++k)
          ptx::copy_async<kBytes>(target + k * jump, source + k * step, bytes);
        source += kBatch * step;
        target += kBatch * jump;
      }
      return;
    }
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      ptx::copy_async<kBytes>(target, source, i < exist ? bytes : 0);
      source += step;
      target += jump;
    }
  }

  __device__ static __forceinline__ void copy_elements(uint32_t target, uint32_t jump,
                                                       const Element* source, int64_t step,
                                                       int count, int exist, int next, bool first,
                                                       bool second) {
#pragma unroll 4
    for (int i = 0; i < count; ++i) {
      const bool on = i < exist;
      ptx::store_shared(target, two_elements(source, next, on && first, on && second));
      source += step;
      target += jump;
    }
  }

  __device__ __forceinline__ void copy_input(uint32_t stage, const Unit& unit, int row) const {
    const int image = unit.image + x.image, column = unit.column + x.point;
    const int64_t area = static_cast<int64_t>(p.in_h) * p.in_w;
    const int first = share.channel + x.channel;
    const Element* source = static_cast<const Element*>(p.x) +
                            (static_cast<int64_t>(image) * p.in_channels + first) * area +
                            static_cast<int64_t>(row) * p.in_w + column;
    const bool inside = image < p.batch && column < p.in_w;
    const int exist = x.existing(p.in_channels - first), jump = x.jump() * 16;
    const int64_t step = area << x.shift;
    if (Layout::kWoven && (kElement == 4 || p.copy_input == 4)) {
      copy_channels<4, 8>(stage + x_target, jump, source, step, x.count, exist, inside);
    } else if (!Layout::kWoven && p.copy_input == 16) {
      copy_channels<16, 4>(stage + x_target, jump, source, step, x.count, exist, inside);
    } else if (!Layout::kWoven && p.copy_input == 8) {
      copy_channels<8, 4>(stage + x_target, jump, source, step, x.count, exist, inside);
    } else if (!Layout::kWoven && p.copy_input == 4) {
      copy_channels<4, 8>(stage + x_target, jump, source, step, x.count, exist, inside);
    } else {
      copy_elements(stage + x_target, jump, source, step, x.count, exist, 1, inside,
                    inside && column + 1 < p.in_w);
    }
  }

  // TF32: rounds the words that this thread has copied. The other operand is rounded on its way
  // through the consumers' registers.
  __device__ __forceinline__ void round_input(uint32_t stage) const {
    uint32_t target = stage + x_target;
    const uint32_t jump = x.jump() * 16;
#pragma unroll 1
    for (int i = 0; i < x.count; i += 8) {
      uint32_t v[8];
#pragma unroll
      for (int k = 0; k < 8; ++k) ptx::load_shared(v[k], target + k * jump);
#pragma unroll
      for (int k = 0; k < 8; ++k) ptx::store_shared(target + k * jump, Operand::prepare(v[k]));
      target += 8 * jump;
    }
  }

  __device__ __forceinline__ void copy_plane(uint32_t target, const WgradPlane& plane,
                                             const Unit& unit, int row, const Place place) const {
    const int64_t area = static_cast<int64_t>(p.out_h) * p.out_w, step = area << place.shift;
    const int image = unit.image + place.image, channel = plane.channel + place.channel;
    const int y = row * p.step_y + plane.phase_y;
    const int column = (unit.column + plane.start + place.point) * p.step_x + plane.phase_x;
    const bool row_inside = image < p.batch && static_cast<unsigned>(y) < p.out_h;
    const bool inside = row_inside && static_cast<unsigned>(column) < p.out_w;
    const int exist = place.existing(p.out_channels - channel), count = place.count;
    const uint32_t jump = (p.pitch * point_bytes(p)) << place.shift;
    const Element* source = static_cast<const Element*>(p.gy) +
                            (static_cast<int64_t>(image) * p.out_channels + channel) * area +
                            static_cast<int64_t>(y) * p.out_w + column;
    target +=
        (place.channel * p.pitch + place.image * p.segment_pitch + place.point) * point_bytes(p);
    if (job.copy == 16) {
      copy_channels<16, 4>(target, jump, source, step, count, exist, inside);
    } else if (job.copy == 8) {
      copy_channels<8, 4>(target, jump, source, step, count, exist, inside);
    } else if (job.copy == 4) {
      copy_channels<4, 4>(target, jump, source, step, count, exist, inside);
    } else {
      copy_elements(target, jump, source, step, count, exist, p.step_x, inside,
                    row_inside && static_cast<unsigned>(column + p.step_x) < p.out_w);
    }
  }

  __device__ __forceinline__ void copy_planes(uint32_t stage, const Unit& unit, int row) const {
    uint32_t target = stage + p.input_bytes;
#pragma unroll 1
    for (int i = 0; i < 2 * job.planes; ++i) {
      const bool right = i % 2 == 1;
      Place place = main;
      if (right) place = halo;
      copy_plane(target, job.plane[i / 2], unit, row, place);
      if (right) target += p.plane_bytes;
    }
  }

  // Hands the oldest chunk on its way over to the consumers.
  __device__ __forceinline__ void hand_over(Slot& oldest) const {
    const uint32_t stage = shared.stages + oldest.index * p.stage_bytes;
    if constexpr (kElement == 4) round_input(stage);
    ptx::fence_async_proxy();
    ptx::barrier_arrive(shared.full + 8 * oldest.index);
    oldest.advance(p);
  }

  __device__ __forceinline__ void wait_for_oldest() const {
    switch (p.lag) {
      case 1:
        return ptx::copy_async_wait<1>();
      case 2:
        return ptx::copy_async_wait<2>();
      case 3:
        return ptx::copy_async_wait<3>();
      default:
        return ptx::copy_async_wait<4>();
    }
  }

  __device__ __forceinline__ void run() const {
    Slot newest, oldest;
    int count = 0;
    for (int index = share.first; index < share.end; ++index) {
      const Unit unit(p, index);
      for (int i = 0; i < unit.rows + job.extra_rows; ++i) {
        ptx::barrier_wait(shared.empty + 8 * newest.index, newest.parity ^ 1);
        const uint32_t stage = shared.stages + newest.index * p.stage_bytes;
        if (i >= job.extra_rows) copy_input(stage, unit, unit.row + i - job.extra_rows);
        copy_planes(stage, unit, unit.row + job.shift_y + i);
        ptx::copy_async_commit();
        newest.advance(p);
        if (count == p.lag) {
          wait_for_oldest();
          hand_over(oldest);
        } else {
          ++count;
        }
      }
    }
    ptx::copy_async_wait<0>();
    for (; count > 0; --count) hand_over(oldest);
  }
};

}  // namespace upconv::wgrad
