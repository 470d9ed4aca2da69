// Stands in for csrc/cuda/mma_ptx.cuh when the kernel runs on the CPU: the same wrappers.
#pragma once

#include <map>

#include "cuda_on_cpu.h"

namespace upconv {

inline unsigned char memory[232 << 10] __attribute__((aligned(128)));  // of one block
constexpr uint32_t kSharedBase = 1024;

namespace mma_ptx {

inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(static_cast<const unsigned char*>(pointer) - memory) + kSharedBase;
}
inline unsigned char* at(uint32_t address, uint32_t bytes) {
  if (address < kSharedBase || address - kSharedBase + bytes > sizeof(memory))
    cpu::fail("outside shared memory");
  if (address % bytes) cpu::fail("misaligned shared memory");
  return memory + (address - kSharedBase);
}

inline void copy_async16(uint32_t destination, const void* source) {
  cpu::current->open.push_back({at(destination, 16), source, 16});
}
template <int kBytes>
void copy_async(uint32_t destination, const void* source, int valid) {
  if (reinterpret_cast<uintptr_t>(source) % kBytes) cpu::fail("misaligned copy");
  unsigned char* const to = at(destination, kBytes);
  if (valid != kBytes) std::memset(to + valid, 0, static_cast<size_t>(kBytes - valid));
  cpu::current->open.push_back({to, source, static_cast<size_t>(valid)});
}
inline void copy_async_commit() {
  cpu::current->groups.push_back(std::move(cpu::current->open));
  cpu::current->open.clear();
}
template <int kPending>
void copy_async_wait() {
  auto& groups = cpu::current->groups;
  while (static_cast<int>(groups.size()) > kPending) {
    cpu::finish(groups.front());
    groups.erase(groups.begin());
  }
}

// A barrier keeps its phase in its own 8 bytes; its copies wait in a list beside it.
inline std::vector<std::pair<uint32_t, cpu::Copy>> bulk_copies;
inline uint64_t& barrier_phase(uint32_t barrier) {
  return *reinterpret_cast<uint64_t*>(at(barrier, 8));
}
inline std::map<uint32_t, std::pair<uint32_t, uint32_t>> arrivals;  // expected and still to come
inline void barrier_init(uint32_t barrier, uint32_t count) {
  barrier_phase(barrier) = 0;
  arrivals[barrier] = {count, count};
}
inline void barrier_arrive(uint32_t barrier) {
  auto& [all, left] = arrivals.at(barrier);
  if (--left > 0) return;
  left = all;
  ++barrier_phase(barrier);
}
inline void barrier_init_fence() {}
inline uint32_t expected_bytes;
inline void barrier_arrive_expect(uint32_t, uint32_t bytes) { expected_bytes = bytes; }
inline void bulk_copy(uint32_t destination, const void* source, uint32_t bytes, uint32_t barrier) {
  if (bytes != expected_bytes || bytes % 16 || reinterpret_cast<uintptr_t>(source) % 16)
    cpu::fail("bulk copy of another size, or misaligned");
  at(destination, 16);
  at(destination + bytes - 16, 16);
  bulk_copies.push_back({barrier, {at(destination, 16), source, bytes}});
}

// What stands in for a CUtensorMap: sizes and strides (in bytes) of 5 dimensions, and of a box.
struct TensorMap {
  const char* base;
  int sizes[5];
  int64_t strides[5];
  int box[5];
  bool rounds;
};
inline uint32_t round_to_tf32(uint32_t bits);

inline void tensor_copy(uint32_t destination, const void* given, int c0, int c1, int c2, int c3,
                        int c4, uint32_t barrier) {
  TensorMap map;
  std::memcpy(&map, given, sizeof(map));
  const int first[] = {c0, c1, c2, c3, c4}, element = static_cast<int>(map.strides[0]);
  uint32_t total = element;
  for (const int size : map.box) total *= size;
  if (total != expected_bytes || c0 * element % 16 || destination % 128)
    cpu::fail("box of another size, or misaligned");
  for (const int64_t stride : {map.strides[1], map.strides[2], map.strides[3], map.strides[4]})
    if (stride % 16 || reinterpret_cast<uintptr_t>(map.base) % 16) cpu::fail("TMA: 16 bytes");
  // Rows of elements, each by itself; behind them one copy of nothing, which completes the box.
  unsigned char* to = at(destination, 1);
  for (uint32_t i = 0; i < total / element; ++i, to += element) {
    int64_t offset = 0;
    bool inside = true;
    uint32_t rest = i;
    for (int d = 0; d < 5; ++d) {
      const int c = first[d] + static_cast<int>(rest % map.box[d]);
      rest /= map.box[d];
      inside = inside && c >= 0 && c < map.sizes[d];
      offset += c * map.strides[d];
    }
    if (!inside) {
      std::memset(to, 0, element);
    } else if (map.rounds) {
      uint32_t bits;
      std::memcpy(&bits, map.base + offset, 4);
      bits = round_to_tf32(bits);
      std::memcpy(to, &bits, 4);
    } else {
      std::memcpy(to, map.base + offset, element);
    }
  }
  bulk_copies.push_back({barrier, {to, to, 0}});
}

inline void barrier_wait(uint32_t barrier, uint32_t parity) {
  for (int turns = 0; turns < 100000; ++turns) {
    if ((barrier_phase(barrier) & 1) != parity) return;  // that phase is over
    for (size_t i = 0; i < bulk_copies.size(); ++i) {
      if (bulk_copies[i].first != barrier) continue;
      const cpu::Copy copy = bulk_copies[i].second;
      std::memcpy(copy.to, copy.from, copy.bytes);
      bulk_copies.erase(bulk_copies.begin() + static_cast<long>(i));
      ++barrier_phase(barrier);
      return;
    }
    swapcontext(&cpu::current->context, &cpu::scheduler);  // another thread may start it yet
  }
  cpu::fail("waits for a copy that nobody started");
}

template <typename Number>
void store_shared(uint32_t address, Number v) {
  std::memcpy(at(address, sizeof(v)), &v, sizeof(v));
}
inline uint32_t load_shared16(uint32_t address) {
  uint16_t v;
  std::memcpy(&v, at(address, 2), 2);
  return v;
}
inline uint32_t load_shared32(uint32_t address) {
  uint32_t v;
  std::memcpy(&v, at(address, 4), 4);
  return v;
}
inline void load_shared(uint32_t address, uint32_t (&v)[2]) { std::memcpy(v, at(address, 8), 8); }
inline void load_shared(uint32_t address, uint32_t (&v)[4]) { std::memcpy(v, at(address, 16), 16); }

inline void warp_wide(cpu::Deposit deposit, void (*act)(std::vector<cpu::Deposit>&)) {
  const unsigned warp = threadIdx.x / 32;
  cpu::deposits[warp][threadIdx.x % 32] = deposit;
  cpu::meet(cpu::warps[warp], 32, [&] { act(cpu::deposits[warp]); });
}

inline void load_matrices(uint32_t address, uint32_t (&v)[4]) {
  warp_wide({address, v, nullptr, nullptr, {}}, [](std::vector<cpu::Deposit>& lanes) {
    for (int lane = 0; lane < 32; ++lane)
      for (int m = 0; m < 4; ++m)
        std::memcpy(&lanes[lane].out[m], at(lanes[m * 8 + lane / 4].address, 16) + lane % 4 * 4, 4);
  });
}

inline void load_matrices_transposed(uint32_t address, uint32_t (&v)[4]) {
  warp_wide({address, v, nullptr, nullptr, {}}, [](std::vector<cpu::Deposit>& lanes) {
    for (int lane = 0; lane < 32; ++lane)
      for (int m = 0; m < 4; ++m)
        for (int half = 0; half < 2; ++half) {
          const unsigned char* const row = at(lanes[m * 8 + lane % 4 * 2 + half].address, 16);
          std::memcpy(reinterpret_cast<char*>(&lanes[lane].out[m]) + 2 * half, row + lane / 4 * 2,
                      2);
        }
  });
}

inline uint32_t round_to_tf32(uint32_t bits) {
  return (bits & 0x7f800000) == 0x7f800000 ? bits : (bits + 0x1000) & 0xffffe000;
}

inline float value(uint32_t bits, int) { return __uint_as_float(bits & 0xffffe000); }
template <typename Number>
float half_of(uint32_t word, int half) {
  const unsigned short bits = static_cast<unsigned short>(word >> 16 * half);
  Number number;
  std::memcpy(&number, &bits, 2);
  return static_cast<float>(number);
}

// kPer numbers a register; `read(word, which)` gives one. K index: register pair, lane % 4, which.
template <int kPer, float (*read)(uint32_t, int)>
void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  warp_wide({0, nullptr, d, a, {b0, b1}}, [](std::vector<cpu::Deposit>& lanes) {
    for (int lane = 0; lane < 32; ++lane)
      for (int i = 0; i < 4; ++i) {
        const int row = lane / 4, column = lane % 4 * 2 + i % 2, lower = i / 2;
        double sum = lanes[lane].d[i];
        for (int half = 0; half < 2; ++half)
          for (int t = 0; t < 4; ++t)
            for (int e = 0; e < kPer; ++e)
              sum += static_cast<double>(read(lanes[row * 4 + t].a[half * 2 + lower], e)) *
                     read(lanes[column * 4 + t].b[half], e);
        lanes[lane].d[i] = static_cast<float>(sum);
      }
  });
}
inline void mma_tf32(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  multiply<1, value>(d, a, b0, b1);
}
inline void mma_tf32_ordered(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  multiply<1, value>(d, a, b0, b1);
}
inline void mma_bf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  multiply<2, half_of<__nv_bfloat16>>(d, a, b0, b1);
}
inline void mma_fp16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  multiply<2, half_of<__half>>(d, a, b0, b1);
}

}  // namespace mma_ptx
}  // namespace upconv
