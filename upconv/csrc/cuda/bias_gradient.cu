// The bias's gradient: gb[c] = sum over images and pixels of gy[n, c, pixel].
//
// The idea. The sum is nothing but reading: what counts is that enough of it is on its way at any
// time. A thread loads 8 vectors of 16 bytes before it adds the first, 96 KB a multiprocessor.
// Blocks share a channel ("parts"); each leaves one sum in the workspace, and a second kernel adds
// those. No atomics: the order of all additions is fixed, and so is every bit of the result.
//
// What is summed may cancel (one channel of fsrcnn: 4.7 million numbers whose sum is a fraction of
// their root), and a float32 sum then has many times the error of its last bit. So the additions
// are in float64: a multiprocessor makes 64 of them in a cycle, and the memory brings 5 numbers.
// 16-bit numbers, twice as many, are added in float32 as far as a thread has loaded them together.
//
// Planes (contiguous): pieces of a plane, 16 loads a thread, go round the teams of 8 to 32 threads
// of all blocks of the channel; of small planes a team takes 2 or 4 at a time, or most of its 8
// loads would be missing. Planes and pieces begin anywhere; the elements before the first 16-byte
// boundary and after the last are added one by one.
// Columns (channels_last): each thread has the channels of one vector, and every so-many-th pixel.
#include "bias_gradient.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstring>
#include <type_traits>

namespace upconv {

extern __shared__ __align__(1024) unsigned char memory[];

namespace {

// --- Configuration ---------------------------------------------------------------------------

constexpr int kThreads = 256;
constexpr int kResident = 3;     // blocks of a multiprocessor at a time: 80 registers a thread
constexpr int kAhead = 8;        // loads on their way
constexpr int kPieceLoads = 16;  // most loads of a thread for one piece of a plane
constexpr int kFewLoads = 4;     // teams are as small as gives a thread so many, where they can be
constexpr int kVectorBytes = 16;
constexpr int kMostVector = 8;              // elements of a 16-byte load
constexpr int64_t kBlockBytes = 64 * 1024;  // at least: less is not worth a block
// Blocks of a multiprocessor over the whole run: so that the last ones leave little of it idle.
constexpr int kBlocksPerMultiprocessor = 8 * kResident;

// --- Loads -----------------------------------------------------------------------------------

__device__ __forceinline__ float as_float(float v) { return v; }
__device__ __forceinline__ float as_float(__nv_bfloat16 v) { return __bfloat162float(v); }
__device__ __forceinline__ float as_float(__half v) { return __half2float(v); }
__device__ __forceinline__ void put(float* to, float v) { *to = v; }
__device__ __forceinline__ void put(__nv_bfloat16* to, float v) { *to = __float2bfloat16(v); }
__device__ __forceinline__ void put(__half* to, float v) { *to = __float2half_rn(v); }

// One load: 16 bytes, or one element.
template <typename Element, int kVector>
struct Load {
  Element of[kVector];

  __device__ __forceinline__ void read(const Element* from, bool there) {
    static_assert(kVector * sizeof(Element) == kVectorBytes, "a whole vector");
    uint4 bits{0u, 0u, 0u, 0u};
    if (there) bits = __ldg(reinterpret_cast<const uint4*>(from));
    memcpy(of, &bits, kVectorBytes);
  }
};

template <typename Element>
struct Load<Element, 1> {
  Element of[1];

  __device__ __forceinline__ void read(const Element* from, bool there) {
    memset(of, 0, sizeof(of));
    if (there) of[0] = __ldg(from);
  }
};

// What a few numbers are added up in.
template <typename Element>
using Sum = std::conditional_t<sizeof(Element) == 4, double, float>;

// The sum of one element of all loads, neighbours first.
template <typename Element, int kVector>
__device__ __forceinline__ Sum<Element> added(const Load<Element, kVector> (&loads)[kAhead],
                                              int v) {
  Sum<Element> partial[kAhead];
#pragma unroll
  for (int i = 0; i < kAhead; ++i) partial[i] = as_float(loads[i].of[v]);
#pragma unroll
  for (int half = kAhead / 2; half > 0; half /= 2)
#pragma unroll
    for (int i = 0; i < half; ++i) partial[i] += partial[i + half];
  return partial[0];
}

// --- Sums of a block -------------------------------------------------------------------------

// Adds `kValues` numbers of `rows` threads, `columns` threads apart, to those of the first row.
template <int kValues>
__device__ __forceinline__ void add_rows(double (&sum)[kValues], int rows, int columns) {
  double* shared = reinterpret_cast<double*>(memory);
  const int row = threadIdx.x / columns;
  int half = 1;
  while (2 * half < rows) half *= 2;
  for (; half > 0; half /= 2) {
    for (int v = 0; v < kValues; ++v) shared[v * kThreads + threadIdx.x] = sum[v];
    __syncthreads();
    if (row < half && row + half < rows) {
      for (int v = 0; v < kValues; ++v)
        sum[v] += shared[v * kThreads + threadIdx.x + half * columns];
    }
    __syncthreads();
  }
}

// A block's sum of a channel: the result itself where it is the only one.
template <typename Element>
__device__ __forceinline__ void leave(const BiasGradient& p, int64_t channel, int part,
                                      double sum) {
  if (p.parts == 1) {
    put(static_cast<Element*>(p.result) + channel, static_cast<float>(sum));
  } else {
    p.workspace[channel * p.parts + part] = sum;
  }
}

// --- The kernels -----------------------------------------------------------------------------

// One piece of a plane, as a team reads it.
template <typename Element>
struct Piece {
  static constexpr int kVector = kVectorBytes / sizeof(Element);
  const Element* from;  // its first whole vector
  int vectors, before, after;

