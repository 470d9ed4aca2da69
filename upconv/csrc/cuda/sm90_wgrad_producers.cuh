// Hopper kernel for the weight's gradient: the producers, which bring input and grad_output.
#pragma once

#include <climits>

#include "sm90_wgrad_places.cuh"
#include "sm90_wgrad_slabs.cuh"
#include "sm90_wgrad_sums.cuh"

namespace upconv::wgrad {

// --- Producers -------------------------------------------------------------------------------

// One warp a scheduler issues an instruction every 4 to 6 cycles: what a chunk costs is the number
// of instructions. So all that a unit of work has in common is computed at its start, and kept in
// shared memory: there are too few registers for it.
template <typename Operand, int N, bool kPairs, int T, int kOdd>
struct Producer {
  using Element = typename Operand::Element;
  using Layout = Shape<Operand, kPairs, T>;
  static constexpr int kElement = Layout::kElement;
  static constexpr int kPerWord = 4 / kElement;
  static constexpr int kSquares = Layout::kVectors / 4;          // of a channel in a unit
  static constexpr bool kBothHalves = kSquares == 2 && !kPairs;  // of 8 words: a square each
  static constexpr uint32_t kVector = Layout::vector_step(N);
  static constexpr int kFirstSlab = 64;  // the boxes of grad_output are the first threads'

  const WgradParams& p;
  const Shared& shared;
  const Share share;
  const WgradJob& job;
  const CUtensorMap &gy_map, &x_map;
  const Place x;           // a copy of the input
  const Place main, halo;  // a copy of grad_output: under the strip, and to the right of it
  uint32_t x_target, woven, main_target, halo_target, spots;
  int weaves;  // squares that this thread weaves

  __device__ __forceinline__ Producer(const WgradParams& p, const Shared& shared,
                                      const CUtensorMap& gy_map, const CUtensorMap& x_map)
      : p(p),
        shared(shared),
        share(p),
        job(p.job[share.job]),
        gy_map(gy_map),
        x_map(x_map),
        x(slabs(p)    ? Place()
          : squares() ? square(Lane<kBothHalves>().thread, chunk_pixels(p) / kUnit, kSquares, N)
                      : Place(p.segment / per_input(), p.images, per_input(), 0, N)),
        main(boxes(p) ? Place()
                      : Place(p.segment * p.spread / per_copy(), p.images, per_copy(), 0, p.rows)),
        halo(boxes(p) ? Place()
                      : Place((p.filled - p.segment * p.spread) / per_copy(), p.images, per_copy(),
                              p.segment * p.spread, p.rows)),
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
    const Place mine =
        slabs(p) ? Place() : square(threadIdx.x, chunk_pixels(p) / kUnit, kSquares, N);
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
    return p.copy == 2 ? kPerWord : p.copy / point_bytes(p);
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
      inside = p.by_segment(pixel);
      column = pixel - inside * p.segment;
    }
    column += unit.column;
    const int image = unit.image + inside, n = p.by_in_d(image), z = image - n * p.in_d;
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

  // The threads from the 64th on have a slab each.
  __device__ __forceinline__ int slab_number() const {
    const int number = ptx::this_thread() - kFirstSlab;
    return number >= 0 && number < p.chunk_slabs ? number : -1;
  }

  __device__ __forceinline__ void find_slab(const Unit& unit) const {
    if (slab_number() < 0) return;
    const int pixel = slab_number() * (p.slab / kElement), inside = p.by_segment(pixel);
    const int image = unit.image + inside, n = p.by_in_d(image);
    ptx::store_shared(
        spots, uint4{static_cast<uint32_t>(unit.column + pixel - inside * p.segment),
                     static_cast<uint32_t>(image - n * p.in_d), static_cast<uint32_t>(n), 0u});
  }

