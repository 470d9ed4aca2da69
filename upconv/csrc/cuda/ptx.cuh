// One PTX instruction per wrapper; no other file holds `asm`, except wgmma.cuh, which is generated.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace upconv::ptx {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// --- mbarriers -------------------------------------------------------------------------------

__device__ __forceinline__ void barrier_init(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}

__device__ __forceinline__ void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Nothing where `on` is false; a predicate, not a branch.
__device__ __forceinline__ void barrier_arrive_if(bool on, uint32_t barrier) {
  asm volatile(
      "{\n"
      ".reg .pred on;\n"
      "setp.ne.u32 on, %0, 0;\n"
      "@on mbarrier.arrive.shared::cta.b64 _, [%1];\n"
      "}\n" ::"r"(static_cast<uint32_t>(on)),
      "r"(barrier)
      : "memory");
}

// Arrives once and makes the phase also wait for `bytes` of bulk copies.
__device__ __forceinline__ void barrier_arrive_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// Has the phase of the given parity completed?
__device__ __forceinline__ bool barrier_test(uint32_t barrier, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
      "selp.u32 %0, 1, 0, done;\n"
      "}\n"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
}

// Returns when the phase of the given parity has completed.
__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "wait:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra finished;\n"
      "bra wait;\n"
      "finished:\n"
      "}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// The 128 threads of a warpgroup meet on named barrier `id`.
__device__ __forceinline__ void warpgroup_sync(int id) {
  asm volatile("bar.sync %0, 128;" ::"r"(id) : "memory");
}
// The 64 threads of two warps.
__device__ __forceinline__ void warp_pair_sync(int id) {
  asm volatile("bar.sync %0, 64;" ::"r"(id) : "memory");
}

// True for one thread of a warp, all of which ask. The assembler then knows that only one starts a
// copy; after a comparison of thread numbers it puts each copy into a loop over the threads.
__device__ __forceinline__ bool elected() {
  uint32_t on;
  asm volatile(
      "{\n"
      ".reg .pred on;\n"
      "elect.sync _|on, 0xffffffff;\n"
      "selp.u32 %0, 1, 0, on;\n"
      "}\n"
      : "=r"(on));
  return on != 0;
}

// --- memory ----------------------------------------------------------------------------------

// Bulk copy global -> shared, completing on a barrier; 16-byte aligned on both sides.
__device__ __forceinline__ void bulk_copy(uint32_t destination, const void* source, uint32_t bytes,
                                          uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(destination),
      "l"(source), "r"(bytes), "r"(barrier)
      : "memory");
}

// Asynchronous copy global -> shared of 4, 8 or 16 bytes; what lies beyond `valid` bytes is zero.
template <int kBytes>
__device__ __forceinline__ void copy_async(uint32_t destination, const void* source, int valid) {
  static_assert(kBytes == 4 || kBytes == 8 || kBytes == 16, "cp.async takes 4, 8 or 16 bytes");
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(destination), "l"(source),
                 "r"(valid)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(destination), "l"(source),
                 "n"(kBytes), "r"(valid)
                 : "memory");
  }
}

__device__ __forceinline__ void copy_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

template <int kPending>
__device__ __forceinline__ void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Arrives on a barrier, of whose count it is a part, when all copies of this thread are there.
__device__ __forceinline__ void copy_async_arrive(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// TMA: a box of a 5-dimensional tensor -> shared memory, completing on a barrier.
__device__ __forceinline__ void box_copy(uint32_t destination, const CUtensorMap& map, int c0,
                                         int c1, int c2, int c3, int c4, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%2, %3, %4, %5, %6}], [%7];" ::"r"(destination),
      "l"(&map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4), "r"(barrier)
      : "memory");
}

__device__ __forceinline__ void load_shared(unsigned short& v, uint32_t address) {
  asm volatile("ld.shared.b16 %0, [%1];" : "=h"(v) : "r"(address) : "memory");
}
__device__ __forceinline__ void load_shared(uint32_t& v, uint32_t address) {
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
}
__device__ __forceinline__ void load_shared(uint2& v, uint32_t address) {
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(address) : "memory");
}
__device__ __forceinline__ void load_shared(float& first, float& second, uint32_t address) {
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
               : "=f"(first), "=f"(second)
               : "r"(address)
               : "memory");
}
__device__ __forceinline__ void load_shared(uint4& v, uint32_t address) {
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address)
               : "memory");
}

// Makes ordinary shared-memory stores of this thread visible to WGMMA and bulk copies.
__device__ __forceinline__ void fence_async_proxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void store_shared(uint32_t address, uint4 v) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.x), "r"(v.y),
               "r"(v.z), "r"(v.w)
               : "memory");
}
// Nothing where `on` is false; a predicate, not a branch.
__device__ __forceinline__ void store_shared_if(bool on, uint32_t address, uint4 v) {
  asm volatile(
      "{\n"
      ".reg .pred on;\n"
      "setp.ne.u32 on, %0, 0;\n"
      "@on st.shared.v4.b32 [%1], {%2, %3, %4, %5};\n"
      "}\n" ::"r"(static_cast<uint32_t>(on)),
      "r"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
      : "memory");
}
__device__ __forceinline__ void store_shared(uint32_t address, uint2 v) {
  asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(address), "r"(v.x), "r"(v.y) : "memory");
}
__device__ __forceinline__ void store_shared(uint32_t address, uint32_t v) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(v) : "memory");
}
__device__ __forceinline__ void store_shared(uint32_t address, unsigned short v) {
  asm volatile("st.shared.b16 [%0], %1;" ::"r"(address), "h"(v) : "memory");
}

