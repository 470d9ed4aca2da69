// Hopper kernel for the weight's gradient: the producers, which bring input and grad_output.
#pragma once

#include <climits>

#include "sm90_wgrad_layout.cuh"

namespace upconv::wgrad {

// --- Who copies what -------------------------------------------------------------------------

// What one thread copies of each row of a chunk: always the same place, in every `jump`-th channel.
// Every division is done once, before the first chunk. (Registers are short here: 56 of them beside
// three consumers.)
struct Place {
  int channel, jump, count;
  int where;  // image * 65536 + point

  // `per_image` items of `points` points each, `images` times; they begin at point `first`.
  __device__ __forceinline__ Place(int per_image, int images, int points, int first, int channels) {
    const int row = max(per_image * images, 1), thread = threadIdx.x, item = thread % row;
    const int image = per_image > 0 ? item / per_image : 0;
    // A power of two that divides the channels evenly.
    jump = min(1 << (31 - __clz(kProducers / row)), channels & -channels);
    channel = thread / row;
    count = per_image > 0 && channel < jump ? channels / jump : 0;
    where = image << 16 | (first + (item - image * per_image) * points);
  }
  __device__ __forceinline__ Place(int channel, int jump, int count, int where)
      : channel(channel), jump(jump), count(count), where(where) {}

  __device__ __forceinline__ int image() const { return where >> 16; }
  __device__ __forceinline__ int point() const { return where & 0xffff; }
  // How many of this thread's channels exist, `channels` of them counted from its first.
  __device__ __forceinline__ int existing(int channels) const {
    return channels > 0 ? (channels + jump - 1) >> (31 - __clz(jump)) : 0;
  }
};

// The same for input that is woven from copies of 8 or 16 bytes. One item is a square of 4 x 4
// words of a channel: vector t of it comes from the t-th piece of a unit and waits in the place of
// the t-th of 4 vectors; when all four are there, the thread that copied them turns rows into
// columns. 8 channels lie side by side, which spreads a warp's vectors over the banks. `image` is
// the unit of the chunk, `point` the square in it.
__device__ __forceinline__ Place square(int units, int squares, int channels) {
  const int row = units * squares, thread = threadIdx.x / 8, item = thread % row;
  const int jump = min(8 << (31 - __clz(kProducers / 8 / row)), channels & -channels);
  const int channel = thread / row * 8 + threadIdx.x % 8;
  const int where = item / squares << 16 | item % squares;
  return Place(channel, jump, channel < jump ? channels / jump : 0, where);
}

// --- Producers -------------------------------------------------------------------------------

template <typename Operand, bool kPairs>
struct Producer {
  using Element = typename Operand::Element;
  using Layout = Shape<Operand, kPairs>;
  static constexpr int kElement = Layout::kElement;
  static constexpr int kPerWord = 4 / kElement;
  static constexpr int kSquares = Layout::kVectors / 4;  // of a channel in a unit

  // A place of grad_output's in the present unit of work.
  struct Spot {
    const Element* channel;  // the image's, for the place's first channel of the first plane
    int depth, column;
  };

  const WgradParams& p;
  const Shared& shared;
  const Share share;
  const WgradJob& job;
  const Place x;           // a copy or a square of the input
  const Place main, halo;  // a copy of grad_output: under the strip, and to the right of it
  uint32_t x_target, main_target, halo_target;
  const Element* from;  // row 0 of this thread's input in the present unit
  int beyond[4];        // from there to each vector of a square
  int bytes;            // to copy from each vector, a byte for each; 0 where nothing exists
  Spot at_main, at_halo;

