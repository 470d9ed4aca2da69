// What the mma.sync kernels for the gradients share: operand types, units of work, and boxes of
// rows in shared memory.
//
// A box holds rows as they lie in the tensor, copied asynchronously, with zeros for everything
// outside: the main loops ask nothing. They gather single elements from it, at any stride, dilation
// and shift, which no matrix load could do; with few channels there are few products for each
// element, and the gathering keeps up with the memory.
#pragma once

#include "gather_params.h"
#include "mma_layout.cuh"

namespace upconv {

// The block's; outside of `gather`, where tests put what stands in for it.
__device__ __forceinline__ unsigned char* shared_memory() {
  extern __shared__ __align__(128) unsigned char memory[];
  return memory;
}

}  // namespace upconv

namespace upconv::gather {

// --- Numbers ---------------------------------------------------------------------------------

// How a thread's share of a product lies along K: kPixels neighbours, of which each register
// holds kPer. A product takes kStep of K. A fragment is what the tensor core gets of a row or a
// column, made of the kWords registers that were read.
template <int kWords>
struct Fragment {
  uint32_t words[kWords];
};

template <typename Base>
struct Plain : Base {
  static constexpr int kPer = 4 / sizeof(typename Base::Element);
  static constexpr int kPixels = 2 * kPer, kStep = 8 * kPer;
  template <int kWords>
  using Prepared = Fragment<kWords>;
  template <int kWords>
  static __device__ __forceinline__ Fragment<kWords> prepared(const uint32_t (&read)[kWords]) {
    Fragment<kWords> result;
#pragma unroll
    for (int i = 0; i < kWords; ++i) result.words[i] = Base::prepare(read[i]);
    return result;
  }
  static __device__ __forceinline__ void multiply(float (&d)[4], const Fragment<4>& a,
                                                  const Fragment<2>& b) {
    Base::multiply(d, a.words, b.words);
  }
};
using Tf32 = Plain<MmaTf32>;
using Bf16 = Plain<MmaBf16>;
using Fp16 = Plain<MmaFp16>;

// float32 that must not be rounded (see MmaSplit): three products of heads and tails, summed by
// themselves, since the tensor core truncates, and added with rounding.
struct Split : MmaSplit {
  static constexpr int kPixels = 2, kPer = 1, kStep = 8;
  template <int kWords>
  struct Prepared {
    uint32_t heads[kWords], tails[kWords];
  };
  template <int kWords>
  static __device__ __forceinline__ Prepared<kWords> prepared(const uint32_t (&read)[kWords]) {
    Prepared<kWords> result;
#pragma unroll
    for (int i = 0; i < kWords; ++i) split(read[i], result.heads[i], result.tails[i]);
    return result;
  }
  static __device__ __forceinline__ void multiply(float (&d)[4], const Prepared<4>& a,
                                                  const Prepared<2>& b) {
    float sum[4] = {};
    mma_ptx::mma_tf32(sum, a.tails, b.heads[0], b.heads[1]);
    mma_ptx::mma_tf32(sum, a.heads, b.tails[0], b.tails[1]);
    mma_ptx::mma_tf32(sum, a.heads, b.heads[0], b.heads[1]);
#pragma unroll
    for (int i = 0; i < 4; ++i) d[i] += sum[i];
  }
};

// A fragment that was prepared before it was stored.
template <typename Operand, int kWords>
__device__ __forceinline__ auto packed(const uint32_t (&read)[kWords]) {
  if constexpr (Operand::kSplit) {
    return Operand::prepared(read);  // heads and tails would be twice as much to store
  } else {
    Fragment<kWords> result;
#pragma unroll
    for (int i = 0; i < kWords; ++i) result.words[i] = read[i];
    return result;
  }
}

// A register of K: the number at `one`, or those at `one` and `two`, in shared memory.
template <typename Operand>
__device__ __forceinline__ uint32_t gathered(uint32_t one, uint32_t two) {
  if constexpr (Operand::kPer == 1) {
    return mma_ptx::load_shared32(one);
  } else {
    return __byte_perm(mma_ptx::load_shared16(one), mma_ptx::load_shared16(two), 0x5410);
  }
}

// --- Units -----------------------------------------------------------------------------------

// Divides `index`; returns what is left over.
__device__ __forceinline__ int split_off(int& index, const Divider& by, int divisor) {
  const int all = index;
  index = by(all);
  return all - index * divisor;
}

// Some rows of one image, and some columns of them. Neighbours follow each other.
struct Unit {
  int image, z, y, x;  // the first row and column

  __device__ Unit(const GatherParams& p, const GatherJob& job, int index) {
    x = split_off(index, p.by_across, (p.in_w + p.columns - 1) / p.columns) * p.columns;
    y = split_off(index, job.by_down, (job.count_y + p.rows - 1) / p.rows) * p.rows;
    z = split_off(index, job.by_count_z, job.count_z);
    image = index;
  }

