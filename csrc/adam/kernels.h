// The table of kernels that every instruction set fills in; plain data only.
//
// This header is compiled into translation units with different machine flags, so it must hold
// nothing the linker could merge across them: no inline functions, no templates, no constructors.
#pragma once

#include <cstddef>
#include <cstdint>

namespace infinity {

enum Dtype : int { kBf16 = 0, kFp32 = 1 };

// Elements of one block of the square sum; part of its definition, never a tuning knob.
constexpr std::size_t kSquareBlock = 4096;

// The scalars of one step, each rounded to fp32 once (infinity/optim/adamw.py computes them).
struct AdamScalars {
  float grad_scale;
  float decay;  // multiplies the weight: 1 - lr * weight_decay, or 1
  float l2;     // adds l2 * weight to the gradient; 0 skips the addition
  float beta1_lerp;
  float beta2;
  float one_minus_beta2;
  float step_size;
  float bias_correction2_sqrt;
  float eps;
};

struct AdamArguments {
  void* weight;            // bf16 halves when `residual` is set, else fp32
  std::int16_t* residual;  // or null
  float* moment1;
  float* moment2;
  const void* gradient;
  Dtype gradient_dtype;
  AdamScalars scalars;
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

// Every function works on elements (square_blocks: on blocks) [begin, end).
struct Kernels {
  const char* name;
  void (*adam)(const AdamArguments&, std::size_t begin, std::size_t end);
  void (*accumulate)(const PairArguments&, std::size_t begin, std::size_t end);
  void (*convert)(const PairArguments&, std::size_t begin, std::size_t end);
  void (*square_blocks)(const SquareArguments&, std::size_t begin, std::size_t end);
  void (*split)(const SplitArguments&, std::size_t begin, std::size_t end);
  void (*join)(const SplitArguments&, std::size_t begin, std::size_t end);
};

extern const Kernels kBaselineKernels;  // x86-64 with SSE2, or arm64 with NEON
#if defined(__x86_64__)
extern const Kernels kAvx2Kernels;
extern const Kernels kAvx512Kernels;
#endif

}  // namespace infinity