  __device__ __forceinline__ Producer(const WgradParams& p, const Shared& shared)
      : p(p),
        shared(shared),
        share(p),
        job(p.job[share.job]),
        x(squares() ? square(chunk_pixels(p) / kUnit, kSquares, p.tile_n)
                    : Place(p.segment / per_input(), p.images, per_input(), 0, p.tile_n)),
        main(p.segment * p.spread / per_copy(), p.images, per_copy(), 0, p.rows),
        halo((p.filled - p.segment * p.spread) / per_copy(), p.images, per_copy(),
             p.segment * p.spread, p.rows) {
    constexpr int kWords = Layout::kWords, kVectors = Layout::kVectors;
    const int word = (x.image() * p.segment + x.point()) / kPerWord;
    const int unit = word / kWords, in_unit = word % kWords;
    const int vector = Layout::kWoven ? in_unit % kVectors : in_unit / 4;
    const int place = Layout::kWoven ? in_unit / kVectors : in_unit % 4;
    const int step = Layout::vector_step(p.tile_n), point = point_bytes(p);
    x_target = squares() ? (x.image() * kVectors + x.point() * 4) * step
                         : (unit * kVectors + vector) * step + place * 4;
    x_target += x.channel * 16;
    main_target = p.input_bytes +
                  (main.channel * p.pitch + main.image() * p.segment_pitch + main.point()) * point;
    halo_target = p.input_bytes +
                  (halo.channel * p.pitch + halo.image() * p.segment_pitch + halo.point()) * point;
  }

  __device__ __forceinline__ bool squares() const { return Layout::kWoven && p.copy_input >= 8; }

  // Pixels of the input in one copy.
  __device__ __forceinline__ int per_input() const {
    return max(p.copy_input / kElement, kPerWord);
  }

  // Points of grad_output in one copy.
  __device__ __forceinline__ int per_copy() const {
    return p.copy == 2 ? kPerWord : p.copy / point_bytes(p);
  }

  // --- Copies --------------------------------------------------------------------------------

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
                                                       int count, int exist) {
#pragma unroll 1
    for (; count >= kBatch; count -= kBatch, exist -= kBatch) {
#pragma unroll
      for (int k = 0; k < kBatch; ++k)
        ptx::copy_async<kBytes>(target + k * jump, source + k * step, k < exist ? kBytes : 0);
      source += kBatch * step;
      target += kBatch * jump;
    }
#pragma unroll 1
    for (; count > 0; --count, --exist) {
      ptx::copy_async<kBytes>(target, source, exist > 0 ? kBytes : 0);
      source += step;
      target += jump;
    }
  }