  __device__ __forceinline__ void advance(const GatherParams& p, const GatherJob& job) {
    x += p.columns;
    if (x < p.in_w) return;
    x = 0;
    y += p.rows;
    if (y < job.count_y) return;
    y = 0;
    if (++z < job.count_z) return;
    z = 0;
    ++image;
  }
};

// --- Boxes -----------------------------------------------------------------------------------

// One row of a box: where it lies from the unit's first one on.
struct Row {
  int offset;  // elements
  short z, y;
};

// The rows of `channels` x `planes` x `rows`, in this order.
__device__ __forceinline__ void list_rows(Row* list, int channels, int planes, Divider by_planes,
                                          int rows, Divider by_rows, int plane_step, int row_step,
                                          int64_t plane, int height, int width) {
  for (int i = threadIdx.x; i < channels * planes * rows; i += blockDim.x) {
    int channel = i;
    const int y = split_off(channel, by_rows, rows) * row_step;
    const int z = split_off(channel, by_planes, planes) * plane_step;
    list[i].offset = static_cast<int>(channel * plane + (z * height + y) * width);
    list[i].z = static_cast<short>(z);
    list[i].y = static_cast<short>(y);
  }
}

// A tensor as its boxes are cut from it.
template <typename Element>
struct Source {
  const Element* tensor;  // the first of its channels that the block reads, in the first image
  int64_t image;          // elements
  int depth, height, width;
};

// Which rows of a list belong to channels that exist: of every `mask` + 1 (a power of two) the
// first `existing`. By default all.
struct Channels {
  int mask = 0, existing = 1;

  __device__ __forceinline__ bool exists(int row) const { return (row & mask) < existing; }
};

// The part of a tensor that a unit brings along.
struct Part {
  int image, z, y;  // of the first row
  int low;          // first column
  int granules;     // of a row: copies
  bool whole;       // is all of it inside the tensor?
  Channels channels;
};

// Every row of the list, in copies of kBytes. As many lanes as a row has granules, up to a warp,
// take a row: no division, and what a row costs is asked for once.
template <int kBytes, bool kWhole, typename Element>
__device__ __forceinline__ void stage_by(const Source<Element>& source, const Row* list, int rows,
                                         const Part& part, unsigned char* box, int pitch) {
  constexpr int kCount = kBytes / static_cast<int>(sizeof(Element));
  const int lane = threadIdx.x % 32;
  const int shift = min(5, 32 - __clz(part.granules - 1));
  const int granule = lane & ((1 << shift) - 1);
  const int step = blockDim.x >> shift;
  int row = threadIdx.x / 32 * (32 >> shift) + (lane >> shift);
  if (granule >= part.granules || row >= rows) return;
  const Element* const origin =
      source.tensor + part.image * source.image +
      (static_cast<int64_t>(part.z) * source.height + part.y) * source.width + part.low +
      granule * kCount;
  unsigned char* to = box + row * pitch + granule * kBytes;
  Row next = list[row];
  for (; row < rows; row += step, to += step * pitch) {
    const Row at = next;
    next = list[min(row + step, rows - 1)];
    const bool met =
        kWhole || (part.channels.exists(row) &&
                   static_cast<unsigned>(part.z + at.z) < static_cast<unsigned>(source.depth) &&
                   static_cast<unsigned>(part.y + at.y) < static_cast<unsigned>(source.height));
    const Element* from = origin + at.offset;
    unsigned char* place = to;
#pragma unroll 4
    for (int i = granule; i < part.granules; i += 32) {
      const bool inside = kWhole || (met && static_cast<unsigned>(part.low + i * kCount) <
                                                static_cast<unsigned>(source.width));
      if constexpr (kBytes >= 4) {
        mma_ptx::copy_async<kBytes>(mma_ptx::shared_address(place), from, inside ? kBytes : 0);
      } else {
        *reinterpret_cast<unsigned short*>(place) =
            inside ? __ldg(reinterpret_cast<const unsigned short*>(from)) : uint16_t{0};
      }
      from += 32 * kCount;
      place += 32 * kBytes;
    }
  }
}

template <int kBytes, typename Element>
__device__ __forceinline__ void stage_with(const Source<Element>& source, const Row* list, int rows,
                                           const Part& part, unsigned char* box, int pitch) {
  if (part.whole) {
    stage_by<kBytes, true>(source, list, rows, part, box, pitch);
  } else {
    stage_by<kBytes, false>(source, list, rows, part, box, pitch);
  }
}

// `count` columns from `low` on, which is rounded down to whole copies; the box must have room for
// that. The last row of the list is the farthest from the first.
template <typename Element>
__device__ __forceinline__ void stage(const Source<Element>& source, const Row* list, int rows,
                                      int image, int z, int y, int low, int count, int bytes,
                                      unsigned char* box, int pitch, Channels channels = {}) {
  const int each = bytes / static_cast<int>(sizeof(Element));
  const int skip = low & (each - 1);
  const int granules = (skip + count + each - 1) / each;
  low -= skip;
  const Row last = list[rows - 1];
  const bool whole = min(z, z + last.z) >= 0 && max(z, z + last.z) < source.depth && y >= 0 &&
                     y + last.y < source.height && low >= 0 &&
                     low + granules * each <= source.width && channels.existing > channels.mask;
  const Part part{image, z, y, low, granules, whole, channels};
  if (bytes == 16) {
    stage_with<16>(source, list, rows, part, box, pitch);
  } else if (bytes == 8) {
    stage_with<8>(source, list, rows, part, box, pitch);
  } else if (bytes == 4) {
    stage_with<4>(source, list, rows, part, box, pitch);
  } else if constexpr (sizeof(Element) == 2) {
    stage_with<2>(source, list, rows, part, box, pitch);
  }
}

// The first column of grad_output that a unit's first pixel meets at tap `tap`.
__device__ __forceinline__ int first_output(const GatherParams& p, int x, int tap) {
  return x * p.stride_x - p.padding_x + tap * p.dilation_x;
}

// Until the newest unit has arrived, and nobody reads the one before.
__device__ __forceinline__ void wait_for_unit() {
  mma_ptx::copy_async_wait<0>();
  __syncthreads();
}

}  // namespace upconv::gather
