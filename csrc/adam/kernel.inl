// The arithmetic, once. isa.cpp includes this file and is compiled once per instruction set.
//
// Same bits everywhere: every operation below is one IEEE fp32 operation, rounded on its own
// (-ffp-contract=off, true division and square root, integer bf16 rounding), so neither the vector
// width nor the cut between threads can show. A NaN's payload and sign do depend on operand order
// and on the machine, therefore every NaN that leaves arithmetic is stored as 0x7fc00000.
// infinity/optim/adamw.py says the same thing in numpy.
//
// Everything sits in an anonymous namespace and no inline library function is used: were the linker
// to merge one of these functions across files, a machine without AVX-512 might run AVX-512 code.
//
// Square sum. The tree is part of the definition, so that a GPU can compute the same number:
//   1. blocks of 4096 elements, the last one may be short (missing elements count as zero);
//   2. in a block, lane j of 16 adds the fp64 squares of elements j, j+16, j+32, ... in that order
//      (the square of an fp32 value is exact in fp64, so fma changes nothing);
//   3. lanes fold by halves: lane j += lane j+8, then j+4, j+2, j+1;
//   4. blocks fold by neighbours: s[i] = s[2i] + s[2i+1], an odd last one moves up unchanged, until
//      one is left (dispatch.cpp, `fold_blocks`).

#include "kernels.h"

