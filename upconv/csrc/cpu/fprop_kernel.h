// The forward kernel for one instruction set. Included once by every file that sets
//   UPCONV_ISA           name of the namespace
//   UPCONV_VECTOR_BYTES  bytes of a vector register
//   UPCONV_REGISTERS     number of vector registers
//
// Order: input tile, output rows, one unit of work, weights, table; the micro-kernel and the
// conversions of rows have files of their own.

#include "fprop_convert.h"
#include "fprop_micro.h"

namespace upconv {
namespace UPCONV_ISA {

// ------------------------------------------------------------------------------- input tile

struct Copy {  // `length` elements to buffer offset `to`; from < 0 means zeros
  int64_t to, from, length;
};

static int64_t append(Copy* list, int64_t count, Copy next) {
  if (next.length <= 0) return count;
  if (count) {
    Copy& last = list[count - 1];
    const bool follows = last.to + last.length == next.to;
    const bool both_zero = last.from < 0 && next.from < 0;
    const bool both_data = last.from >= 0 && last.from + last.length == next.from;
    if (follows && (both_zero || both_data)) {
      last.length += next.length;
      return count;
    }
  }
  list[count] = next;
  return count + 1;
}

// The copies that fill one channel of the input buffer of the tile at `tile_begin`.
// `from` counts elements from the first channel of the group in image 0.
static int64_t list_copies(const Job& job, int64_t tile_begin, Copy* list) {
  const int64_t plane = job.in[0] * job.in[1] * job.in[2];
  const int64_t image = job.groups * job.cin * plane;
  int64_t count = 0;
  for (int64_t s = 0; s < job.segment_count; ++s) {
    const Segment& segment = job.segments[s];
    int64_t flat = tile_begin + segment.flat_begin;
    int64_t to = segment.start;
    int64_t left = segment.length;
    if (flat < 0) {
      const int64_t before = least(left, -flat);
      count = append(list, count, {to, -1, before});
      flat += before, to += before, left -= before;
    }
    while (left > 0) {
      const int64_t row = flat / job.pitch[2];
      const int64_t column = flat % job.pitch[2];
      const int64_t length = least(left, job.pitch[2] - column);
      const int64_t h = row % job.pitch[1];
      const int64_t d = row / job.pitch[1] % job.pitch[0];
      const int64_t n = row / job.pitch[1] / job.pitch[0];
      int64_t live = 0;
      if (n < job.batch && d < job.in[0] && h < job.in[1])
        live = greatest(0, least(length, job.in[2] - column));
      const int64_t from = n * image + (d * job.in[1] + h) * job.in[2] + column;
      count = append(list, count, {to, from, live});
      count = append(list, count, {to + live, -1, length - live});
      flat += length, to += length, left -= length;
    }
  }
  return count;
}

template <class T>
static void fill_input(const Job& job, int64_t group, const Copy* list, int64_t count, T* buffer) {
  const int64_t plane = job.in[0] * job.in[1] * job.in[2];
  const int64_t element = job.dtype == DType::f64 ? 8 : job.dtype == DType::f32 ? 4 : 2;
  for (int64_t c = 0; c < job.cin; ++c) {
    T* channel = buffer + c * job.channel_pitch;
    const int64_t base = (group * job.cin + c) * plane;
    // Rows of a channel are too short for the hardware to see a stream: fetch the next channel's.
    if (c + 1 < job.cin)
      for (int64_t i = 0; i < count; ++i)
        if (list[i].from >= 0) {
          const char* row =
              static_cast<const char*>(job.x) + (base + plane + list[i].from) * element;
          for (int64_t at = 0; at < list[i].length * element; at += 64)
            __builtin_prefetch(row + at);
        }
    for (int64_t i = 0; i < count; ++i) {
      const Copy& copy = list[i];
      if (copy.from < 0)
        memset(channel + copy.to, 0, copy.length * sizeof(T));
      else
        read_row(job.dtype, job.x, base + copy.from, channel + copy.to, copy.length);
    }
  }
}

// ------------------------------------------------------------------------------ output rows

struct Piece {       // a run of tile positions inside one strip that are outputs of one row
  int64_t position;  // in the strip
  int64_t length;    //
  int64_t n, d, h;   // image, and phase-local plane and row
  int64_t column;    // phase-local
};

struct Strip {
  int64_t piece_begin, piece_end;
};

// Cuts the tile into strips and these into pieces.
template <class T>
static void list_pieces(const Job& job, int64_t tile_begin, int64_t length, Piece* pieces,
                        Strip* strips) {
  int64_t columns = 0;  // the widest phase: shorter ones end one column earlier
  for (int64_t p = 0; p < job.phase_count[2]; ++p)
    columns = greatest(columns, job.phases[2][p].count);
  int64_t count = 0;
  for (int64_t begin = 0; begin < length; begin += kStrip<T>, ++strips) {
    strips->piece_begin = count;
    const int64_t strip_length = least(kStrip<T>, length - begin);
    for (int64_t at = 0; at < strip_length;) {
      const int64_t flat = tile_begin + begin + at;
      const int64_t row = flat / job.pitch[2];
      const int64_t column = flat % job.pitch[2];
      const int64_t run = least(strip_length - at, job.pitch[2] - column);
      const int64_t live = least(run, columns - column);
      const int64_t h = row % job.pitch[1];
      const int64_t d = row / job.pitch[1] % job.pitch[0];
      const int64_t n = row / job.pitch[1] / job.pitch[0];
      if (live > 0) pieces[count++] = {at, live, n, d, h, column};
      at += run;
    }
    strips->piece_end = count;
  }
}

template <class T>
struct Weave {  // how to interleave `stride` phases into consecutive outputs
  typename Vector<T>::mask index[8], phase[8];
};

// Output r of a row piece is phase r % stride, position r / stride. A vector of outputs that begins
// at r takes, from every phase, a few neighbouring positions; where they go depends on r % stride
// alone, so `stride` tables serve the whole row.
template <class T>
static void make_weave(int64_t stride, Weave<T>* weave) {
  if (stride > 8) return;
  for (int64_t c = 0; c < stride; ++c)
    for (int64_t i = 0; i < kLanes<T>; ++i) {
      weave->index[c][i] = (c + i) / stride;
      weave->phase[c][i] = (c + i) % stride;
    }
}

// outputs[r] = stage[(r % stride) * pitch + r / stride] for r in [0, length)
template <class T>
static void interleave(const T* stage, int64_t pitch, int64_t stride, const Weave<T>& weave,
                       T* outputs, int64_t length) {
  if (stride == 1) {
    memcpy(outputs, stage, length * sizeof(T));
    return;
  }
#if !defined(__clang__)
  using V = typename Vector<T>::type;
  if (stride <= 8 && UPCONV_VECTOR_BYTES >= 32) {
    int64_t c = 0, position = 0;  // of output r: r = position * stride + c
    for (int64_t r = 0; r < length; r += kLanes<T>) {
      V result = __builtin_shuffle(load(stage + position), weave.index[c]);
      for (int64_t p = 1; p < stride; ++p) {
        const V other = __builtin_shuffle(load(stage + p * pitch + position), weave.index[c]);
        result = weave.phase[c] == static_cast<int>(p) ? other : result;
      }
      if (r + kLanes<T> <= length) {
        store(outputs + r, result);
      } else {
        T last[kLanes<T>];
        store(last, result);
        memcpy(outputs + r, last, (length - r) * sizeof(T));
      }
      for (c += kLanes<T>; c >= stride; c -= stride) ++position;
    }
    return;
  }
#endif
  for (int64_t p = 0; p < stride; ++p)
    for (int64_t r = p, q = 0; r < length; r += stride, ++q) outputs[r] = stage[p * pitch + q];
}

// Stores the outputs of one strip, one block of channels and all width phases.
template <class T>
static void store_strip(const Job& job, const Piece* piece, const Piece* end,
                        const PhaseRange& depth, const PhaseRange& height, int64_t channel,
                        int64_t channels, const T* stage, const Weave<T>& weave, T* row) {
  const bool native = job.dtype == DType::f32 || job.dtype == DType::f64;
  const int64_t stride = job.stride[2];
  const int64_t out_plane = job.out[0] * job.out[1] * job.out[2];
  for (; piece != end; ++piece) {
    if (piece->d >= depth.count || piece->h >= height.count) continue;
    const int64_t column = piece->column * stride;
    const int64_t length = least(piece->length * stride, job.out[2] - column);
    const int64_t out_d = depth.first + piece->d * job.stride[0];
    const int64_t out_h = height.first + piece->h * job.stride[1];
    int64_t at = (piece->n * job.groups * job.cout + channel) * out_plane +
                 (out_d * job.out[1] + out_h) * job.out[2] + column;
    const T* sums = stage + piece->position;
    for (int64_t c = 0; c < channels; ++c, at += out_plane, sums += stride * kStrip<T>) {
      if (native) {
        interleave(sums, kStrip<T>, stride, weave, static_cast<T*>(job.y) + at, length);
      } else {
        interleave(sums, kStrip<T>, stride, weave, row, length);
        write_row(job.dtype, row, job.y, at, length);
      }
    }
  }
}

// -------------------------------------------------------------------------- one unit of work

// Scratch of one thread: input buffer, stage, one output row, copies, pieces, strips.
template <class T>
static void compute(const Job& job, int64_t item, void* scratch) {
  const int64_t chunk = item % job.chunks;
  const int64_t group = item / job.chunks % job.groups;
  const int64_t tile_begin = item / job.chunks / job.groups * job.tile;
  const int64_t length = least(job.tile, job.flat_size - tile_begin);
  const int64_t stride = job.stride[2];

  T* buffer = static_cast<T*>(scratch);
  T* stage = buffer + (job.cin * job.channel_pitch + kStrip<T>);
  // Phases the output is too narrow to have stay unwritten in the stage: `interleave` reads them
  // and stores nothing of them.
  T* row = stage + (8 * stride + 1) * kStrip<T>;
  Copy* copies = reinterpret_cast<Copy*>(row + stride * kStrip<T>);
  Piece* pieces = reinterpret_cast<Piece*>(copies + job.max_copies);
  Strip* strips = reinterpret_cast<Strip*>(pieces + job.max_pieces);

  fill_input(job, group, copies, list_copies(job, tile_begin, copies), buffer);
  list_pieces<T>(job, tile_begin, length, pieces, strips);
  Weave<T> weave;
  make_weave(stride, &weave);

  MicroArgs<T> args;
  args.cin = job.cin;
  args.channel_pitch = job.channel_pitch;
  args.stage_pitch = stride * kStrip<T>;
  for (int64_t b = job.chunk_begin[chunk]; b < job.chunk_begin[chunk + 1]; ++b) {
    const ChannelBlock& block = job.blocks[b];
    T bias[8] = {};
    if (job.bias) read_row(job.dtype, job.bias, group * job.cout + block.first, bias, block.live);
    args.bias = bias;
    const T* weights =
        static_cast<const T*>(job.packed) + group * job.packed_pitch + block.packed_begin;
    const TapRange* taps = job.taps;
    for (int64_t pd = 0; pd < job.phase_count[0]; ++pd)
      for (int64_t ph = 0; ph < job.phase_count[1]; ++ph, taps += job.phase_count[2])
        for (int64_t s = 0; s * kStrip<T> < length; ++s) {
          const PhaseRange &depth = job.phases[0][pd], &height = job.phases[1][ph];
          // Only the part of the strip that holds outputs of these phases is computed.
          int64_t begin = kStrip<T>, end = 0;
          for (int64_t i = strips[s].piece_begin; i < strips[s].piece_end; ++i) {
            const Piece& piece = pieces[i];
            if (piece.d >= depth.count || piece.h >= height.count) continue;
            begin = least(begin, piece.position);
            end = piece.position + piece.length;
          }
          if (begin >= end) continue;
          args.x = buffer + s * kStrip<T>;
          for (int64_t pw = 0; pw < job.phase_count[2]; ++pw) {
            args.w = weights + taps[pw].begin * job.cin * block.rows;
            args.taps = job.tap_offset + taps[pw].begin;
            args.tap_count = taps[pw].end - taps[pw].begin;
            args.stage = stage + pw * kStrip<T>;
            micro_rows(block.rows, args, begin, end);
          }
          store_strip(job, pieces + strips[s].piece_begin, pieces + strips[s].piece_end, depth,
                      height, group * job.cout + block.first, block.live, stage, weave, row);
        }
  }
}

// ---------------------------------------------------------------------------------- weights

// `kPackChannels` input channels of one group, from (cin, cout, kernel) to
// [block][phase][channel block][tap][cin][rows]: few enough that what they read stays in L1 while
// the taps pass, and enough to write whole cache lines. False where one is infinite or NaN.
template <class T, class Stored, T (*Convert)(Stored)>
static bool pack(const Job& job, int64_t item) {
  static_assert(kChannelBlock % kPackChannels == 0, "a part lies in one block of channels");
  const int64_t parts = (job.cin + kPackChannels - 1) / kPackChannels;
  const int64_t group = item / parts, first = item % parts * kPackChannels;
  const int64_t count = least(kPackChannels, job.cin - first);
  const int64_t c0 = first / kChannelBlock * kChannelBlock;
  const int64_t channels = least(kChannelBlock, job.cin - c0);
  const int64_t kernel = job.kernel[0] * job.kernel[1] * job.kernel[2];
  const int64_t phases = job.phase_count[0] * job.phase_count[1] * job.phase_count[2];
  const int64_t cout = job.cout;
  if (!all_finite(job.dtype, job.w, (group * job.cin + first) * cout * kernel,
                  count * cout * kernel))
    return false;
  for (int64_t b = 0; b < job.block_count; ++b) {
    const ChannelBlock block = job.blocks[b];
    const Stored* from = static_cast<const Stored*>(job.w) +
                         ((group * job.cin + first) * cout + block.first) * kernel;
    T* packed = static_cast<T*>(job.packed) + group * job.packed_pitch + block.packed_begin;
    for (int64_t p = 0; p < phases; ++p) {
      const TapRange taps = job.taps[p];
      T* phase = packed + (taps.begin * job.cin + c0 * (taps.end - taps.begin)) * block.rows;
      for (int64_t t = taps.begin; t < taps.end; ++t) {
        const Stored* tap = from + job.tap_kernel[t];
        T* to = phase + ((t - taps.begin) * channels + first - c0) * block.rows;
        for (int64_t c = 0; c < count; ++c, tap += cout * kernel, to += block.rows) {
          if (block.live == 8) {
#pragma GCC unroll 8
            for (int r = 0; r < 8; ++r) to[r] = Convert(tap[r * kernel]);
          } else {
            for (int r = 0; r < block.rows; ++r)
              to[r] = r < block.live ? Convert(tap[r * kernel]) : T{};
          }
        }
      }
    }
  }
  return true;
}

static inline float same(float number) { return number; }
static inline double same(double number) { return number; }

static bool pack_float(const Job& job, int64_t item) {
  if (job.dtype == DType::f32) return pack<float, float, same>(job, item);
  if (job.dtype == DType::bf16) return pack<float, uint16_t, bfloat_to_float>(job, item);
  return pack<float, uint16_t, half_to_float>(job, item);
}

// ------------------------------------------------------------------------------------ table

static const Kernels kFloat = {UPCONV_REGISTERS >= 32 ? 8 : 4, pack_float, compute<float>};
static const Kernels kDouble = {UPCONV_REGISTERS >= 32 ? 8 : 4, pack<double, double, same>,
                                compute<double>};

}  // namespace UPCONV_ISA
}  // namespace upconv
