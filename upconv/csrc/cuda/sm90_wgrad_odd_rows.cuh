// Hopper kernel for the weight's gradient: producers of grad_output whose rows begin anywhere.
//
// All rows, slices and some channels follow each other as one there, so that beside a row is not
// nothing but the row before and the next. Where a chunk's taps reach beyond its row (padding, or a
// strip wider than what is left), producers wait for the boxes, write zeros over what does not
// belong to it, and hand the chunk over then. All other chunks the TMA hands over by itself.
#pragma once

#include "sm90_wgrad_odd.cuh"
#include "sm90_wgrad_producers.cuh"

namespace upconv::wgrad {

// --- Edges of rows ---------------------------------------------------------------------------

// One half of the threads has the columns to the left of a row, the other those to its right, and
// each thread a channel of the planes.
struct Edges {
  static constexpr int kBefore = 7;  // a box may begin so many elements early

  const WgradParams& p;
  const Shared& shared;
  const WgradJob& job;
  int first, last;  // of the planes' starts
  int later;
  uint32_t place;  // of the thread's row in a plane

  __device__ __forceinline__ Edges(const WgradParams& p, const Shared& shared, const WgradJob& job)
      : p(p), shared(shared), job(job), first(job.plane[0].start), last(first) {
    for (int k = 1; k < job.planes; ++k) {
      first = min(first, static_cast<int>(job.plane[k].start));
      last = max(last, static_cast<int>(job.plane[k].start));
    }
    const int row = ptx::this_thread() % kRows;
    later = OddBase::later(p, row);
    place = p.input_bytes + row * p.pitch * 2;
  }

  // Elements from a box's first that may be read.
  __device__ __forceinline__ int reach() const { return p.filled - kBefore; }

  // Does a unit of work that begins with this column need any zeros?
  __device__ __forceinline__ bool any(int column) const {
    const int at = column * p.spread;
    return at + first < 0 || at + last + reach() > p.out_w;
  }

  // Where a stage's columns begin, for when its boxes have come. No copies need the planes' table.
  __device__ __forceinline__ uint32_t column_at(int stage) const {
    return shared.planes + 4 * stage;
  }

  __device__ static __forceinline__ void clear(uint32_t at, uint32_t end) {
    while (at < end) {
      if (at % 16 == 0 && end - at >= 16) {
        ptx::store_shared(at, uint4{0u, 0u, 0u, 0u});
        at += 16;
      } else {
        ptx::store_shared(at, static_cast<unsigned short>(0));
        at += 2;
      }
    }
  }

  __device__ __forceinline__ void clear(int stage) const {
    const int thread = ptx::this_thread();
    if (thread % kRows >= p.rows) return;
    uint32_t column;
    ptx::load_shared(column, column_at(stage));
    uint32_t plane = shared.stages + stage * p.stage_bytes + place;
#pragma unroll 1
    for (int k = 0; k < job.planes; ++k, plane += p.plane_bytes) {
      unsigned short late;
      ptx::load_shared(late, shared.late_at(stage, k));
      // Elements from the first of the box on; those of the row are `inside` to `outside`.
      const int before = (late + later) & kBefore;
      const int begin = static_cast<int>(column) * p.spread + job.plane[k].start;
      const int inside = min(max(-begin, 0), reach()), outside = min(p.out_w - begin, reach());
      const int from = thread < kRows ? 0 : max(outside, 0);
      const int to = thread < kRows ? inside : reach();
      uint32_t at = plane + (before + from) * 2;
#pragma unroll 1
      for (int i = 0; i < p.images; ++i, at += p.segment_pitch * 2) clear(at, at + (to - from) * 2);
    }
  }
};

// --- Producers -------------------------------------------------------------------------------

template <typename Operand, int N, int T, int kOdd>
struct OddProducer : Producer<Operand, N, false, T, kOdd> {
  using Base = Producer<Operand, N, false, T, kOdd>;
  using Base::Base;
  using Base::job;
  using Base::p;
  using Base::share;
  using Base::shared;

  // Sends everything of the unit's i-th chunk on its way. `edged`: it is not to be read as it
  // comes.
  template <bool kSlabs>
  __device__ __forceinline__ void start(const Edges& edges, const Slot& slot, const Unit& unit,
                                        int i, bool edged) const {
    const bool input = i >= job.extra_rows;
    const int row = unit.row + i - job.extra_rows;
    const int of_planes = job.planes * p.plane_bytes;
    const uint32_t full = shared.full + 8 * slot.index(), raw = shared.raw + 8 * slot.index();
    if (ptx::this_thread() == 0) {
      const int with_input = kSlabs && input ? input_copied(p) : 0;
      ptx::barrier_arrive_expect(full, with_input + (edged ? 0 : of_planes));
      ptx::store_shared(edges.column_at(slot.index()), static_cast<uint32_t>(unit.column));
    }
    if constexpr (kSlabs) {
      this->copy_slabs(slot, row, input);
    } else if (input) {
      this->copy_input(shared.stages + slot.index() * p.stage_bytes, row);
    }
    this->copy_boxes(slot, unit.row + job.shift_y + i, edged ? shared.raw : shared.full);
    if (edged) {
      if (ptx::this_thread() == 0) {
        ptx::barrier_arrive_expect(raw, of_planes);
      } else {
        ptx::barrier_arrive(raw);
      }
    }
    if constexpr (!kSlabs) ptx::copy_async_commit();
    if (kSlabs && !edged) ptx::barrier_arrive(full);
  }

  template <bool kSlabs>
  __device__ __forceinline__ void walk() const {
    Slot newest, oldest;
    int count = 0;
    // Of the chunks on their way, the newest first: which have edges. And which turn of each
    // stage's `raw` barrier is the next: it turns with these chunks alone.
    uint32_t edged = 0, turns = 0;
    const Edges edges(p, shared, job);
    Sums<Operand> sums(p, shared, job);
    const bool adds = kSlabs && job.sums > 0;
    const auto finish = [&](int number) {
      const int stage = oldest.index();
      const bool mine = edged >> number & 1;
      if (mine) {
        ptx::barrier_wait(shared.raw + 8 * stage, turns >> stage & 1);
        turns ^= 1u << stage;
        edges.clear(stage);
      }
      if (mine || !kSlabs) {
        ptx::fence_async_proxy();
        ptx::barrier_arrive(shared.full + 8 * stage);
      }
      if (adds) sums.add(oldest);
      oldest.advance(p.stages);
    };
    for (int from = share.first; from < share.end;) {
      const Unit unit(p, from, share.end);
      from += unit.rows;
      if constexpr (kSlabs) {
        if (adds) sums.begin(unit);
        this->find_slab(unit);
      } else {
        this->find_input(unit);
      }
      this->find_box(unit);
      const bool any = edges.any(unit.column);
      for (int i = 0; i < unit.rows + job.extra_rows; ++i) {
        ptx::barrier_wait(shared.empty + 8 * newest.index(), newest.parity() ^ 1);
        start<kSlabs>(edges, newest, unit, i, any);
        if (adds) sums.note(newest.index(), unit.row, i, share.channel / N);
        newest.advance(p.stages);
        edged = edged << 1 | any;
        if (count < p.lag) {
          ++count;
          continue;
        }
        if constexpr (!kSlabs) this->wait_for_oldest();
        finish(count);
      }
    }
    if constexpr (!kSlabs) ptx::copy_async_wait<0>();
    for (; count > 0; --count) finish(count - 1);
    if (adds) sums.store();
  }

  __device__ __forceinline__ void run() const {
    if (slabs(p)) return walk<true>();
    walk<false>();
  }
};

}  // namespace upconv::wgrad