// --- numbers and registers -------------------------------------------------------------------

// fp32 -> TF32, to nearest, ties away from zero. The tensor core drops the low 13 bits by itself,
// so that adding half of what they can hold is enough. (Without the addition: 3x the error of
// PyTorch's own TF32 convolution.) Three integer instructions; cvt.rna.tf32 is four, of which a
// compare and a select wait 13 cycles for each other. A NaN stays one: the magnitude stops at its
// largest value.
__device__ __forceinline__ uint32_t round_to_tf32(uint32_t bits) {
  return min((bits & 0x7fffffffu) + 0x1000u, 0x7fffffffu) | (bits & 0x80000000u);
}

// The same in one instruction, nearly: the product is larger by 0.7 to 1.4 times half of what the
// tensor core can tell apart, which then cuts off the rest. What TF32 can hold stays as it is, and
// the mean is kept (to 1e-6); errors are 6 % larger than those of rounding.
__device__ __forceinline__ uint32_t nearly_tf32(uint32_t bits) {
  return __float_as_uint(__uint_as_float(bits) * (1.f + 0x1p-11f * 0.72f));
}

// 16-bit numbers as their bits. CUDA's own headers for them were a fifth of what nvcc reads, 0.6 s
// of every compilation.
struct BFloat16 {
  unsigned short bits;
};
struct Float16 {
  unsigned short bits;
};
__device__ __forceinline__ float widened(BFloat16 v) {
  return __uint_as_float(static_cast<uint32_t>(v.bits) << 16);
}
__device__ __forceinline__ float widened(Float16 v) {
  float wide;
  asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(v.bits));
  return wide;
}
__device__ __forceinline__ BFloat16 to_bfloat16(float v) {
  BFloat16 narrow;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(narrow.bits) : "f"(v));
  return narrow;
}
__device__ __forceinline__ Float16 to_float16(float v) {
  Float16 narrow;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(narrow.bits) : "f"(v));
  return narrow;
}
// Two at once, the first in the lower half.
__device__ __forceinline__ uint32_t to_halves(float low, float high) {
  uint32_t both;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}
__device__ __forceinline__ uint32_t to_bfloat16s(float low, float high) {
  uint32_t both;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}
// The two halves, no larger and no smaller than the bounds, which NaN becomes, too.
__device__ __forceinline__ uint32_t bounded_halves(uint32_t v, uint32_t low, uint32_t high) {
  asm("min.f16x2 %0, %0, %2;\n\tmax.f16x2 %0, %0, %1;" : "+r"(v) : "r"(low), "r"(high));
  return v;
}
// The largest value of the four threads that share the rows of a product.
__device__ __forceinline__ uint32_t most_of_four(uint32_t v) {
  v = max(v, __shfl_xor_sync(~0u, v, 1));
  return max(v, __shfl_xor_sync(~0u, v, 2));
}

// Streaming stores, which CUDA has for its own 16-bit types under this name.
__device__ __forceinline__ void __stcs(BFloat16* to, BFloat16 v) { ::__stcs(&to->bits, v.bits); }
__device__ __forceinline__ void __stcs(Float16* to, Float16 v) { ::__stcs(&to->bits, v.bits); }

// A value that stays in a register. Otherwise the assembler computes what it can from the kernel's
// parameters anew wherever it is used, some 40 cycles each time; what comes out of a shuffle it
// cannot.
template <typename T>
__device__ __forceinline__ T pinned(T value) {
  return __shfl_sync(__activemask(), value, threadIdx.x % 32);
}

// threadIdx.x, read anew: where registers are short ptxas keeps it in memory, and each use waits
// for that.
__device__ __forceinline__ int this_thread() {
  int value;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(value));
  return value;
}

// What is computed from the value is computed here, and not ahead of a loop: a register less.
__device__ __forceinline__ uint32_t computed_here(uint32_t value) {
  asm volatile("" : "+r"(value));
  return value;
}

template <typename T>
__device__ __forceinline__ T* computed_here(T* pointer) {
  asm volatile("" : "+l"(pointer));
  return pointer;
}

template <int kRegisters>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// --- WGMMA life cycle ------------------------------------------------------------------------

__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// The same value, of which the compiler knows nothing: what is computed from it stays in its place.
__device__ __forceinline__ float unknown(float value) {
  asm volatile("" : "+f"(value));
  return value;
}

// Keeps the compiler from reading an accumulator before the wait above has passed.
__device__ __forceinline__ void keep_after_wait(float& accumulator) {
  asm volatile("" : "+f"(accumulator)::"memory");
}

}  // namespace upconv::ptx
