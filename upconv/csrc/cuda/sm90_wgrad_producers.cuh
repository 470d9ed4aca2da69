// Hopper kernel for the weight's gradient: the producers, which bring input and grad_output.
#pragma once

#include <climits>

#include "sm90_wgrad_places.cuh"

namespace upconv::wgrad {

// --- Producers -------------------------------------------------------------------------------

// One warp a scheduler issues an instruction every 4 to 6 cycles: what a chunk costs is the number
// of instructions. So all that a unit of work has in common is computed at its start, and kept in
// shared memory: there are too few registers for it.
template <typename Operand, int N, bool kPairs>
struct Producer {
  using Element = typename Operand::Element;
  using Layout = Shape<Operand, kPairs>;
  static constexpr int kElement = Layout::kElement;
  static constexpr int kPerWord = 4 / kElement;
  static constexpr int kSquares = Layout::kVectors / 4;          // of a channel in a unit
  static constexpr bool kBothHalves = kSquares == 2 && !kPairs;  // of 8 words: a square each
  static constexpr uint32_t kVector = Layout::vector_step(N);

  const WgradParams& p;
  const Shared& shared;
  const Share share;
  const WgradJob& job;
  const CUtensorMap& map;  // grad_output in boxes
  const Place x;           // a copy of the input
  const Place main, halo;  // a copy of grad_output: under the strip, and to the right of it
  uint32_t x_target, woven, main_target, halo_target, spots;
  int weaves;  // squares that this thread weaves

  __device__ __forceinline__ Producer(const WgradParams& p, const Shared& shared,
                                      const CUtensorMap& map)
      : p(p),
        shared(shared),
        share(p),
        job(p.job[share.job]),
        map(map),
        x(squares() ? square(Lane<kBothHalves>().thread, chunk_pixels(p) / kUnit, kSquares, N)
                    : Place(p.segment / per_input(), p.images, per_input(), 0, N)),
        main(p.segment * p.spread / per_copy(), p.images, per_copy(), 0, p.rows),
        halo((p.filled - p.segment * p.spread) / per_copy(), p.images, per_copy(),
             p.segment * p.spread, p.rows),
        spots(shared.spots + threadIdx.x * 16) {
    constexpr int kWords = Layout::kWords, kVectors = Layout::kVectors;
    const int word = (x.image() * p.segment + x.point()) / kPerWord;
    const int unit = word / kWords, in_unit = word % kWords;
    constexpr int kBeside = Layout::kBeside;
    const int half = in_unit / (4 * kBeside) * kBeside;
    const int vector = Layout::kWoven ? half + in_unit % kBeside : in_unit / 4;
    const int place = Layout::kWoven ? in_unit / kBeside % 4 : in_unit % 4;
    x_target = squares() ? square_target(x) + Lane<kBothHalves>().vector * kVector
                         : (unit * kVectors + vector) * kVector + place * 4 + x.channel * 16;
    const Place mine = square(threadIdx.x, chunk_pixels(p) / kUnit, kSquares, N);
    woven = square_target(mine);
    weaves = mine.count;
    main_target = plane_target(main);
    halo_target = plane_target(halo);
    if (threadIdx.x < job.planes) describe_plane(job.plane[threadIdx.x]);
    ptx::warpgroup_sync(1);
  }

  __device__ static __forceinline__ uint32_t square_target(const Place& place) {
    return (place.image() * Layout::kVectors + place.point() * 4) * kVector + place.channel * 16;
  }

  __device__ __forceinline__ uint32_t plane_target(const Place& place) const {
    return p.input_bytes +
           (place.channel * p.pitch + place.image() * p.segment_pitch + place.point()) *
               point_bytes(p);
  }

  // What every thread adds to its own place: where the plane begins, and what exists of it.
  __device__ __forceinline__ void describe_plane(const WgradPlane& plane) const {
    const int column = plane.start * p.step_x + plane.phase_x;
    const int64_t offset = static_cast<int64_t>(plane.channel) * p.out_volume +
                           (static_cast<int64_t>(plane.depth) * p.out_h + plane.phase_y) * p.out_w +
                           column;
    const uint32_t target = shared.planes + threadIdx.x * 32;
    ptx::store_shared(target,
                      uint4{static_cast<uint32_t>(offset), static_cast<uint32_t>(offset >> 32),
                            static_cast<uint32_t>(p.out_channels - plane.channel), 0u});
    ptx::store_shared(
        target + 16, uint4{static_cast<uint32_t>(plane.phase_y), static_cast<uint32_t>(plane.depth),
                           static_cast<uint32_t>(column), 0u});
  }

