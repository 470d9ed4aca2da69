// Vectors and the micro-kernel of the forward kernel, for one instruction set. Part of
// fprop_kernel.h, which see.

namespace upconv {
namespace UPCONV_ISA {

// ---------------------------------------------------------------------------------- vectors

template <class T>
struct Vector;
template <>
struct Vector<float> {
  typedef float type __attribute__((vector_size(UPCONV_VECTOR_BYTES)));
  typedef float loose __attribute__((vector_size(UPCONV_VECTOR_BYTES), aligned(4), may_alias));
  typedef int32_t mask __attribute__((vector_size(UPCONV_VECTOR_BYTES)));
};
template <>
struct Vector<double> {
  typedef double type __attribute__((vector_size(UPCONV_VECTOR_BYTES)));
  typedef double loose __attribute__((vector_size(UPCONV_VECTOR_BYTES), aligned(8), may_alias));
  typedef int64_t mask __attribute__((vector_size(UPCONV_VECTOR_BYTES)));
};

template <class T>
constexpr int kLanes = UPCONV_VECTOR_BYTES / sizeof(T);
template <class T>
constexpr int64_t kStrip = kStripBytes / sizeof(T);

template <class T>
static inline typename Vector<T>::type load(const T* p) {
  return *reinterpret_cast<const typename Vector<T>::loose*>(p);
}
template <class T>
static inline void store(T* p, typename Vector<T>::type v) {
  *reinterpret_cast<typename Vector<T>::loose*>(p) = v;
}
static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t greatest(int64_t a, int64_t b) { return a > b ? a : b; }

// ----------------------------------------------------------------------------- micro-kernel

// `Rows` output channels by `Width` vectors of positions, kept in registers over all taps and input
// channels. AVX-512: 8 x 3 = 24 sums, 3 inputs and a broadcast weight fit 32 registers; a step of
// 24 multiply-adds (12 cycles) needs 3 + 8 loads (5.5 to 7 cycles). AVX2: 4 x 3 of 16 registers.
template <int Rows>
constexpr int kWidth = UPCONV_REGISTERS >= 32 ? (Rows == 8 ? 3 : 6)
                                              : (Rows == 4   ? 3
                                                 : Rows == 2 ? 4
                                                             : 6);

constexpr int kPrefetch = 4;  // channels

template <class T>
struct MicroArgs {
  const T* x;  // input buffer at the strip's first position
  const T* w;  // [channel block][tap][cin][Rows]
  const int64_t* taps;
  int64_t tap_count, cin, channel_pitch;
  const T* bias;  // Rows values
  T* stage;       // sums go to stage + row * stage_pitch + position
  int64_t stage_pitch;
};

// The micro-kernel's innermost loop: one tap, up to kChannelBlock input channels.
template <class T, int Rows, int Width, bool Fetch>
static inline __attribute__((always_inline)) void accumulate(
    const T* x, int64_t pitch, const T* w, int64_t channels,
    typename Vector<T>::type (&sum)[Rows][Width]) {
  using V = typename Vector<T>::type;
  for (int64_t c = 0; c < channels; ++c, x += pitch, w += Rows) {
    V in[Width];
    if (Fetch) {
#pragma GCC unroll 8
      for (int v = 0; v <= Width; ++v)
        __builtin_prefetch(x + kPrefetch * pitch + v * kLanes<T> - (v == Width));
    }
#pragma GCC unroll 8
    for (int v = 0; v < Width; ++v) {
      in[v] = load(x + v * kLanes<T>);
#if defined(__x86_64__)
      asm("" : "+v"(in[v]));  // or GCC loads it again for every row: half the speed with 2 rows
#endif
    }
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) {
      const V weight = w[r] - V{};
#pragma GCC unroll 8
      for (int v = 0; v < Width; ++v) sum[r][v] += weight * in[v];
    }
  }
}

template <class T, int Rows, int Width>
__attribute__((noinline)) static void micro(const MicroArgs<T>& args, int64_t position) {
  using V = typename Vector<T>::type;
  const int64_t pitch = args.channel_pitch, cin = args.cin, stage_pitch = args.stage_pitch;
  const T* w = args.w;
  T* stage = args.stage + position;
  V sum[Rows][Width];
#pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < Width; ++v) sum[r][v] = args.bias[r] - V{};
  for (int64_t c0 = 0; c0 < cin; c0 += kChannelBlock) {
    const int64_t channels = least(kChannelBlock, cin - c0);
    const T* block = args.x + c0 * pitch + position;
    int64_t last = INT64_MIN / 2;
    for (int64_t t = 0; t < args.tap_count; ++t, w += channels * Rows) {
      // Loads that cross a cache line are slow when they miss L1, so the first tap of a row fetches
      // the lines ahead; the others find them in L1. With few rows the load ports are full already.
      const int64_t tap = args.taps[t];
      if (Rows > 2 && (tap - last > kLanes<T> || last - tap > kLanes<T>))
        accumulate<T, Rows, Width, true>(block + tap, pitch, w, channels, sum);
      else
        accumulate<T, Rows, Width, false>(block + tap, pitch, w, channels, sum);
      last = tap;
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < Width; ++v) store(stage + r * stage_pitch + v * kLanes<T>, sum[r][v]);
}

// Positions [begin, end) of a strip, rounded out to whole vectors.
template <class T, int Rows>
static void micro_strip(const MicroArgs<T>& args, int64_t begin, int64_t end) {
  int64_t at = begin / kLanes<T> * kLanes<T>;
  while (at < end) {
    const int64_t vectors = (end - at + kLanes<T> - 1) / kLanes<T>;
    if (vectors >= kWidth<Rows>) {
      micro<T, Rows, kWidth<Rows>>(args, at);
      at += kWidth<Rows> * kLanes<T>;
    } else if (vectors >= 2) {
      micro<T, Rows, 2>(args, at);
      at += 2 * kLanes<T>;
    } else {
      micro<T, Rows, 1>(args, at);
      at += kLanes<T>;
    }
  }
}

template <class T>
static void micro_rows(int rows, const MicroArgs<T>& args, int64_t begin, int64_t end) {
  switch (rows) {
#if UPCONV_REGISTERS >= 32
    case 8:
      return micro_strip<T, 8>(args, begin, end);
#endif
    case 4:
      return micro_strip<T, 4>(args, begin, end);
    case 2:
      return micro_strip<T, 2>(args, begin, end);
    default:
      return micro_strip<T, 1>(args, begin, end);
  }
}

}  // namespace UPCONV_ISA
}  // namespace upconv
