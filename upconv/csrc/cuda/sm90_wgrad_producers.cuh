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
  int x_channel, x_jump, x_image, x_column;
  uint32_t x_place;
  // grad_output: this thread's copy.
  int g_channel, g_jump, g_image, g_point;
  uint32_t g_place;

  __device__ __forceinline__ Producer(const WgradParams& p, const Shared& shared)
      : p(p), shared(shared), job(p.job[Share(p).job]), share(p) {
    constexpr int kWords = Shape<Operand>::kWords, kVectors = Shape<Operand>::kVectors;
    const int thread = threadIdx.x;
    const int words = chunk_pixels(p) / kPerWord;
    x_jump = kProducers / words;
    x_channel = thread / words;
    const int word = thread % words, pixel = word * kPerWord;
    if (x_channel >= x_jump) x_channel = p.tile_n;  // no word is left for this thread
    x_image = pixel / p.segment;
    x_column = pixel % p.segment;
    // Pixel 8 t + v (in words) of a unit is element t of vector v, see sm90_wgmma_wgrad.cuh.
    const int unit = word / kWords, in_unit = word % kWords;
    x_place = (unit * kVectors + in_unit % kVectors) * Shape<Operand>::vector_step(p.tile_n) +
              in_unit / kVectors * 4;

    const int per_copy = job.copy == 2 ? kPerWord : job.copy / point_bytes(p);
    const int copies = p.filled / per_copy, row = copies * p.images;
    g_jump = kProducers / row;
    g_channel = thread / row;
    if (g_channel >= g_jump) g_channel = kRows;
    g_image = thread % row / copies;
    g_point = thread % copies * per_copy;
    g_place = (g_image * p.segment_pitch + g_point) * point_bytes(p);
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

  __device__ __forceinline__ void copy_input(uint32_t stage, const Unit& unit, int row) const {
    const int image = unit.image + x_image, column = unit.column + x_column;
    const int64_t area = static_cast<int64_t>(p.in_h) * p.in_w;
    const int first = share.channel + x_channel;
    const Element* source = static_cast<const Element*>(p.x) +
                            (static_cast<int64_t>(image) * p.in_channels + first) * area +
                            static_cast<int64_t>(row) * p.in_w + column;
    const bool inside = image < p.batch && column < p.in_w;
    uint32_t target = stage + x_place + x_channel * 16;
    for (int n = x_channel; n < p.tile_n; n += x_jump) {
      const bool on = inside && share.channel + n < p.in_channels;
      if (kElement == 4 || p.copy_input == 4) {
        ptx::copy_async<4>(target, source, on ? 4 : 0);
      } else {
        ptx::store_shared(target, two_elements(source, 1, on, on && column + 1 < p.in_w));
      }
      source += x_jump * area;
      target += x_jump * 16;
    }
  }

  // TF32: rounds the words that this thread has copied. The other operand is rounded on its way
  // through the consumers' registers.
  __device__ __forceinline__ void round_input(uint32_t stage) const {
    uint32_t target = stage + x_place + x_channel * 16;
    for (int n = x_channel; n < p.tile_n; n += x_jump) {
      ptx::store_shared(target, Operand::prepare(ptx::load_shared(target)));
      target += x_jump * 16;
    }
  }

  template <int kBytes>
  __device__ __forceinline__ void copy_plane(uint32_t target, const Element* source, int channel,
                                             int64_t area, bool inside) const {
    const uint32_t jump = g_jump * p.pitch * point_bytes(p);
    for (int c = g_channel; c < kRows; c += g_jump) {
      const bool on = inside && channel + c < p.out_channels;
      ptx::copy_async<kBytes>(target, source, on ? kBytes : 0);
      source += g_jump * area;
      target += jump;
    }
  }

  __device__ __forceinline__ void copy_elements(uint32_t target, const Element* source, int channel,
                                                int64_t area, bool first, bool second) const {
    const uint32_t jump = g_jump * p.pitch * point_bytes(p);
    for (int c = g_channel; c < kRows; c += g_jump) {
      const bool on = channel + c < p.out_channels;
      ptx::store_shared(target, two_elements(source, p.step_x, on && first, on && second));
      source += g_jump * area;
      target += jump;
    }
  }

  __device__ __forceinline__ void copy_planes(uint32_t stage, const Unit& unit, int row) const {
    const int64_t area = static_cast<int64_t>(p.out_h) * p.out_w;
    const int image = unit.image + g_image;
    uint32_t target = stage + input_bytes(p) + g_place + g_channel * p.pitch * point_bytes(p);
    for (int i = 0; i < job.planes; ++i) {
      const WgradPlane& plane = job.plane[i];
      const int y = row * p.step_y + plane.phase_y;
      const int x = (unit.column + plane.start + g_point) * p.step_x + plane.phase_x;
      const bool row_inside = image < p.batch && static_cast<unsigned>(y) < p.out_h;
      const bool inside = row_inside && static_cast<unsigned>(x) < p.out_w;
      const Element* source =
          static_cast<const Element*>(p.gy) +
          (static_cast<int64_t>(image) * p.out_channels + plane.channel + g_channel) * area +
          static_cast<int64_t>(y) * p.out_w + x;
      if (job.copy == 16) {
        copy_plane<16>(target, source, plane.channel, area, inside);
      } else if (job.copy == 8) {
        copy_plane<8>(target, source, plane.channel, area, inside);
      } else if (job.copy == 4) {
        copy_plane<4>(target, source, plane.channel, area, inside);
      } else {
        const bool second = row_inside && static_cast<unsigned>(x + p.step_x) < p.out_w;
        copy_elements(target, source, plane.channel, area, inside, second);
      }
      target += plane_bytes(p);
    }
  }

  // Hands the oldest chunk on its way over to the consumers.
  __device__ __forceinline__ void hand_over(Slot& oldest) const {
    const uint32_t stage = shared.stages + oldest.index * stage_bytes(p);
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
        const uint32_t stage = shared.stages + newest.index * stage_bytes(p);
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