  // Element by element, 4 words at a time on their way: one after the other, each waits for memory.
  __device__ static __forceinline__ void copy_elements(uint32_t target, uint32_t jump,
                                                       const Element* source, int64_t step,
                                                       int count, int exist, int next, bool first,
                                                       bool second) {
#pragma unroll 1
    for (; count > 0; count -= 4, exist -= 4) {
      uint32_t v[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        v[k] = two_elements(source, next, k < exist && first, k < exist && second);
        source += step;
      }
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        if (k < count) ptx::store_shared(target, v[k]);
        target += jump;
      }
    }
  }

  // --- The input -----------------------------------------------------------------------------

  // Where the unit's part of the input begins, for this thread.
  __device__ __forceinline__ void find_input(const Unit& unit) {
    const int pieces = p.segment / 8;
    bytes = 0;
#pragma unroll
    for (int t = 0; t < (Layout::kWoven ? 4 : 1); ++t) {
      const int piece = x.image() * 4 + t, inside = squares() ? piece / pieces : x.image();
      const int in_piece = (piece - inside * pieces) * 8 + x.point() * (4 * kPerWord);
      const int image = unit.image + inside;
      const int column = unit.column + (squares() ? in_piece : x.point());
      const int n = image / p.in_d, z = image - n * p.in_d;
      const int64_t channel = static_cast<int64_t>(n) * p.in_channels + share.channel + x.channel;
      const Element* vector = static_cast<const Element*>(p.x) + channel * p.in_volume +
                              static_cast<int64_t>(z) * p.in_h * p.in_w + column;
      if (t == 0) from = vector;
      beyond[t] = static_cast<int>(vector - from);
      const int there = n < p.batch ? max(min((p.in_w - column) * kElement, 16), 0) : 0;
      bytes |= there << 8 * t;
    }
  }

  template <int kBytes>
  __device__ __forceinline__ void copy_squares(uint32_t target, const Element* source, int64_t step,
                                               int exist) const {
    constexpr int kCopies = 16 / kBytes;
    const uint32_t vector = Layout::vector_step(p.tile_n);
#pragma unroll 1
    for (int i = 0; i < x.count; ++i) {
      const int there = i < exist ? bytes : 0;
#pragma unroll
      for (int t = 0; t < 4; ++t)
#pragma unroll
        for (int k = 0; k < kCopies; ++k)
          ptx::copy_async<kBytes>(target + t * vector + k * kBytes,
                                  source + beyond[t] + k * (kBytes / kElement),
                                  (there >> 8 * t & 0xff) > k * kBytes ? kBytes : 0);
      source += step;
      target += x.jump * 16;
    }
  }

  __device__ __forceinline__ void copy_input(uint32_t stage, int row) const {
    const Element* source = from + static_cast<int64_t>(row) * p.in_w;
    const int64_t step = static_cast<int64_t>(p.in_volume) * x.jump;
    const uint32_t target = stage + x_target, jump = x.jump * 16;
    const int most = x.existing(p.in_channels - share.channel - x.channel);
    if (squares()) {
      if (p.copy_input == 16) return copy_squares<16>(target, source, step, most);
      return copy_squares<8>(target, source, step, most);
    }
    const int exist = bytes > 0 ? most : 0;
    if (p.copy_input == 2) {
      if constexpr (kElement == 2)
        copy_elements(target, jump, source, step, x.count, exist, 1, true, bytes % 256 > 2);
    } else if (!Layout::kWoven && p.copy_input == 16) {
      copy_channels<16, 4>(target, jump, source, step, x.count, exist);
    } else if (!Layout::kWoven && p.copy_input == 8) {
      copy_channels<8, 4>(target, jump, source, step, x.count, exist);
    } else {
      copy_channels<4, 4>(target, jump, source, step, x.count, exist);
    }
  }

  // Weaves the squares that this thread has copied. TF32 is rounded on the way; the other operand
  // is rounded on its way through the consumers' registers.
  __device__ __forceinline__ void weave(uint32_t target) const {
    const uint32_t vector = Layout::vector_step(p.tile_n);
#pragma unroll 1
    for (int i = 0; i < x.count; ++i) {
      uint4 v[4];
#pragma unroll
      for (int t = 0; t < 4; ++t) ptx::load_shared(v[t], target + t * vector);
      const auto put = [&](int t, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
        ptx::store_shared(target + t * vector, uint4{Operand::prepare(a), Operand::prepare(b),
                                                     Operand::prepare(c), Operand::prepare(d)});
      };
      put(0, v[0].x, v[1].x, v[2].x, v[3].x);
      put(1, v[0].y, v[1].y, v[2].y, v[3].y);
      put(2, v[0].z, v[1].z, v[2].z, v[3].z);
      put(3, v[0].w, v[1].w, v[2].w, v[3].w);
      target += x.jump * 16;
    }
  }

  // TF32 copied word by word: rounds the words that this thread has copied.
  __device__ __forceinline__ void round_input(uint32_t target) const {
    const uint32_t jump = x.jump * 16;
#pragma unroll 1
    for (int i = 0; i < x.count; i += 4) {
      uint32_t v[4];
#pragma unroll
      for (int k = 0; k < 4; ++k)
        if (i + k < x.count) ptx::load_shared(v[k], target + k * jump);
#pragma unroll
      for (int k = 0; k < 4; ++k)
        if (i + k < x.count) ptx::store_shared(target + k * jump, Operand::prepare(v[k]));
      target += 4 * jump;
    }
  }

  // --- grad_output ---------------------------------------------------------------------------

  __device__ __forceinline__ Spot find(const Unit& unit, const Place& place) const {
    const int image = unit.image + place.image();
    const int n = image / p.in_d, z = image - n * p.in_d;
    const int64_t channel = static_cast<int64_t>(n) * p.out_channels + place.channel;
    // No depth of grad_output's is that small: what does not exist is never inside.
    const int depth = n < p.batch ? z * p.step_z : INT_MIN / 2;
    return {static_cast<const Element*>(p.gy) + channel * p.out_volume, depth,
            (unit.column * p.spread + place.point()) * p.step_x};
  }

  __device__ __forceinline__ void copy_plane(uint32_t target, const WgradPlane& plane, int row,
                                             const Place& place, const Spot& spot) const {
    const int y = row * p.step_y + plane.phase_y, z = spot.depth + plane.depth;
    const int column = spot.column + plane.start * p.step_x + plane.phase_x;
    const bool row_inside =
        static_cast<unsigned>(y) < p.out_h && static_cast<unsigned>(z) < p.out_d;
    const bool inside = row_inside && static_cast<unsigned>(column) < p.out_w;
    const uint32_t jump = p.pitch * point_bytes(p) * place.jump;
    const Element* source = spot.channel + static_cast<int64_t>(plane.channel) * p.out_volume +
                            (static_cast<int64_t>(z) * p.out_h + y) * p.out_w + column;
    const int64_t step = static_cast<int64_t>(p.out_volume) * place.jump;
    const int most = place.existing(p.out_channels - plane.channel - place.channel);
    const int exist = inside ? most : 0, count = place.count;
    if (p.copy == 16) {
      copy_channels<16, 4>(target, jump, source, step, count, exist);
    } else if (p.copy == 8) {
      copy_channels<8, 4>(target, jump, source, step, count, exist);
    } else if (p.copy == 4) {
      copy_channels<4, 4>(target, jump, source, step, count, exist);
    } else if constexpr (kElement == 2 && !kPairs) {
      copy_elements(target, jump, source, step, count, most, p.step_x, inside,
                    row_inside && static_cast<unsigned>(column + p.step_x) < p.out_w);
    }
  }

  __device__ __forceinline__ void copy_planes(uint32_t stage, int row) const {
#pragma unroll 1
    for (int i = 0; i < job.planes; ++i) {
      copy_plane(stage + main_target, job.plane[i], row, main, at_main);
      if (p.filled > p.segment * p.spread)
        copy_plane(stage + halo_target, job.plane[i], row, halo, at_halo);
      stage += p.plane_bytes;
    }
  }

  // --- The ring ------------------------------------------------------------------------------

  // Hands the oldest chunk on its way over to the consumers.
  __device__ __forceinline__ void hand_over(Slot& oldest) const {
    const uint32_t target = shared.stages + oldest.index * p.stage_bytes + x_target;
    if (squares()) {
      weave(target);
    } else if constexpr (kElement == 4) {
      round_input(target);
    }
    ptx::fence_async_proxy();
    ptx::barrier_arrive(shared.full + 8 * oldest.index);
    oldest.advance(p.stages);
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

  __device__ __forceinline__ void run() {
    Slot newest, oldest;
    int count = 0;
    for (int index = share.first; index < share.end; ++index) {
      const Unit unit(p, index);
      find_input(unit);
      at_main = find(unit, main);
      at_halo = find(unit, halo);
      for (int i = 0; i < unit.rows + job.extra_rows; ++i) {
        ptx::barrier_wait(shared.empty + 8 * newest.index, newest.parity ^ 1);
        const uint32_t stage = shared.stages + newest.index * p.stage_bytes;
        if (i >= job.extra_rows) copy_input(stage, unit.row + i - job.extra_rows);
        copy_planes(stage, unit.row + job.shift_y + i);
        ptx::copy_async_commit();
        newest.advance(p.stages);
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
