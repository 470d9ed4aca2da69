// Fibers, global memory and TMA of the CPU's make-believe device.
#include <ucontext.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "ptx.cuh"

Index threadIdx, blockIdx;
dim3 blockDim, gridDim;

namespace upconv {
alignas(1024) unsigned char memory[kMemoryBytes];
std::map<uint32_t, ptx::Barrier> ptx::barriers;
}  // namespace upconv

// --- Fibers ----------------------------------------------------------------------------------

namespace {

constexpr size_t kStack = 128 * 1024;
struct Fiber {
  ucontext_t context;
  std::vector<unsigned char> stack;
  bool done;
  unsigned asked;
};
std::vector<Fiber> fibers;
ucontext_t scheduler;
unsigned current;
void (*block_body)(void*);
void* block_argument;
std::map<int, std::pair<int, int>> meetings;  // first thread -> arrived, how often all have met
std::string failure;
uint64_t random_state = 1;
bool running = false;

void enter() {
  block_body(block_argument);
  fibers[current].done = true;
  swapcontext(&fibers[current].context, &scheduler);
}

}  // namespace

// A failure ends the process's call: the fiber that failed never goes on.
void fail(const char* why) {
  if (failure.empty()) failure = why;
  while (running) swapcontext(&fibers[current].context, &scheduler);
}

void next_fiber() { swapcontext(&fibers[current].context, &scheduler); }

void meet(int first, int threads) {
  auto& [arrived, met] = meetings[first * 1024 + threads];
  const int round = met;
  if (++arrived == threads) {
    arrived = 0;
    ++met;
  }
  while (met == round) next_fiber();
}

// Two answers are kept: a thread may be one question ahead of the others, not two.
bool warp_agrees(bool mine) {
  static std::map<unsigned, bool> answers;
  const unsigned asked = fibers[current].asked++;
  const unsigned key = current / 32 * 2 + asked % 2;
  answers[key] = mine;
  __syncwarp();
  return answers[key];
}

uint32_t warp_most(uint32_t mine) {
  static std::map<int, uint32_t> shown;
  shown[current] = mine;
  __syncwarp();
  uint32_t most = 0;
  for (int i = current / 32 * 32; i < current / 32 * 32 + 32; ++i) most = max(most, shown[i]);
  __syncwarp();
  return most;
}

// The threads go on in an order that changes from round to round.
void run_block(int threads, void (*body)(void*), void* argument) {
  if (!failure.empty()) return;
  block_body = body;
  block_argument = argument;
  meetings.clear();
  upconv::ptx::barriers.clear();
  std::memset(upconv::memory, 0xff, sizeof(upconv::memory));  // NaN in every format
  if (fibers.size() < static_cast<size_t>(threads)) fibers.resize(threads);
  for (int i = 0; i < threads; ++i) {
    Fiber& fiber = fibers[i];
    fiber.done = false;
    fiber.asked = 0;
    fiber.stack.resize(kStack);
    getcontext(&fiber.context);
    fiber.context.uc_stack = {fiber.stack.data(), 0, kStack};
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, enter, 0);
  }
  running = true;
  int left = threads;
  uint64_t rounds = 0;
  while (left && failure.empty()) {
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    const unsigned start = (random_state >> 33) % threads;
    for (int i = 0; i < threads && failure.empty(); ++i) {
      current = (start + i) % threads;
      if (fibers[current].done) continue;
      threadIdx = {current};
      swapcontext(&scheduler, &fibers[current].context);
      if (fibers[current].done) --left;
    }
    if (++rounds > 200000) failure = "the block hangs";
  }
  running = false;
}

// --- Memory ----------------------------------------------------------------------------------

namespace {
std::vector<Tensor> tensors;
}  // namespace

void begin_run(const std::vector<Tensor>& of_run, uint64_t seed) {
  tensors = of_run;
  failure.clear();
  random_state = seed;
}

const char* end_run() { return failure.c_str(); }

void check_global(const void* address, size_t bytes, bool write) {
  const auto* at = static_cast<const unsigned char*>(address);
  for (const Tensor& tensor : tensors) {
    const auto* begin = static_cast<const unsigned char*>(tensor.begin);
    const bool inside = at >= begin && at + bytes <= begin + tensor.bytes;
    if (inside && tensor.written == write) return;
  }
  fail(write ? "a store outside the output" : "a load outside the tensors");
}

CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType type, uint32_t rank,
                                void* base, const cuuint64_t* sizes, const cuuint64_t* strides,
                                const cuuint32_t* box, const cuuint32_t* steps, int, int swizzle,
                                int, int) {
  map->span = swizzle ? 16u << swizzle : 0;
  map->base = static_cast<const unsigned char*>(base);
  map->element = type == CU_TENSOR_MAP_DATA_TYPE_UINT16 ? 2 : 4;
  map->rounds = type == CU_TENSOR_MAP_DATA_TYPE_TFLOAT32;
  map->rank = static_cast<int>(rank);
  if (rank != 5 || reinterpret_cast<uintptr_t>(base) % 16) return 1;
  for (int i = 0; i < 5; ++i) {
    map->size[i] = sizes[i];
    map->stride[i] = i ? strides[i - 1] : map->element;
    map->box[i] = box[i];
    map->step[i] = steps[i];
    if (i && (map->stride[i] % 16 || map->stride[i] >> 40)) return 1;
    if (!sizes[i] || !box[i] || box[i] > 256 || !steps[i] || steps[i] > 8) return 1;
  }
  if (map->span && box[0] * map->element != map->span) return 1;
  return box[0] * map->element % 16 ? 1 : 0;
}

void upconv::ptx::box_copy(uint32_t to, const CUtensorMap& map, int c0, int c1, int c2, int c3,
                           int c4, uint32_t barrier) {
  const int64_t first[] = {c0, c1, c2, c3, c4};
  if (c0 * map.element % 16) fail("a box that does not begin on 16 bytes");
  if (to % (map.span ? 8 * map.span : 128)) fail("a box that does not land on 128 bytes");
  int64_t count[5], total = 1;
  for (int i = 0; i < 5; ++i) {
    count[i] = i ? (map.box[i] + map.step[i] - 1) / map.step[i] : map.box[i];
    total *= count[i];
  }
  shared_pointer(to, static_cast<uint32_t>(total * map.element));
  for (int64_t n = 0; n < total; ++n) {
    const uint32_t address = to + static_cast<uint32_t>(n * map.element);
    unsigned char* target = shared_pointer(swizzled(address, map.span), map.element);
    int64_t rest = n, offset = 0;
    bool inside = true;
    for (int i = 0; i < 5; ++i) {
      const int64_t at = first[i] + rest % count[i] * (i ? map.step[i] : 1);
      rest /= count[i];
      inside = inside && at >= 0 && at < static_cast<int64_t>(map.size[i]);
      offset += at * static_cast<int64_t>(map.stride[i]);
    }
    std::memset(target, 0, map.element);
    if (!inside) continue;
    check_global(map.base + offset, map.element, false);
    std::memcpy(target, map.base + offset, map.element);
    if (!map.rounds) continue;
    uint32_t bits;
    std::memcpy(&bits, target, 4);
    if ((bits & 0x7fffffffu) <= 0x7f800000u) {  // to nearest, ties to even; a NaN stays one
      bits = (bits + 0xfffu + (bits >> 13 & 1u)) & 0xffffe000u;
    }
    std::memcpy(target, &bits, 4);
  }
  complete(barrier, static_cast<uint32_t>(total * map.element));
}
