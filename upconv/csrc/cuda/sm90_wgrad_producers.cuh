// Hopper kernel for the weight's gradient: the producers, which bring input and grad_output.
#pragma once

#include "sm90_wgrad_layout.cuh"

namespace upconv::wgrad {

// --- Producers -------------------------------------------------------------------------------

// Each thread has one place in a row of a chunk (a word of the input, a copy of grad_output) and
// goes through the channels with it: every division is done once, before the first chunk.
template <typename Operand>
struct Producer {
  using Element = typename Operand::Element;
  static constexpr int kElement = Shape<Operand>::kElement;
  static constexpr int kPerWord = 4 / kElement;
  const WgradParams& p;
  const Shared& shared;
  const WgradJob& job;
  const Share share;
  // Input: this thread's word.
  int x_channel, x_jump, x_shift, x_count, x_image, x_column;
  uint32_t x_place;
  // grad_output: this thread's copy.
  int g_channel, g_jump, g_shift, g_count, g_image, g_point;
  uint32_t g_place;

  __device__ __forceinline__ Producer(const WgradParams& p, const Shared& shared)
      : p(p), shared(shared), job(p.job[Share(p).job]), share(p) {
    constexpr int kWords = Shape<Operand>::kWords, kVectors = Shape<Operand>::kVectors;
    const int thread = threadIdx.x;
    const int words = chunk_pixels(p) / kPerWord;
    x_shift = log2(kProducers / words);
    x_jump = 1 << x_shift;
    x_channel = thread / words;
    x_count = x_channel < x_jump ? p.tile_n / x_jump : 0;
    const int word = thread % words, pixel = word * kPerWord;
    x_image = pixel / p.segment;
    x_column = pixel % p.segment;
    // Pixel 8 t + v (in words) of a unit is element t of vector v, see sm90_wgmma_wgrad.cuh.
    const int unit = word / kWords, in_unit = word % kWords;
    x_place = (unit * kVectors + in_unit % kVectors) * Shape<Operand>::vector_step(p.tile_n) +
              in_unit / kVectors * 4 + x_channel * 16;

    const int per_copy = job.copy == 2 ? kPerWord : job.copy / point_bytes(p);
    const int copies = p.filled / per_copy, row = copies * p.images;
    g_shift = log2(kProducers / row);
    g_jump = 1 << g_shift;
    g_channel = thread / row;
    g_count = g_channel < g_jump ? kRows / g_jump : 0;
    g_image = thread % row / copies;
    g_point = thread % copies * per_copy;
    g_place = (g_channel * p.pitch + g_image * p.segment_pitch + g_point) * point_bytes(p);
  }

  // Threads side by side take a power of two of channels, so that these divide evenly.
  __device__ static __forceinline__ int log2(int most) { return 31 - __clz(most); }

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
    if (exist >= count) {
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
    const int image = unit.image + x_image, column = unit.column + x_column;
    const int64_t area = static_cast<int64_t>(p.in_h) * p.in_w;
    const int first = share.channel + x_channel;
    const Element* source = static_cast<const Element*>(p.x) +
                            (static_cast<int64_t>(image) * p.in_channels + first) * area +
                            static_cast<int64_t>(row) * p.in_w + column;
    const bool inside = image < p.batch && column < p.in_w;
    const uint32_t target = stage + x_place;
    const int exist = (p.in_channels - first + x_jump - 1) >> x_shift;
    if (kElement == 4 || p.copy_input == 4) {
      copy_channels<4, 8>(target, x_jump * 16, source, x_jump * area, x_count, exist, inside);
    } else {
      copy_elements(target, x_jump * 16, source, x_jump * area, x_count, exist, 1, inside,
                    inside && column + 1 < p.in_w);
    }
  }

  // TF32: rounds the words that this thread has copied. The other operand is rounded on its way
  // through the consumers' registers.
  __device__ __forceinline__ void round_input(uint32_t stage) const {
    uint32_t target = stage + x_place;
#pragma unroll 1
    for (int i = 0; i < x_count; i += 8) {
      uint32_t v[8];
#pragma unroll
      for (int k = 0; k < 8; ++k) ptx::load_shared(v[k], target + k * x_jump * 16);
#pragma unroll
      for (int k = 0; k < 8; ++k)
        ptx::store_shared(target + k * x_jump * 16, Operand::prepare(v[k]));
      target += 8 * x_jump * 16;
    }
  }

  __device__ __forceinline__ void copy_planes(uint32_t stage, const Unit& unit, int row) const {
    const int64_t area = static_cast<int64_t>(p.out_h) * p.out_w, step = g_jump * area;
    const int image = unit.image + g_image;
    const uint32_t jump = g_jump * p.pitch * point_bytes(p);
    uint32_t target = stage + p.input_bytes + g_place;
#pragma unroll 1
    for (int i = 0; i < job.planes; ++i) {
      const WgradPlane& plane = job.plane[i];
      const int y = row * p.step_y + plane.phase_y;
      const int x = (unit.column + plane.start + g_point) * p.step_x + plane.phase_x;
      const int channel = plane.channel + g_channel;
      const bool row_inside = image < p.batch && static_cast<unsigned>(y) < p.out_h;
      const bool inside = row_inside && static_cast<unsigned>(x) < p.out_w;
      const int exist = (p.out_channels - channel + g_jump - 1) >> g_shift;
      const Element* source = static_cast<const Element*>(p.gy) +
                              (static_cast<int64_t>(image) * p.out_channels + channel) * area +
                              static_cast<int64_t>(y) * p.out_w + x;
      if (job.copy == 16) {
        copy_channels<16, 4>(target, jump, source, step, g_count, exist, inside);
      } else if (job.copy == 8) {
        copy_channels<8, 4>(target, jump, source, step, g_count, exist, inside);
      } else if (job.copy == 4) {
        copy_channels<4, 4>(target, jump, source, step, g_count, exist, inside);
      } else {
        copy_elements(target, jump, source, step, g_count, exist, p.step_x, inside,
                      row_inside && static_cast<unsigned>(x + p.step_x) < p.out_w);
      }
      target += p.plane_bytes;
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
