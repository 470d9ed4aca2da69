// Tables of GPU kernels without a GPU: rows that only have a name, and the look-up that finds them.
#include "binding/cuda_kernel.h"

namespace upconv {
namespace {

CudaKernel row(KernelId id, const char* name) {
  return {id, name, 1, nullptr, nullptr, nullptr, nullptr};
}

CudaKernel row(KernelId id, const char* name, unsigned operands) {
  CudaKernel kernel = row(id, name);
  kernel.operands = operands;
  return kernel;
}

const KernelTable& own() {
  static const KernelTable table = {row(kMmaFprop, "own", kTf32 | kBf16),
                                    row(kDirectFprop, "direct")};
  return table;
}

int64_t table_of_fp16() {
  static const KernelTable table = {row(kMmaFprop, "fp16", kFp16)};
  return reinterpret_cast<int64_t>(&table);
}

int64_t table_of_strict() {
  static const KernelTable table = {row(kMmaFprop, "strict", kSplit)};
  return reinterpret_cast<int64_t>(&table);
}

// The name of the kernel that a key's plan gets; empty where there is none.
std::string found(at::IntArrayRef values, int64_t id) {
  PlanKey key;
  for (int64_t value : values) key.push(value);
  const CudaKernel* kernel = find_kernel_anywhere(own(), static_cast<KernelId>(id), key);
  return kernel == nullptr ? "" : kernel->name;
}

TORCH_LIBRARY(upconv_probe, library) {
  library.def("found(int[] key, int id) -> str", found);
  library.def("table_of_fp16() -> int", table_of_fp16);
  library.def("table_of_strict() -> int", table_of_strict);
}

}  // namespace
}  // namespace upconv
