// The table of kernels that every instruction set fills in; plain data only.
//
// This header is compiled into translation units with different machine flags, so it must hold
// nothing the linker could merge across them: no inline functions, no templates, no constructors.
#pragma once

#include <cstddef>
#include <cstdint>

namespace infinity {

enum Dtype : int { kBf16 = 0, kFp32 = 1, kFp16 = 2 };

// fp32; bf16 with an int16 rest (split master); fp16 with an fp32 rest (the master).
enum Layout : int { kFp32Weight = 0, kSplitWeight = 1, kFp16Weight = 2 };

enum Format : int { kFp32Moment = 0, kBf16Moment = 1, kBf16Stochastic = 2, kInt8Moment = 3 };

// Elements of one block of the square sum; part of its definition, never a tuning knob.
constexpr std::size_t kSquareBlock = 4096;

constexpr std::size_t kMaxScalars = 9;

struct UpdateArguments {
  int rule;  // a RuleCode of update.inl
  Layout layout;
  Format format;
  Dtype gradient_dtype;
  std::size_t n;
  std::uint64_t key;    // of stochastic rounding
  std::uint64_t first;  // index of element 0 in its parameter; 8 bits: a multiple of a block
  void* weight;
  void* rest;
  void* moment[2];
  float* scales[2];  // 8 bits only
  const void* gradient;
  float scalars[kMaxScalars];  // see infinity/optim/rules.py
};

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

struct SplitArguments {
  float* master;
  std::uint16_t* weight;
  std::int16_t* residual;
};

struct CodeArguments {
  float* values;
  void* moment;
  float* scales;
  Format format;
  bool is_signed;
};

// Every function works on elements (square_blocks: on blocks) [begin, end). For 8-bit moments
// `begin` is a multiple of a block, and `end` is too or is the end of the range.
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