  // Words that have yet to change their order wait for a barrier of their own.
  __device__ __forceinline__ void copy_slabs(const Slot& slot, int row, bool there) const {
    const uint32_t barrier = (Layout::kWoven ? shared.raw : shared.full) + 8 * slot.index();
    if (Layout::kWoven && ptx::this_thread() == kFirstSlab)
      ptx::barrier_arrive_expect(barrier, there ? input_copied(p) : 0);
    if (!there || slab_number() < 0) return;
    uint4 spot;
    ptx::load_shared(spot, spots);
    const int bytes = p.slab * N;
    ptx::box_copy(shared.stages + slot.index() * p.stage_bytes + slab_number() * bytes, x_map,
                  spot.x, row, spot.y, share.channel, spot.z, barrier);
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
        copy_elements<Element>(target, jump, source, step, x.count, exist, 1, true, bytes > 2);
    } else if (!Layout::kWoven && p.copy_input == 16) {
      copy_channels<Element, 16, 4>(target, jump, source, step, x.count, exist);
    } else if (!Layout::kWoven && p.copy_input == 8) {
      copy_channels<Element, 8, 4>(target, jump, source, step, x.count, exist);
    } else {
      copy_channels<Element, 4, 4>(target, jump, source, step, x.count, exist);
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

  // TF32 as it was copied: rounds the words that this thread has copied, one of each copy at a
  // time.
  __device__ __forceinline__ void round_input(uint32_t first) const {
    const uint32_t jump = 16 << x.log_jump;
#pragma unroll 1
    for (int word = 0; word < (Layout::kWoven ? 4 : p.copy_input); word += 4) {
      uint32_t target = first + word;
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
  }

  // --- grad_output ---------------------------------------------------------------------------

  // Where a place's part of grad_output begins in the unit of work: its first channel, slice and
  // column, to which a chunk adds its row and a plane its offset.
  __device__ __forceinline__ void find(const Unit& unit, const Place& place, uint32_t spot) const {
    const int image = unit.image + place.image();
    const int n = p.by_in_d(image), z = (image - n * p.in_d) * p.step_z;
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
      copy_channels<Element, 16, 4>(target, jump, source, step, count, exist);
    } else if (p.copy == 8) {
      copy_channels<Element, 8, 4>(target, jump, source, step, count, exist);
    } else if (p.copy == 4) {
      // A 16-bit element comes with the word that holds it.
      const uint64_t word = reinterpret_cast<uint64_t>(source) & ~uint64_t{3};
      copy_channels<Element, 4, 4>(target, jump, reinterpret_cast<const Element*>(word), step,
                                   count, exist);
    } else if constexpr (kElement == 2 && !kPairs) {
      copy_elements<Element>(target, jump, source, step, count, most, p.step_x, inside,
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
    const int thread = ptx::this_thread();
    if (thread >= job.planes * boxes_of_plane(p)) return;
    const int number = p.by_boxes(thread), box = thread - number * boxes_of_plane(p);
    const WgradPlane& plane = job.plane[number];
    // Classes are a power of two.
    const int of_class = box & (p.classes - 1), log_classes = 31 - __clz(p.classes);
    const int image = unit.image + (box >> log_classes);
    const int n = p.by_in_d(image), z = (image - n * p.in_d) * p.step_z + plane.depth;
    int column = unit.column * p.spread + plane.start;
    // Where whole channels follow each other no row or slice is ever beyond them.
    if (p.flat == 2) {
      column += (of_class * p.out_d + z) * p.out_h * row_points(p);
    }
    ptx::store_shared(
        spots + kProducers * 16,
        uint4{static_cast<uint32_t>(column),
              static_cast<uint32_t>(p.flat == 2 ? beyond(z, p.out_d) : z), static_cast<uint32_t>(n),
              static_cast<uint32_t>(plane.channel >> log_classes) << 16 |
                  static_cast<uint16_t>(plane.phase_y)});
  }

  // Which of one row (slice) a box has, where all follow each other as one: of odd rows, which may
  // have padding, one that is not there is asked for by a number that is not either.
  __device__ static __forceinline__ int beyond(int at, int size) {
    return kOdd && static_cast<uint32_t>(at) >= static_cast<uint32_t>(size);
  }

  __device__ __forceinline__ void copy_boxes(const Slot& slot, int row, uint32_t barriers) const {
    const uint32_t barrier = barriers + 8 * slot.index();
    const int thread = ptx::this_thread();
    if (thread >= job.planes * boxes_of_plane(p)) return;
    uint4 spot;
    ptx::load_shared(spot, spots + kProducers * 16);
    int y = row * p.step_y + static_cast<int>(spot.w & 0xffff), column = spot.x;
    if (p.flat) {
      // A box that does not begin on 16 bytes is an illegal instruction: it begins a little before.
      const int begin = y * row_points(p) + column;
      column = begin & -vector_points(p);
      y = beyond(y, p.out_h);
      // As much for all images; the consumers add what a class begins later than the first.
      const int plane = p.by_boxes(thread);
      if (thread == plane * boxes_of_plane(p))
        ptx::store_shared(shared.late_at(slot.index(), plane),
                          static_cast<unsigned short>(begin - column));
    }
    const uint32_t at = p.input_bytes + thread * p.box_bytes;
    if constexpr (kOdd > 0) column /= 2;  // words
    ptx::box_copy(shared.stages + slot.index() * p.stage_bytes + at, gy_map, column, y, spot.y,
                  spot.z, spot.w >> 16, barrier);
  }

  // --- The ring ------------------------------------------------------------------------------

  // Hands the oldest chunk on its way over to the consumers. `kSlabs`: the TMA brings the input,
  // and then grad_output as well.
  template <bool kSlabs>
  __device__ __forceinline__ void hand_over(const Slot& oldest) const {
    const uint32_t stage = shared.stages + oldest.index() * p.stage_bytes;
    if constexpr (kSlabs) {
      ptx::barrier_wait(shared.raw + 8 * oldest.index(), oldest.parity());
      weave_slabs<Operand, N, kPairs, T>(p, stage);
    } else if (squares()) {
      __syncwarp();
      weave(stage + woven);
    } else if constexpr (kElement == 4) {
      round_input(stage + x_target);
    }
    ptx::fence_async_proxy();
    ptx::barrier_arrive(shared.full + 8 * oldest.index());
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

  // Sends everything of the unit's i-th chunk on its way.
  template <bool kSlabs>
  __device__ __forceinline__ void start_chunk(const Slot& slot, const Unit& unit, int i) const {
    const uint32_t stage = shared.stages + slot.index() * p.stage_bytes;
    const bool input = i >= job.extra_rows;
    const int row = unit.row + i - job.extra_rows;
    if (boxes(p) && ptx::this_thread() == 0) {
      const int with_them = kSlabs && !Layout::kWoven && input ? input_copied(p) : 0;
      ptx::barrier_arrive_expect(shared.full + 8 * slot.index(),
                                 job.planes * p.plane_bytes + with_them);
    }
    if constexpr (kSlabs) {
      copy_slabs(slot, row, input);
    } else if (input) {
      copy_input(stage, row);
    }
    if (kSlabs || boxes(p)) {
      copy_boxes(slot, unit.row + job.shift_y + i, shared.full);
    } else {
      copy_planes(stage, unit.row + job.shift_y + i);
    }
    if constexpr (!kSlabs) ptx::copy_async_commit();
  }

  template <bool kSlabs>
  __device__ __forceinline__ void walk() const {
    Slot newest, oldest;
    int count = 0;
    Sums<Operand> sums(p, shared, job);
    const bool adds = kSlabs && job.sums > 0;
    // What the TMA brings as it is read is handed over at once.
    constexpr bool kDirect = kSlabs && !Layout::kWoven;
    const auto finish = [&] {
      if constexpr (!kDirect) hand_over<kSlabs>(oldest);
      if (adds) sums.add(oldest);
      oldest.advance(p.stages);
    };
    for (int from = share.first; from < share.end;) {
      const Unit unit(p, from, share.end);
      from += unit.rows;
      if constexpr (kSlabs) {
        if (adds) sums.begin(unit);
        find_slab(unit);
      } else {
        find_input(unit);
      }
      if (kSlabs || boxes(p)) {
        find_box(unit);
      } else {
        find(unit, main, spots + kProducers * 16);
        find(unit, halo, spots + 2 * kProducers * 16);
      }
      for (int i = 0; i < unit.rows + job.extra_rows; ++i) {
        ptx::barrier_wait(shared.empty + 8 * newest.index(), newest.parity() ^ 1);
        start_chunk<kSlabs>(newest, unit, i);
        if (adds) sums.note(newest.index(), unit.row, i, share.channel / N);
        if constexpr (kDirect) ptx::barrier_arrive(shared.full + 8 * newest.index());
        newest.advance(p.stages);
        if (kDirect && !adds) continue;
        if (count < p.lag) {
          ++count;
          continue;
        }
        if constexpr (!kSlabs) wait_for_oldest();
        finish();
      }
    }
    if constexpr (!kSlabs) ptx::copy_async_wait<0>();
    for (; count > 0; --count) finish();
    if (adds) sums.store();
  }

  // With a loop of its own what copies need takes no registers: there are 56 to 88.
  __device__ __forceinline__ void run() const {
    if (slabs(p)) return walk<true>();
    walk<false>();
  }
};

}  // namespace upconv::wgrad