  __device__ __forceinline__ bool squares() const { return Layout::kWoven && p.copy_input >= 8; }

  // Pixels of the input in one copy.
  __device__ __forceinline__ int per_input() const {
    return max(p.copy_input / kElement, kPerWord);
  }

  // Points of grad_output in one copy.
  __device__ __forceinline__ int per_copy() const {
    if (boxes(p)) return p.segment * p.spread;
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
    const bool whole = exist >= count;
#pragma unroll 1
    for (; count >= kBatch; count -= kBatch, exist -= kBatch) {
      if (whole) {
#pragma unroll
        for (int k = 0; k < kBatch; ++k)
          ptx::copy_async<kBytes>(target + k * jump, source + k * step, kBytes);
      } else {
#pragma unroll
        for (int k = 0; k < kBatch; ++k)
          ptx::copy_async<kBytes>(target + k * jump, source + k * step, k < exist ? kBytes : 0);
      }
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

  // Where the unit's part of the input begins, for this thread: row 0 of it, and how many bytes
  // exist from there on.
  __device__ __forceinline__ void find_input(const Unit& unit) const {
    int inside = x.image(), column = x.point();
    if (squares()) {
      // Vector t of a square: 4 words, `kBeside` words on from the one before.
      const int t = Lane<kBothHalves>().vector;
      const int word =
          kSquares > 1 && kPairs ? x.point() * 16 + t * 4 : t * Layout::kBeside + x.point() * 4;
      const int pixel = x.image() * kUnit + kPerWord * word;
      inside = pixel / p.segment;
      column = pixel - inside * p.segment;
    }
    column += unit.column;
    const int image = unit.image + inside, n = image / p.in_d, z = image - n * p.in_d;
    const int64_t channel = static_cast<int64_t>(n) * p.in_channels + share.channel + x.channel;
    const Element* from = static_cast<const Element*>(p.x) + channel * p.in_volume +
                          static_cast<int64_t>(z) * p.in_h * p.in_w + column;
    const int there = n < p.batch ? max(min((p.in_w - column) * kElement, 16), 0) : 0;
    const uint64_t address = reinterpret_cast<uint64_t>(from);
    ptx::store_shared(spots,
                      uint4{static_cast<uint32_t>(address), static_cast<uint32_t>(address >> 32),
                            static_cast<uint32_t>(there), 0u});
  }

  // One vector of every second channel, `bytes` of which exist.
  template <int kBytes>
  __device__ __forceinline__ void copy_squares(uint32_t target, const Element* source,
                                               int bytes) const {
    const int64_t second = static_cast<int64_t>(p.in_volume) * 2;
    const int64_t step = (static_cast<int64_t>(p.in_volume) << x.log_jump) - 4 * second;
    const uint32_t jump = 16 << x.log_jump;
    int exist = p.in_channels - share.channel - x.channel;
    const bool whole = bytes == 16 && exist + x.channel >= N;
#pragma unroll 1
    for (int i = 0; i < x.count; ++i) {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
#pragma unroll
        for (int part = 0; part < 16; part += kBytes) {
          const Element* from = source + part / kElement;
          if (whole) {
            ptx::copy_async<kBytes>(target + 32 * k + part, from, kBytes);
          } else {
            const bool there = 2 * k < exist && part < bytes;
            ptx::copy_async<kBytes>(target + 32 * k + part, from, there ? kBytes : 0);
          }
        }
        source += second;
      }
      source += step;
      target += jump;
      exist -= 1 << x.log_jump;
    }
  }

  __device__ __forceinline__ void copy_input(uint32_t stage, int row) const {
    uint4 spot;
    ptx::load_shared(spot, spots);
    const int bytes = spot.z;
    const Element* source = pointer(spot) + static_cast<int64_t>(row) * p.in_w;
    const int64_t step = static_cast<int64_t>(p.in_volume) << x.log_jump;
    const uint32_t target = stage + x_target, jump = 16 << x.log_jump;
    const int most = x.existing(p.in_channels - share.channel - x.channel);
    if (squares()) {
      if (p.copy_input == 16) return copy_squares<16>(target, source, bytes);
      return copy_squares<8>(target, source, bytes);
    }
    const int exist = bytes > 0 ? most : 0;
    if (p.copy_input == 2) {
      if constexpr (kElement == 2)
        copy_elements(target, jump, source, step, x.count, exist, 1, true, bytes > 2);
    } else if (!Layout::kWoven && p.copy_input == 16) {
      copy_channels<16, 4>(target, jump, source, step, x.count, exist);
    } else if (!Layout::kWoven && p.copy_input == 8) {
      copy_channels<8, 4>(target, jump, source, step, x.count, exist);
    } else {
      copy_channels<4, 4>(target, jump, source, step, x.count, exist);
    }
  }

  // Weaves squares that this warp has copied. TF32 is rounded on the way; the other operand is
  // rounded on its way through the consumers' registers.
  __device__ __forceinline__ void weave(uint32_t target) const {
    const uint32_t jump = 16 << x.log_jump;
#pragma unroll 1
    for (int i = 0; i < weaves; ++i) {
      uint4 v[4];
#pragma unroll
      for (int t = 0; t < 4; ++t) ptx::load_shared(v[t], target + t * kVector);
      const auto put = [&](int t, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
        ptx::store_shared(target + t * kVector, uint4{Operand::prepare(a), Operand::prepare(b),
                                                      Operand::prepare(c), Operand::prepare(d)});
      };
      put(0, v[0].x, v[1].x, v[2].x, v[3].x);
      put(1, v[0].y, v[1].y, v[2].y, v[3].y);
      put(2, v[0].z, v[1].z, v[2].z, v[3].z);
      put(3, v[0].w, v[1].w, v[2].w, v[3].w);
      target += jump;
    }
  }

  // TF32 copied word by word: rounds the words that this thread has copied.
  __device__ __forceinline__ void round_input(uint32_t target) const {
    const uint32_t jump = 16 << x.log_jump;
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

  // Where a place's part of grad_output begins in the unit of work: its first channel, slice and
  // column, to which a chunk adds its row and a plane its offset.
  __device__ __forceinline__ void find(const Unit& unit, const Place& place, uint32_t spot) const {
    const int image = unit.image + place.image();
    const int n = image / p.in_d, z = (image - n * p.in_d) * p.step_z;
    const int column = (unit.column * p.spread + place.point()) * p.step_x;
    const int64_t channel = static_cast<int64_t>(n) * p.out_channels + place.channel;
    const Element* from = static_cast<const Element*>(p.gy) + channel * p.out_volume +
                          static_cast<int64_t>(z) * p.out_h * p.out_w + column;
    const uint64_t address = reinterpret_cast<uint64_t>(from);
    // No depth of grad_output's is that small: what does not exist is never inside.
    ptx::store_shared(
        spot,
        uint4{static_cast<uint32_t>(address), static_cast<uint32_t>(address >> 32),
              static_cast<uint32_t>(n < p.batch ? z : INT_MIN / 2), static_cast<uint32_t>(column)});
  }

  __device__ static __forceinline__ const Element* pointer(const uint4& spot) {
    return reinterpret_cast<const Element*>(static_cast<uint64_t>(spot.y) << 32 | spot.x);
  }

  // The part of one plane and row at one place.
  __device__ __forceinline__ void copy_plane(uint32_t target, uint32_t plane, int row,
                                             const Place& place, uint32_t spot_at) const {
    uint4 spot, begin, bounds;
    ptx::load_shared(spot, spot_at);
    ptx::load_shared(begin, plane);
    ptx::load_shared(bounds, plane + 16);
    const int64_t offset = static_cast<int64_t>(static_cast<uint64_t>(begin.y) << 32 | begin.x);
    const Element* source = pointer(spot) + offset + static_cast<int64_t>(row) * p.out_w;
    const uint32_t column = spot.w + bounds.z;
    const bool row_inside = row + bounds.x < static_cast<uint32_t>(p.out_h) &&
                            spot.z + bounds.y < static_cast<uint32_t>(p.out_d);
    const bool inside = row_inside && column < static_cast<uint32_t>(p.out_w);
    const uint32_t jump = (p.pitch * point_bytes(p)) << place.log_jump;
    const int64_t step = static_cast<int64_t>(p.out_volume) << place.log_jump;
    const int most = place.existing(static_cast<int>(begin.z) - place.channel);
    const int exist = inside ? most : 0, count = place.count;
    if (p.copy == 16) {
      copy_channels<16, 4>(target, jump, source, step, count, exist);
    } else if (p.copy == 8) {
      copy_channels<8, 4>(target, jump, source, step, count, exist);
    } else if (p.copy == 4) {
      // A 16-bit element comes with the word that holds it.
      const uint64_t word = reinterpret_cast<uint64_t>(source) & ~uint64_t{3};
      copy_channels<4, 4>(target, jump, reinterpret_cast<const Element*>(word), step, count, exist);
    } else if constexpr (kElement == 2 && !kPairs) {
      copy_elements(target, jump, source, step, count, most, p.step_x, inside,
                    row_inside && column + p.step_x < static_cast<uint32_t>(p.out_w));
    }
  }

  __device__ __forceinline__ void copy_planes(uint32_t stage, int row) const {
    uint32_t plane = shared.planes;
    const uint32_t end = plane + job.planes * 32;
    row *= p.step_y;
#pragma unroll 1
    for (; plane < end; plane += 32) {
      copy_plane(stage + main_target, plane, row, main, spots + kProducers * 16);
      if (halo.count > 0)
        copy_plane(stage + halo_target, plane, row, halo, spots + 2 * kProducers * 16);
      stage += p.plane_bytes;
    }
  }

  // --- grad_output in boxes ------------------------------------------------------------------

  // Each thread has one box: a plane, an image and a class of channels. What lies beyond the tensor
  // comes as zeros.
  __device__ __forceinline__ void find_box(const Unit& unit) const {
    if (threadIdx.x >= job.planes * boxes_of_plane(p)) return;
    const WgradPlane& plane = job.plane[threadIdx.x / boxes_of_plane(p)];
    const int box = threadIdx.x % boxes_of_plane(p);
    const int image = unit.image + box / p.classes;
    const int n = image / p.in_d, z = (image - n * p.in_d) * p.step_z + plane.depth;
    int column = unit.column * p.spread + plane.start;
    // Where whole channels follow each other no row or slice is ever beyond them.
    if (p.flat == 2) {
      column += (box % p.classes * p.out_d + z) * p.out_h * row_points();
    }
    ptx::store_shared(spots + kProducers * 16,
                      uint4{static_cast<uint32_t>(column),
                            static_cast<uint32_t>(p.flat == 2 ? 0 : z), static_cast<uint32_t>(n),
                            static_cast<uint32_t>(plane.channel / p.classes) << 16 |
                                static_cast<uint16_t>(plane.phase_y)});
  }

  // Points of a row of grad_output.
  __device__ __forceinline__ int row_points() const { return p.out_w * kElement / point_bytes(p); }

  __device__ __forceinline__ void copy_boxes(const Slot& slot, int row) const {
    const uint32_t full = shared.full + 8 * slot.index();
    if (threadIdx.x == 0) ptx::barrier_arrive_expect(full, job.planes * p.plane_bytes);
    if (threadIdx.x >= job.planes * boxes_of_plane(p)) return;
    uint4 spot;
    ptx::load_shared(spot, spots + kProducers * 16);
    int y = row * p.step_y + static_cast<int>(spot.w & 0xffff), column = spot.x;
    if (p.flat) {
      // A box that does not begin on 16 bytes is an illegal instruction: it begins a little before.
      const int begin = y * row_points() + column;
      column = begin & -(16 / point_bytes(p));
      y = 0;
      // As much for all images; the consumers add what a class begins later than the first.
      if (threadIdx.x % boxes_of_plane(p) == 0)
        ptx::store_shared(shared.late_at(slot.index(), threadIdx.x / boxes_of_plane(p)),
                          static_cast<unsigned short>(begin - column));
    }
    const int bytes = p.plane_bytes / boxes_of_plane(p);
    ptx::box_copy(
        shared.stages + slot.index() * p.stage_bytes + p.input_bytes + threadIdx.x * bytes, map,
        column, y, spot.y, spot.z, spot.w >> 16, full);
  }

  // --- The ring ------------------------------------------------------------------------------

  // Hands the oldest chunk on its way over to the consumers.
  __device__ __forceinline__ void hand_over(Slot& oldest) const {
    const uint32_t stage = shared.stages + oldest.index() * p.stage_bytes;
    if (squares()) {
      __syncwarp();
      weave(stage + woven);
    } else if constexpr (kElement == 4) {
      round_input(stage + x_target);
    }
    ptx::fence_async_proxy();
    ptx::barrier_arrive(shared.full + 8 * oldest.index());
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

  __device__ __forceinline__ void run() const {
    Slot newest, oldest;
    int count = 0;
    for (int from = share.first; from < share.end;) {
      const Unit unit(p, from, share.end);
      from += unit.rows;
      find_input(unit);
      if (boxes(p)) {
        find_box(unit);
      } else {
        find(unit, main, spots + kProducers * 16);
        find(unit, halo, spots + 2 * kProducers * 16);
      }
      for (int i = 0; i < unit.rows + job.extra_rows; ++i) {
        ptx::barrier_wait(shared.empty + 8 * newest.index(), newest.parity() ^ 1);
        const uint32_t stage = shared.stages + newest.index() * p.stage_bytes;
        if (i >= job.extra_rows) copy_input(stage, unit.row + i - job.extra_rows);
        if (boxes(p)) {
          copy_boxes(newest, unit.row + job.shift_y + i);
        } else {
          copy_planes(stage, unit.row + job.shift_y + i);
        }
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