  // None where `item` is beyond the last.
  __device__ __forceinline__ Piece(const BiasGradient& p, int64_t channel, int64_t item,
                                   int64_t pieces, int piece) {
    const int64_t image = item / pieces, first = (item - image * pieces) * piece;
    const int length =
        image < p.images ? static_cast<int>(min(p.pixels - first, int64_t{piece})) : 0;
    from = static_cast<const Element*>(p.gy) + (image * p.channels + channel) * p.pixels + first;
    const int to_boundary = -reinterpret_cast<uintptr_t>(from) % kVectorBytes / sizeof(Element);
    before = min(to_boundary, length);
    vectors = (length - before) / kVector;
    after = length - before - vectors * kVector;
    from += before;
  }

  // The elements before and after the vectors: fewer than a team has threads.
  __device__ __forceinline__ void read_edges(Load<Element, 1> (&edges)[2], int lane) const {
    edges[0].read(from - before + lane, lane < before);
    edges[1].read(from + vectors * kVector + lane, lane < after);
  }
};

// `kItems` pieces at a time: where a thread has few loads for each.
template <typename Element, int kItems>
__global__ void __launch_bounds__(kThreads, kResident) bias_gradient_planes(const BiasGradient p) {
  constexpr int kVector = kVectorBytes / sizeof(Element), kEach = kAhead / kItems;
  const int64_t channel = blockIdx.x / p.parts;
  const int part = blockIdx.x % p.parts;
  const int lane = threadIdx.x % p.lanes, teams = kThreads / p.lanes;
  const int piece = p.lanes * kPieceLoads * kVector;
  const int64_t pieces = (p.pixels + piece - 1) / piece;
  const int64_t step = static_cast<int64_t>(p.parts) * teams;
  double total[1] = {};
#pragma unroll 1
  for (int64_t item = static_cast<int64_t>(part) * teams + threadIdx.x / p.lanes;
       item < pieces * p.images; item += kItems * step) {
    const Element* from[kItems];
    int vectors[kItems], most = 0;
    Load<Element, 1> edges[kItems][2];
#pragma unroll
    for (int k = 0; k < kItems; ++k) {
      const Piece<Element> each(p, channel, item + k * step, pieces, piece);
      from[k] = each.from;
      vectors[k] = each.vectors;
      most = max(most, each.vectors);
      each.read_edges(edges[k], lane);
    }
#pragma unroll 1
    for (int at = lane; at < most; at += kEach * p.lanes) {
      Load<Element, kVector> loads[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int k = i % kItems, here = at + i / kItems * p.lanes;
        loads[i].read(from[k] + here * kVector, here < vectors[k]);
      }
      Sum<Element> sum = 0;
#pragma unroll
      for (int v = 0; v < kVector; ++v) sum += added(loads, v);
      total[0] += sum;
    }
#pragma unroll
    for (int k = 0; k < kItems; ++k)
      total[0] += static_cast<double>(as_float(edges[k][0].of[0])) + as_float(edges[k][1].of[0]);
  }
  add_rows(total, kThreads, 1);
  if (threadIdx.x == 0) leave<Element>(p, channel, part, total[0]);
}

template <typename Element, int kVector>
__global__ void __launch_bounds__(kThreads, kResident) bias_gradient_columns(const BiasGradient p) {
  const int64_t loads = p.channels / kVector;
  const int part = blockIdx.x % p.parts, rows = kThreads / p.columns;
  const int row = threadIdx.x / p.columns;
  const int64_t column =
      static_cast<int64_t>(blockIdx.x / p.parts) * p.columns + threadIdx.x % p.columns;
  double sum[kVector] = {};
  if (row < rows && column < loads) {
    const Element* from = static_cast<const Element*>(p.gy) + column * kVector;
    const int64_t pixels = p.images * p.pixels, step = static_cast<int64_t>(p.parts) * rows;
#pragma unroll 1
    for (int64_t at = static_cast<int64_t>(part) * rows + row; at < pixels; at += kAhead * step) {
      Load<Element, kVector> loads[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i)
        loads[i].read(from + (at + i * step) * p.channels, at + i * step < pixels);
#pragma unroll
      for (int v = 0; v < kVector; ++v) sum[v] += added(loads, v);
    }
  }
  add_rows(sum, rows, p.columns);
  if (row > 0 || column >= loads) return;
  for (int v = 0; v < kVector; ++v) leave<Element>(p, column * kVector + v, part, sum[v]);
}

// A block a channel adds what the parts have left.
template <typename Element>
__global__ void __launch_bounds__(kThreads) bias_gradient_add(const BiasGradient p) {
  const int64_t channel = blockIdx.x;
  double sum[1] = {};
  for (int part = threadIdx.x; part < p.parts; part += kThreads)
    sum[0] += p.workspace[channel * p.parts + part];
  add_rows(sum, kThreads, 1);
  if (threadIdx.x == 0) {
    put(static_cast<Element*>(p.result) + channel, static_cast<float>(sum[0]));
  }
}

// --- Host side -------------------------------------------------------------------------------

template <typename Element>
cudaError_t launch_sums(const BiasGradient& p, cudaStream_t stream) {
  constexpr int kVector = kVectorBytes / sizeof(Element);
  const int64_t sets =
      p.channels_last ? (p.channels / p.vector + p.columns - 1) / p.columns : p.channels;
  if (sets * p.parts > INT32_MAX || p.channels > INT32_MAX) return cudaErrorInvalidValue;
  const int blocks = static_cast<int>(sets * p.parts), channels = static_cast<int>(p.channels);
  constexpr int kBytes = kThreads * sizeof(double), kWideBytes = kBytes * kMostVector;
  if (!p.channels_last) {
    auto kernel = bias_gradient_planes<Element, 1>;
    if (p.items == 2) kernel = bias_gradient_planes<Element, 2>;
    if (p.items == 4) kernel = bias_gradient_planes<Element, 4>;
    kernel<<<blocks, kThreads, kBytes, stream>>>(p);
  } else if (p.vector == kVector) {
    auto kernel = bias_gradient_columns<Element, kVector>;
    kernel<<<blocks, kThreads, kWideBytes, stream>>>(p);
  } else {
    auto kernel = bias_gradient_columns<Element, 1>;
    kernel<<<blocks, kThreads, kBytes, stream>>>(p);
  }
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess || p.parts == 1) return error;
  auto add = bias_gradient_add<Element>;
  add<<<channels, kThreads, kBytes, stream>>>(p);
  return cudaGetLastError();
}

int element_bytes(const BiasGradient& p) { return p.type == SumType::kFloat32 ? 4 : 2; }

}  // namespace

