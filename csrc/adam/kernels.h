// Types of the kernel tables, one per instruction set, and of the arguments of the kernels.
//
// This header is compiled into translation units with different machine flags. It must not define
// anything that the linker merges across them: no inline functions, templates or constructors.
#pragma once

#include <cstddef>
#include <cstdint>

namespace infinity {

enum Dtype : int { kBf16 = 0, kFp32 = 1, kFp16 = 2 };

// Storage of a weight and its fp32 master: fp32; bf16 and the int16 residual of the master; fp16
// and the fp32 master. The second array is the `master_state`.
enum Layout : int { kFp32Weight = 0, kSplitWeight = 1, kFp16Weight = 2 };

// Storage of moments. kBf16Stochastic rounds stochastically, and so does the unsigned code of
// kInt8Moment (update.inl).
enum Format : int { kFp32Moment = 0, kBf16Moment = 1, kBf16Stochastic = 2, kInt8Moment = 3 };

// Elements of one block of the square sum. Part of the definition of its result (passes.inl).
constexpr std::size_t kSquareBlock = 4096;

constexpr std::size_t kMaxScalars = 9;  // over all rules

struct UpdateArguments {
  int rule;  // a RuleCode of update.inl
  Layout layout;
  Format format;
  Dtype gradient_dtype;
  std::size_t n;
  std::uint64_t key;    // of stochastic rounding
  std::uint64_t first;  // index of element 0 in its parameter; 8 bits: a multiple of the block size
  void* weight;
  void* master_state;  // null for kFp32Weight
  void* moment[2];
  float* scales[2];  // one per block of kMomentBlock elements; kInt8Moment only
  const void* gradient;
  float scalars[kMaxScalars];  // in the order of infinity/optim/rules.py
};

// Arguments of `accumulate` and `convert`.
struct PairArguments {
  void* target;
  const void* source;
  Dtype target_dtype;
  Dtype source_dtype;
};

struct SquareArguments {
  const void* source;
  Dtype source_dtype;
  std::size_t n;
  double* sums;  // one per block of kSquareBlock elements
};

// Arguments of `split` and `join`.
struct SplitArguments {
  float* master;
  std::uint16_t* weight;
  std::int16_t* residual;
};

// Arguments of `encode` and `decode`.
struct CodeArguments {
  float* values;
  void* moment;
  float* scales;  // kInt8Moment only
  Format format;
  bool is_signed;  // kInt8Moment only: which of the two 8-bit codes
};

// Each function processes the elements (square_blocks: the blocks) [begin, end) and may run on
// several threads for disjoint ranges. For kInt8Moment, `begin` is a multiple of the moment block,
// and so is `end` unless it is the end of the array.
struct Kernels {
  const char* name;
  void (*update)(const UpdateArguments&, std::size_t begin, std::size_t end);
  void (*accumulate)(const PairArguments&, std::size_t begin, std::size_t end);
  void (*convert)(const PairArguments&, std::size_t begin, std::size_t end);
  void (*square_blocks)(const SquareArguments&, std::size_t begin, std::size_t end);
  void (*split)(const SplitArguments&, std::size_t begin, std::size_t end);
  void (*join)(const SplitArguments&, std::size_t begin, std::size_t end);
  void (*encode)(const CodeArguments&, std::size_t begin, std::size_t end);
  void (*decode)(const CodeArguments&, std::size_t begin, std::size_t end);
};

extern const Kernels kBaselineKernels;  // x86-64 with SSE2, or arm64 with NEON
#if defined(__x86_64__)
extern const Kernels kAvx2Kernels;
extern const Kernels kAvx512Kernels;
#endif

}  // namespace infinity
