// What the binding asks of a GPU kernel: the sizes of a call, where its tensors lie, a row of a
// table of kernels, and how a plan finds its row.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "common.h"

namespace upconv {

// The sizes of a call, leading dimensions that it does not have as 1. A plan that speaks of other
// sizes than the tensors have would have a kernel read or write outside them.
struct CallSizes {
  int64_t batch, in_channels, out_channels, groups;
  Direction direction;
  int ndim;
  bool channels_last;
  int64_t in[3], out[3], kernel[3];  // depth, height, width

  explicit CallSizes(const PlanKey& key)
      : batch(key[kKeyBatch]),
        in_channels(key[kKeyInChannels]),
        out_channels(key[kKeyOutChannels]),
        groups(key[kKeyGroups]),
        direction(static_cast<Direction>(key[kKeyDirection])),
        ndim(static_cast<int>(key[kKeyNdim])),
        channels_last(key[kKeyChannelsLast] != 0) {
    for (int i = 0; i < 3; ++i) {
      const int dimension = i - (3 - ndim);
      in[i] = out[i] = kernel[i] = 1;
      if (dimension < 0) continue;
      in[i] = key_size(key, kListInSize, dimension);
      kernel[i] = key_size(key, kListKernel, dimension);
      out[i] = key_out_size(key, dimension);
    }
    // The input's gradient is a convolution the other way: a kernel reads what the layer wrote.
    if (direction == kGradInput) {
      std::swap(in_channels, out_channels);
      for (int i = 0; i < 3; ++i) std::swap(in[i], out[i]);
    }
  }

  // Are these the weight's strides between the channels that a kernel reads and writes?
  bool weight_strides(int64_t by_in, int64_t by_out) const {
    const int64_t taps = kernel[0] * kernel[1] * kernel[2];
    const bool swapped = direction == kGradInput;
    return by_in == (swapped ? taps : out_channels / groups * taps) &&
           by_out == (swapped ? in_channels / groups * taps : taps);
  }
};

// Where the tensors of one launch lie; `weight` is packed where the kernel packs. A kernel for the
// weight's gradient gets grad_output in its place.
struct Operands {
  const void* input;
  const void* weight;
  const void* bias;  // null where there is none
  void* output;
  void* workspace = nullptr;      // of the size that the kernel asks for
  void* bias_gradient = nullptr;  // for plans whose kernel adds it up on the way
};

// What tensor cores are given for the numbers of a call, as bits of UPCONV_OPERAND_BITS. A call of
// float64 has no such operands: its bit is in none of those.
enum OperandBit : unsigned { kTf32 = 1, kBf16 = 2, kFp16 = 4, kSplit = 8, kNoOperand = 16 };

inline OperandBit operand_of(const PlanKey& key) {
  const int64_t dtype = key[kKeyDtype];
  if (dtype == dtype_number(at::kFloat)) return key[kKeyTf32] ? kTf32 : kSplit;
  if (dtype == dtype_number(at::kBFloat16)) return kBf16;
  return dtype == dtype_number(at::kHalf) ? kFp16 : kNoOperand;
}

struct CudaKernel {
  using Prepared = std::shared_ptr<const void>;

  KernelId id;
  const char* name;  // in error messages
  int alignment;     // bytes: of the first element of what it reads
  Prepared (*read)(const CallSizes&, const std::vector<int64_t>& record);
  // Both null for a kernel that reads the weight as PyTorch keeps it.
  int64_t (*packed_bytes)(const void* plan);
  cudaError_t (*pack)(const void* plan, const void* weight, void* packed, cudaStream_t);
  cudaError_t (*launch)(const void* plan, const Operands&, int multiprocessors, cudaStream_t);
  int64_t (*workspace_bytes)(const void* plan) = nullptr;  // null: none needed
  bool (*adds_bias)(const void* plan) = nullptr;           // null: none of its plans does
  unsigned operands = ~0u;  // the bits of the types that it has in its library; by default all
};

// A library's kernels. The address of such a table is what libraries tell each other.
using KernelTable = std::vector<CudaKernel>;

// The kernel with this number and the type of the call; null where the table has none.
inline const CudaKernel* find_kernel(const KernelTable& table, KernelId id, const PlanKey& key) {
  const unsigned operand = operand_of(key);
  for (const CudaKernel& kernel : table) {
    if (kernel.id == id && (kernel.operands & operand) != 0) return &kernel;
  }
  return nullptr;
}

// The table of a library with further types, which an operator of this name gives; null until that
// library is loaded.
inline const KernelTable* table_elsewhere(const char* name) {
  const c10::OperatorHandle op = find_operator(name);
  if (!op.hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd)) return nullptr;
  Stack answer;
  op.callBoxed(answer);
  return reinterpret_cast<const KernelTable*>(answer.at(0).toInt());
}

// The same in this library's own table, then in those of the libraries with further types.
inline const CudaKernel* find_kernel_anywhere(const KernelTable& own, KernelId id,
                                              const PlanKey& key) {
  if (const CudaKernel* kernel = find_kernel(own, id, key)) return kernel;
  for (const char* name : {"upconv::_cuda_fp16_kernels", "upconv::_cuda_strict_kernels"}) {
    const KernelTable* table = table_elsewhere(name);
    const CudaKernel* kernel = table == nullptr ? nullptr : find_kernel(*table, id, key);
    if (kernel != nullptr) return kernel;
  }
  return nullptr;
}

}  // namespace upconv