namespace infinity {
namespace {

using std::int16_t;
using std::int32_t;
using std::size_t;
using std::uint16_t;
using std::uint32_t;

constexpr uint32_t kNan = 0x7fc00000u;

inline uint32_t bits_of(float value) { return __builtin_bit_cast(uint32_t, value); }
inline float float_of(uint32_t bits) { return __builtin_bit_cast(float, bits); }

inline uint32_t canonical_bits(float value) { return value != value ? kNan : bits_of(value); }
inline float canonical(float value) { return float_of(canonical_bits(value)); }

inline float load(float value) { return value; }
inline float load(uint16_t bf16) { return float_of(static_cast<uint32_t>(bf16) << 16); }

inline void store(float& target, float value) { target = canonical(value); }

// Round to nearest, ties to even; a NaN becomes 0x7fc0.
inline void store(uint16_t& target, float value) {
  const uint32_t bits = bits_of(value);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  target = static_cast<uint16_t>(value != value ? kNan >> 16 : rounded);
}

inline float join_master(uint16_t weight, int16_t residual) {
  const uint32_t rest = static_cast<uint32_t>(static_cast<int32_t>(residual));
  return float_of((static_cast<uint32_t>(weight) << 16) + rest);
}

inline void split_master(float master, uint16_t& weight, int16_t& residual) {
  const uint32_t bits = canonical_bits(master);
  weight = static_cast<uint16_t>((bits + 0x8000u) >> 16);
  residual = static_cast<int16_t>(static_cast<uint16_t>(bits));  // bits - (hi << 16), mod 2^16
}

// One step of AdamW (decay != 1) or of Adam with L2 (kL2), in the order of torch's single-tensor
// path: lerp_(g, 1-beta1), mul_(beta2).addcmul_(g, g), addcdiv_(m, denom).
template <class Weight, class Gradient, bool kL2>
void adam_range(const AdamArguments& arguments, size_t begin, size_t end) {
  constexpr bool kSplit = sizeof(Weight) == sizeof(uint16_t);
  Weight* __restrict weight = static_cast<Weight*>(arguments.weight);
  int16_t* __restrict residual = arguments.residual;
  float* __restrict moment1 = arguments.moment1;
  float* __restrict moment2 = arguments.moment2;
  const Gradient* __restrict gradient = static_cast<const Gradient*>(arguments.gradient);
  const AdamScalars s = arguments.scalars;

  // lerp: m + w*(g-m) for w < 0.5, else g - (1-w)*(g-m); `x - a*b` and `x + (-a)*b` are equal.
  const bool near = s.beta1_lerp < 0.5f;
  const float lerp = near ? s.beta1_lerp : -(1.0f - s.beta1_lerp);

  for (size_t i = begin; i < end; ++i) {
    float p;
    if constexpr (kSplit) {
      p = join_master(weight[i], residual[i]);
    } else {
      p = weight[i];
    }
    float g = load(gradient[i]) * s.grad_scale;
    if constexpr (kL2) g = g + s.l2 * p;
    p = p * s.decay;

    float m = moment1[i];
    m = (near ? m : g) + lerp * (g - m);
    float v = moment2[i] * s.beta2;
    v = v + (s.one_minus_beta2 * g) * g;
    const float denominator = __builtin_sqrtf(v) / s.bias_correction2_sqrt + s.eps;
    p = p - (s.step_size * m) / denominator;

    moment1[i] = canonical(m);
    moment2[i] = canonical(v);
    if constexpr (kSplit) {
      split_master(p, weight[i], residual[i]);
    } else {
      weight[i] = canonical(p);
    }
  }
}

template <class Weight, class Gradient>
void adam_mode(const AdamArguments& arguments, size_t begin, size_t end) {
  if (arguments.scalars.l2 != 0.0f) {
    adam_range<Weight, Gradient, true>(arguments, begin, end);
  } else {
    adam_range<Weight, Gradient, false>(arguments, begin, end);
  }
}

void adam(const AdamArguments& arguments, size_t begin, size_t end) {
  const bool bf16 = arguments.gradient_dtype == kBf16;
  if (arguments.residual != nullptr) {
    bf16 ? adam_mode<uint16_t, uint16_t>(arguments, begin, end)
         : adam_mode<uint16_t, float>(arguments, begin, end);
  } else {
    bf16 ? adam_mode<float, uint16_t>(arguments, begin, end)
         : adam_mode<float, float>(arguments, begin, end);
  }
}

template <class Target, class Source>
void accumulate_range(const PairArguments& arguments, size_t begin, size_t end) {
  Target* __restrict target = static_cast<Target*>(arguments.target);
  const Source* __restrict source = static_cast<const Source*>(arguments.source);
  for (size_t i = begin; i < end; ++i) store(target[i], load(target[i]) + load(source[i]));
}

void accumulate(const PairArguments& arguments, size_t begin, size_t end) {
  const bool bf16 = arguments.source_dtype == kBf16;
  if (arguments.target_dtype == kBf16) {
    bf16 ? accumulate_range<uint16_t, uint16_t>(arguments, begin, end)
         : accumulate_range<uint16_t, float>(arguments, begin, end);
  } else {
    bf16 ? accumulate_range<float, uint16_t>(arguments, begin, end)
         : accumulate_range<float, float>(arguments, begin, end);
  }
}

// Only a narrowing rounds; the others move bits, so that payloads of NaN survive a copy.
void convert(const PairArguments& arguments, size_t begin, size_t end) {
  const bool bf16_source = arguments.source_dtype == kBf16;
  if (arguments.target_dtype == arguments.source_dtype) {
    const size_t size = bf16_source ? sizeof(uint16_t) : sizeof(float);
    __builtin_memcpy(static_cast<char*>(arguments.target) + begin * size,
                     static_cast<const char*>(arguments.source) + begin * size,
                     (end - begin) * size);
  } else if (bf16_source) {
    uint32_t* __restrict target = static_cast<uint32_t*>(arguments.target);
    const uint16_t* __restrict source = static_cast<const uint16_t*>(arguments.source);
    for (size_t i = begin; i < end; ++i) target[i] = static_cast<uint32_t>(source[i]) << 16;
  } else {
    uint16_t* __restrict target = static_cast<uint16_t*>(arguments.target);
    const float* __restrict source = static_cast<const float*>(arguments.source);
    for (size_t i = begin; i < end; ++i) store(target[i], source[i]);
  }
}

template <class Source>
double square_block(const Source* __restrict source, size_t count) {
  constexpr size_t kLanes = 16;
  double lane[kLanes] = {};
  const size_t whole = count - count % kLanes;
  for (size_t i = 0; i < whole; i += kLanes) {
    for (size_t j = 0; j < kLanes; ++j) {
      const double value = static_cast<double>(load(source[i + j]));
      lane[j] = lane[j] + value * value;
    }
  }
  for (size_t j = 0; j < count - whole; ++j) {
    const double value = static_cast<double>(load(source[whole + j]));
    lane[j] = lane[j] + value * value;
  }
  for (size_t half = kLanes / 2; half > 0; half /= 2) {
    for (size_t j = 0; j < half; ++j) lane[j] = lane[j] + lane[j + half];
  }
  return lane[0];
}

template <class Source>
void square_range(const SquareArguments& arguments, size_t begin, size_t end) {
  const Source* source = static_cast<const Source*>(arguments.source);
  for (size_t block = begin; block < end; ++block) {
    const size_t first = block * kSquareBlock;
    const size_t rest = arguments.n - first;
    arguments.sums[block] = square_block(source + first, rest < kSquareBlock ? rest : kSquareBlock);
  }
}

void square_blocks(const SquareArguments& arguments, size_t begin, size_t end) {
  if (arguments.source_dtype == kBf16) {
    square_range<uint16_t>(arguments, begin, end);
  } else {
    square_range<float>(arguments, begin, end);
  }
}

void split(const SplitArguments& arguments, size_t begin, size_t end) {
  const float* __restrict master = arguments.master;
  uint16_t* __restrict weight = arguments.weight;
  int16_t* __restrict residual = arguments.residual;
  for (size_t i = begin; i < end; ++i) split_master(master[i], weight[i], residual[i]);
}

void join(const SplitArguments& arguments, size_t begin, size_t end) {
  float* __restrict master = arguments.master;
  const uint16_t* __restrict weight = arguments.weight;
  const int16_t* __restrict residual = arguments.residual;
  for (size_t i = begin; i < end; ++i) {
    master[i] = canonical(join_master(weight[i], residual[i]));
  }
}

}  // namespace
}  // namespace infinity