void plan_bias_gradient(BiasGradient* sum, int multiprocessors) {
  BiasGradient& p = *sum;
  const int element = element_bytes(p), whole = kVectorBytes / element;
  p.vector = whole;
  p.columns = kThreads;
  p.lanes = 8;  // more than the elements before or after the vectors of a piece
  while (p.lanes < 32 && p.lanes * kFewLoads * whole < p.pixels) p.lanes *= 2;
  p.items = 1;
  while (p.items < kFewLoads && p.pixels <= p.lanes * whole * (kAhead / p.items / 2)) p.items *= 2;
  int64_t sets = p.channels;
  if (p.channels_last) {
    const bool aligned = reinterpret_cast<uintptr_t>(p.gy) % kVectorBytes == 0;
    if (!aligned || p.channels * element % kVectorBytes != 0) p.vector = 1;
    const int64_t loads = p.channels / p.vector;
    p.columns = static_cast<int>(std::min<int64_t>(loads, kThreads));
    sets = (loads + p.columns - 1) / p.columns;
  }
  const int64_t bytes = p.images * p.pixels * p.channels * element / std::max<int64_t>(sets, 1);
  const int64_t most = static_cast<int64_t>(multiprocessors) * kBlocksPerMultiprocessor;
  const int64_t wanted = std::min(bytes / kBlockBytes, (most + sets - 1) / sets);
  p.parts = static_cast<int>(std::max<int64_t>(wanted, 1));
}

int64_t bias_gradient_workspace_bytes(const BiasGradient& p) {
  return p.parts == 1 ? 0 : p.channels * p.parts * static_cast<int64_t>(sizeof(double));
}

cudaError_t bias_gradient(const BiasGradient& p, cudaStream_t stream) {
  switch (p.type) {
    case SumType::kFloat32:
      return launch_sums<float>(p, stream);
    case SumType::kBfloat16:
      return launch_sums<__nv_bfloat16>(p, stream);
    default:
      return launch_sums<__half>(p, stream);
  }
}

}  // namespace upconv
