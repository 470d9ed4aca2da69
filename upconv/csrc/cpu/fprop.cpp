// Forward transposed convolution on the CPU: reads the parameters, chooses the instruction set,
// lays out the work and shares it between threads.
#include "fprop.h"

#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <atomic>
#include <new>
#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "fprop_job.h"

#define UPCONV_ISA generic
#define UPCONV_VECTOR_BYTES 16
#define UPCONV_REGISTERS 16
#include "fprop_kernel.h"

namespace upconv {

const Kernels& generic_kernels(bool is_double) {
  return is_double ? generic::kDouble : generic::kFloat;
}

namespace {

const Kernels& choose_kernels(int64_t isa, bool is_double) {
#if defined(__x86_64__)
  if (isa >= 2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw"))
    return avx512_kernels(is_double);
  if (isa >= 1 && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
      __builtin_cpu_supports("f16c"))
    return avx2_kernels(is_double);
#endif
  return generic_kernels(is_double);
}

struct DimensionTap {
  int64_t k, shift;
};

// A Job with the arrays it points to.
struct PreparedJob : Job {
  std::vector<PhaseRange> phase_list[3];
  std::vector<std::vector<DimensionTap>> phase_taps[3];
  std::vector<TapRange> tap_ranges;
  std::vector<int64_t> offsets, kernels, chunk_list;
  std::vector<Segment> segment_list;
  std::vector<ChannelBlock> block_list;

  void read_phases(const int64_t* list);
  void lay_out_input();
  void lay_out_taps();
  void lay_out_channels(int max_rows, int64_t chunk);
  void size_scratch(int64_t element);
};

void PreparedJob::read_phases(const int64_t* list) {
  for (int dim = 0; dim < 3; ++dim) {
    phase_count[dim] = *list++;
    for (int64_t p = 0; p < phase_count[dim]; ++p) {
      phase_list[dim].push_back({list[0], list[1]});
      const int64_t taps = list[2];
      list += 3;
      phase_taps[dim].emplace_back();
      for (int64_t t = 0; t < taps; ++t, list += 2)
        phase_taps[dim].back().push_back({list[0], list[1]});
    }
    phases[dim] = phase_list[dim].data();
  }
}

// The flat positions that the taps of any phase read, relative to the tile, as few segments:
// the rows above and below a tile of a wide image are separate ones, those of a small image merge.
void PreparedJob::lay_out_input() {
  // A cache line of elements. Every segment starts on one and has its row's column 0 on one, so
  // that taps without a shift along the row load aligned vectors.
  const int64_t line = dtype == DType::f64 ? 8 : 16;
  int64_t least_shift = 0, greatest_shift = 0;
  for (const auto& taps : phase_taps[2])
    for (const DimensionTap& tap : taps) {
      least_shift = std::min(least_shift, tap.shift);
      greatest_shift = std::max(greatest_shift, tap.shift);
    }
  const int64_t before = (line - 1 - least_shift) / line * line;
  std::vector<int64_t> rows;
  for (const auto& depth_taps : phase_taps[0])
    for (const DimensionTap& depth : depth_taps)
      for (const auto& height_taps : phase_taps[1])
        for (const DimensionTap& height : height_taps)
          rows.push_back((depth.shift * pitch[1] + height.shift) * pitch[2]);
  std::sort(rows.begin(), rows.end());
  for (int64_t row : rows) {
    const int64_t begin = row - before, end = row + tile + greatest_shift;
    if (segment_list.empty() || begin > segment_list.back().flat_begin + segment_list.back().length)
      segment_list.push_back({begin, end - begin, 0});
    else
      segment_list.back().length = end - segment_list.back().flat_begin;
  }
  int64_t start = 0;
  for (Segment& segment : segment_list) {
    segment.start = start;
    start += (segment.length + line - 1) / line * line;
  }
  segments = segment_list.data();
  segment_count = static_cast<int64_t>(segment_list.size());
  // An odd number of cache lines: channels then spread over all sets of the caches.
  channel_pitch = (start / line | 1) * line;
}

void PreparedJob::lay_out_taps() {
  for (const auto& depth_taps : phase_taps[0])
    for (const auto& height_taps : phase_taps[1])
      for (const auto& width_taps : phase_taps[2]) {
        const int64_t begin = static_cast<int64_t>(offsets.size());
        for (const DimensionTap& depth : depth_taps)
          for (const DimensionTap& height : height_taps)
            for (const DimensionTap& width : width_taps) {
              const int64_t flat = (depth.shift * pitch[1] + height.shift) * pitch[2] + width.shift;
              // The last segment that begins at or before the tap's first position holds them all.
              auto after = std::upper_bound(
                  segment_list.begin(), segment_list.end(), flat,
                  [](int64_t value, const Segment& segment) { return value < segment.flat_begin; });
              offsets.push_back((after - 1)->start + flat - (after - 1)->flat_begin);
              kernels.push_back((depth.k * kernel[1] + height.k) * kernel[2] + width.k);
            }
        tap_ranges.push_back({begin, static_cast<int64_t>(offsets.size())});
      }
  taps = tap_ranges.data();
  tap_offset = offsets.data();
  tap_kernel = kernels.data();
}

// Cuts the channels of a group into micro-kernel blocks: whole ones, then 4, 2 and 1 for the rest.
// 7 (3) channels take a whole block of 8 (4): one idle row costs less than three narrow blocks.
void PreparedJob::lay_out_channels(int max_rows, int64_t chunk) {
  int64_t packed_end = 0;
  chunk_list.push_back(0);
  for (int64_t chunk_first = 0; chunk_first < cout; chunk_first += chunk) {
    const int64_t chunk_end = std::min(cout, chunk_first + chunk);
    for (int64_t first = chunk_first; first < chunk_end;) {
      const int64_t left = chunk_end - first;
      int rows = max_rows;
      while (rows > 1 && left < rows - (rows > 2 ? 1 : 0)) rows /= 2;
      const int live = static_cast<int>(std::min<int64_t>(rows, left));
      block_list.push_back({first, rows, live, packed_end});
      packed_end += rows * cin * static_cast<int64_t>(offsets.size());
      first += live;
    }
    chunk_list.push_back(static_cast<int64_t>(block_list.size()));
  }
  blocks = block_list.data();
  block_count = static_cast<int64_t>(block_list.size());
  chunk_begin = chunk_list.data();
  chunks = static_cast<int64_t>(chunk_list.size()) - 1;
  packed_pitch = packed_end;
}

void PreparedJob::size_scratch(int64_t element) {
  const int64_t strip = kStripBytes / element;
  const int64_t strips = (tile + strip - 1) / strip;
  max_pieces = tile / pitch[2] + 2 + strips;
  max_copies = 0;
  for (const Segment& segment : segment_list) max_copies += 2 * (segment.length / pitch[2] + 2) + 1;
  const int64_t numbers =
      cin * channel_pitch + strip + (8 * stride[2] + 1) * strip + stride[2] * strip;
  scratch_bytes = numbers * element + max_copies * sizeof(generic::Copy) +
                  max_pieces * sizeof(generic::Piece) + strips * sizeof(generic::Strip);
  scratch_bytes = (scratch_bytes + 63) / 64 * 64;
}

// Asks for huge pages. Touching a new 4 KB page costs about 1 us, more than computing what goes
// onto it in many a layer.
void advise_huge_pages(void* data, int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  const uintptr_t page = 4096, first = reinterpret_cast<uintptr_t>(data);
  const uintptr_t begin = (first + page - 1) / page * page, end = (first + bytes) / page * page;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#else
  (void)data, (void)bytes;
#endif
}

// Memory that the calling thread keeps from call to call: packed weights and input buffers. Given
// back to the system after every call its pages would all be new again in the next. What exceeds
// 32 MB is given back.
class Workspace {
 public:
  ~Workspace() { free(data_); }

  void* get(int64_t bytes) {
    if (bytes > size_) {
      free(data_);
      size_ = 0;
      const int64_t page = bytes >= kHugePage ? kHugePage : 4096;
      const int64_t rounded = (bytes + page - 1) / page * page;
      data_ = aligned_alloc(page, rounded);
      if (!data_) throw std::bad_alloc();
      size_ = rounded;
      if (page == kHugePage) advise_huge_pages(data_, size_);
    }
    return data_;
  }

  void trim() {
    if (size_ <= kKept) return;
    free(data_);
    data_ = nullptr;
    size_ = 0;
  }

 private:
  static constexpr int64_t kHugePage = int64_t{2} << 20, kKept = int64_t{32} << 20;
  void* data_ = nullptr;
  int64_t size_ = 0;
};

// Runs task(index, thread) for every index; threads take the next free index.
template <class Task>
void share(int64_t count, int threads, const Task& task) {
  threads = static_cast<int>(std::min<int64_t>(threads, count));
  if (threads <= 1) {
    for (int64_t i = 0; i < count; ++i) task(i, 0);
    return;
  }
  std::atomic<int64_t> next{0};
#pragma omp parallel for num_threads(threads) schedule(static, 1)
  for (int thread = 0; thread < threads; ++thread)
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) task(i, thread);
}

}  // namespace

bool cpu_fprop(const int64_t* params, DType dtype, const void* x, const void* w,
               const void* bias_or_null, void* y, int threads) {
  PreparedJob job;
  job.dtype = dtype;
  job.x = x, job.w = w, job.bias = bias_or_null, job.y = y;
  job.batch = params[kBatch];
  job.groups = params[kGroups];
  job.cin = params[kCin] / job.groups;
  job.cout = params[kCout] / job.groups;
  job.tile = params[kTile];
  for (int dim = 0; dim < 3; ++dim) {
    job.in[dim] = params[kInSize + dim];
    job.out[dim] = params[kOutSize + dim];
    job.kernel[dim] = params[kKernel + dim];
    job.stride[dim] = params[kStride + dim];
    job.pitch[dim] = params[kPitch + dim];
  }
  const bool is_double = dtype == DType::f64;
  const int64_t element = is_double ? sizeof(double) : sizeof(float);
  const Kernels& kernels = choose_kernels(params[kIsa], is_double);
  job.flat_size = job.batch * job.pitch[0] * job.pitch[1] * job.pitch[2];
  if (job.flat_size == 0 || job.cout == 0) return true;
  job.tiles = (job.flat_size + job.tile - 1) / job.tile;
  job.read_phases(params + kPhaseLists);
  job.lay_out_input();
  job.lay_out_taps();
  job.lay_out_channels(kernels.max_rows, params[kChunk]);
  job.size_scratch(element);

  // malloc maps blocks above 32 MB afresh and unmaps them when freed, so that the advice ends with
  // the tensor; smaller ones are recycled.
  const int64_t out_bytes = job.batch * params[kCout] * job.out[0] * job.out[1] * job.out[2] *
                            (is_double             ? 8
                             : dtype == DType::f32 ? 4
                                                   : 2);
  if (out_bytes > (int64_t{32} << 20)) advise_huge_pages(y, out_bytes);

  threads = static_cast<int>(
      std::max<int64_t>(1, std::min({int64_t{threads}, params[kThreads], job.items()})));
  const int64_t packed_bytes = (job.groups * job.packed_pitch * element + 63) / 64 * 64;
  thread_local Workspace workspace;
  job.packed = workspace.get(packed_bytes + threads * job.scratch_bytes);
  char* scratch = static_cast<char*>(job.packed) + packed_bytes;
  const int64_t pack_items = job.groups * ((job.cin + kPackChannels - 1) / kPackChannels);
  std::atomic<bool> finite{true};
  share(pack_items, threads, [&](int64_t item, int) {
    if (!kernels.pack(job, item)) finite.store(false, std::memory_order_relaxed);
  });
  if (finite.load(std::memory_order_relaxed))
    share(job.items(), threads, [&](int64_t item, int thread) {
      kernels.compute(job, item, scratch + thread * job.scratch_bytes);
    });
  workspace.trim();
  return finite.load(std::memory_order_relaxed);
}

}  // namespace upconv
