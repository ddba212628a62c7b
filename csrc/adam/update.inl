// Elementwise arithmetic of the optimizer: rules, number formats, stochastic rounding. Included by
// the CPU kernels (kernel.inl) and by the CUDA kernels (fused_adam.cu).
//
// Functions are templates over F, which is float or a GCC vector of fp32 (lanes.inl), or over U,
// the corresponding unsigned integers. No headers are included and no library is called. CUDA code
// defines INFINITY_FUNCTION and INFINITY_SQRT before it includes this file and uses the scalar
// functions (u16 to_bf16(float), ...). Loops and the maximum over a block are left to the includer.
//
// Results are bitwise equal on all targets: each operation is one correctly rounded IEEE fp32
// operation (no fused multiply-add, no approximate division or root) or an integer operation.
// Payload and sign of a NaN depend on operand order and machine, so each NaN is stored as
// 0x7fc00000 (`canonical`). The reference implementation is tests/support/reference.py (numpy).
#pragma once

#ifndef INFINITY_FUNCTION
#define INFINITY_FUNCTION inline __attribute__((always_inline))
#define INFINITY_SQRT(value) Lanes<F>::sqrt(value)
#endif

namespace infinity {
namespace {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i16 = short;
using i32 = int;

constexpr u32 kNan = 0x7fc00000u;
constexpr u32 kInfinity = 0x7f800000u;
constexpr u32 kMagnitude = 0x7fffffffu;  // all bits but the sign

// Traits of scalars and vectors: the corresponding integer or float type, and operations that GCC's
// vector extension has no operator for. `subtract_saturated` clamps at 0.
template <class T>
struct Lanes;
template <>
struct Lanes<float> {
  using Bits = u32;
#ifndef __CUDACC__
  static INFINITY_FUNCTION float sqrt(float value) { return __builtin_sqrtf(value); }
#endif
};
template <>
struct Lanes<u32> {
  using Float = float;
  static INFINITY_FUNCTION u32 min(u32 a, u32 b) { return a < b ? a : b; }
  static INFINITY_FUNCTION u32 max(u32 a, u32 b) { return a < b ? b : a; }
  static INFINITY_FUNCTION u32 subtract_saturated(u32 a, u32 b) { return a < b ? 0 : a - b; }
};
template <class F>
using BitsOf = typename Lanes<F>::Bits;
template <class U>
using FloatOf = typename Lanes<U>::Float;

template <class F>
INFINITY_FUNCTION BitsOf<F> bits_of(F value) {
  return __builtin_bit_cast(BitsOf<F>, value);
}
template <class U>
INFINITY_FUNCTION FloatOf<U> float_of(U bits) {
  return __builtin_bit_cast(FloatOf<U>, bits);
}

// `mask` is a bool, or the result of a vector comparison: selects per lane.
template <class Mask, class T>
INFINITY_FUNCTION T choose(Mask mask, T if_true, T if_false) {
  return mask ? if_true : if_false;
}

// The bits of `value`, with every NaN replaced by 0x7fc00000.
template <class F>
INFINITY_FUNCTION BitsOf<F> canonical_bits(F value) {
  return choose(value != value, BitsOf<F>{} + kNan, bits_of(value));
}
template <class F>
INFINITY_FUNCTION F canonical(F value) {
  return float_of(canonical_bits(value));
}

// 16-bit formats. Their bits are in the low half of a U.

template <class U>
INFINITY_FUNCTION FloatOf<U> widen_bf16(U half) {
  return float_of(half << 16);
}

// Rounds to nearest, ties to even; NaN becomes 0x7fc0.
template <class F>
INFINITY_FUNCTION BitsOf<F> bf16_bits(F value) {
  const BitsOf<F> bits = bits_of(value);
  const BitsOf<F> rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return choose(value != value, BitsOf<F>{} + (kNan >> 16), rounded);
}

// Stochastic rounding: away from zero with a probability equal to the discarded fraction of an ulp,
// so that the result is unbiased. `random` is uniform in [0, 2^16).
template <class F>
INFINITY_FUNCTION BitsOf<F> bf16_stochastic_bits(F value, BitsOf<F> random) {
  const BitsOf<F> rounded = (bits_of(value) + random) >> 16;
  return choose(value != value, BitsOf<F>{} + (kNan >> 16), rounded);
}

template <class U>
INFINITY_FUNCTION FloatOf<U> widen_fp16(U half) {
  const U magnitude = (half & 0x7fffu) << 13;
  const U normal = magnitude + (112u << 23);
  // fp16 subnormals: 2^-14 + value - 2^-14 is exact and uses no fp32 subnormal.
  const U subnormal = bits_of(float_of(magnitude + (113u << 23)) - float_of(113u << 23));
  const U inf_or_nan = magnitude + (224u << 23);
  const U finite = choose(magnitude < (1u << 23), subnormal, normal);
  return float_of(choose(magnitude >= (31u << 23), inf_or_nan, finite) | ((half & 0x8000u) << 16));
}

// Rounds to nearest, ties to even; 65520 and more become infinity, NaN becomes 0x7e00.
template <class F>
INFINITY_FUNCTION BitsOf<F> fp16_bits(F value) {
  using U = BitsOf<F>;
  const U magnitude = bits_of(value) & kMagnitude;
  const U normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  // fp16 subnormals have a spacing of 2^-24, the ulp of 0.5f, so the addition rounds.
  const U subnormal = bits_of(float_of(magnitude) + 0.5f) - (126u << 23);
  const U finite = choose(magnitude < (113u << 23), subnormal, normal);
  const U bounded = choose(magnitude >= (143u << 23), U{} + 0x7c00u, finite);
  const U bits = bounded | ((bits_of(value) >> 16) & 0x8000u);
  return choose(magnitude > kInfinity, U{} + 0x7e00u, bits);
}

// Split master: an fp32 number stored losslessly as a bf16 weight and an int16 residual.
// weight = (bits + 0x8000) >> 16, residual = bits - (weight << 16), both mod 2^16.
// H is the 16-bit half of an element: the low half of a u32, or a vector of u16.

// Returns the upper half of the master: the weight, minus the borrow of a negative residual.
template <class H>
INFINITY_FUNCTION H upper_of_split(H weight, H residual) {
  return weight - (residual >> 15);
}
// Returns the weight from both halves of the master.
template <class H>
INFINITY_FUNCTION H weight_of(H upper, H lower) {
  return upper + (lower >> 15);
}

// Random bits of stochastic rounding: a hash of a key and of the index of the element in its
// parameter. It has no state, so results do not depend on how work is divided among threads and
// calls. An element has 32 bits, of which the two moments use different ones.

struct RandomKey {
  u32 first;
  u32 second;
};

// Returns the key of the 2^32 elements with index >> 32 == `index_high`: SplitMix64 with seed
// `key`, output number index_high + 1.
INFINITY_FUNCTION RandomKey random_key(u64 key, u32 index_high) {
  u64 mixed = key + 0x9e3779b97f4a7c15ull * (static_cast<u64>(index_high) + 1);
  mixed = (mixed ^ (mixed >> 30)) * 0xbf58476d1ce4e5b9ull;
  mixed = (mixed ^ (mixed >> 27)) * 0x94d049bb133111ebull;
  mixed = mixed ^ (mixed >> 31);
  return {static_cast<u32>(mixed), static_cast<u32>(mixed >> 32)};
}

// Returns the 32 random bits of an element: lowbias32 (C. Wellons) without its outer xor shifts,
// with the second half of the key added. Higher bits are mixed better.
template <class U>
INFINITY_FUNCTION U random_bits(RandomKey key, U index_low) {
  const U mixed = (index_low ^ key.first) * 0x7feb352du;
  return ((mixed ^ (mixed >> 15)) + key.second) * 0x846ca68bu;
}

// The 16 random bits for the first (low) and the second (high) moment in bf16.
template <class U>
INFINITY_FUNCTION U low_random(U bits) {
  return (bits ^ (bits >> 16)) & 0xffffu;
}
template <class U>
INFINITY_FUNCTION U high_random(U bits) {
  return bits >> 16;
}

// 8-bit moments. A block of `kMomentBlock` elements shares a scale, its largest magnitude. A code
// is value / scale as a floating-point number with 3 mantissa bits (8 values per octave), taken
// from the upper half of the fp32 number.
//   signed     sign and 127 magnitudes, the least about 2^-16; smaller values become 0, code 0.
//              Rounds to nearest.
//   unsigned   256 magnitudes, the least about 2^-32, and no zero, since the update divides by
//              the root. Rounds stochastically: smaller changes than half a step would be lost.
// Zero-initialized memory has scale 0 and decodes to 0. A block with a non-finite value has scale
// NaN and codes 0 and decodes to NaN; for such a block the caller encodes 0 for every value. H is
// the 16-bit half of an element, as above.

constexpr u32 kMomentBlock = 128;
constexpr u32 kOne = 0x3f80u >> 4;  // upper half of 1.0f, with 3 mantissa bits
constexpr u32 kSignedLeast = kOne - 127;
constexpr u32 kUnsignedLeast = kOne - 255;
constexpr u32 kRoundToNearest = 0x80000000u;  // instead of random bits

// Returns the scale of a block. `magnitude` is the maximum of `bits & kMagnitude` over the block.
INFINITY_FUNCTION float block_scale(u32 magnitude) {
  const u32 normal = magnitude < 0x00800000u ? 0x00800000u : magnitude;  // keeps 1 / scale finite
  const u32 scale = magnitude == 0 ? 0 : normal;
  return float_of(magnitude >= kInfinity ? kNan : scale);
}

INFINITY_FUNCTION float block_inverse(float scale) { return scale > 0.0f ? 1.0f / scale : 0.0f; }

// Return the bits of value / scale; the code is computed from their upper half.
template <class F>
INFINITY_FUNCTION BitsOf<F> signed_bits(F value, float inverse) {
  return bits_of(value * inverse);
}
// Requires `value` >= +0. Adds 20 random bits below the 3 mantissa bits, before truncation.
template <class F>
INFINITY_FUNCTION BitsOf<F> unsigned_bits(F value, float inverse, BitsOf<F> random) {
  return bits_of(value * inverse) + (random >> 12);
}

template <class H>
INFINITY_FUNCTION H signed_code(H upper) {
  const H magnitude = Lanes<H>::subtract_saturated(((upper & 0x7fff) + 8) >> 4, kSignedLeast);
  return magnitude | ((upper >> 8) & 0x80);
}
template <class H>
INFINITY_FUNCTION H unsigned_code(H upper) {
  return Lanes<H>::min(Lanes<H>::subtract_saturated(upper >> 4, kUnsignedLeast), H{} + 255);
}

// Return the upper half of value / scale; the lower half is 0.
template <class H>
INFINITY_FUNCTION H upper_of_signed(H code) {
  const H magnitude = (code << 4) & 0x7f0;
  const H upper = choose(magnitude == 0, H{}, H(magnitude + (kSignedLeast << 4)));
  return upper | ((code << 8) & 0x8000);
}
template <class H>
INFINITY_FUNCTION H upper_of_unsigned(H code) {
  return (code << 4) + (kUnsignedLeast << 4);
}

// Scalar functions.

INFINITY_FUNCTION float from_bf16(u16 half) { return widen_bf16(u32{half}); }
INFINITY_FUNCTION u16 to_bf16(float value) { return static_cast<u16>(bf16_bits(value)); }
INFINITY_FUNCTION u16 to_bf16_stochastic(float value, u32 random) {
  return static_cast<u16>(bf16_stochastic_bits(value, random));
}
INFINITY_FUNCTION float from_fp16(u16 half) { return widen_fp16(u32{half}); }
INFINITY_FUNCTION u16 to_fp16(float value) { return static_cast<u16>(fp16_bits(value)); }

INFINITY_FUNCTION float join_master(u16 weight, i16 residual) {
  const u32 lower = static_cast<u16>(residual);
  return float_of((upper_of_split(u32{weight}, lower) << 16) | lower);
}
INFINITY_FUNCTION void split_master(float master, u16& weight, i16& residual) {
  const u32 bits = canonical_bits(master);
  weight = static_cast<u16>(weight_of(bits >> 16, bits & 0xffffu));
  residual = static_cast<i16>(static_cast<u16>(bits));
}

INFINITY_FUNCTION u8 encode_signed(float value, float inverse) {
  return static_cast<u8>(signed_code(signed_bits(value, inverse) >> 16));
}
INFINITY_FUNCTION u8 encode_unsigned(float value, float inverse, u32 random) {
  return static_cast<u8>(unsigned_code(unsigned_bits(value, inverse, random) >> 16));
}
INFINITY_FUNCTION float decode_signed(u8 code, float scale) {
  return float_of(upper_of_signed(u32{code}) << 16) * scale;
}
INFINITY_FUNCTION float decode_unsigned(u8 code, float scale) {
  return float_of(upper_of_unsigned(u32{code}) << 16) * scale;
}

// Rules. `make` constructs a rule from its scalars, in the order of infinity/optim/rules.py, each
// rounded to fp32. One update of an element is three calls:
//   begin    takes the parameter (read only if `kReadsWeight`), the gradient before scaling and
//            the moments; updates the moments and returns a fraction.
//   change   returns the value of the fraction, the change of the parameter.
//   apply    returns the new parameter.
// The caller stores the results, `canonical` first. The sign of grad_scale implements `maximize`.
// If a rule has a type `Short`, that type is used for scalars that are not `is_general`. Rules are
// registered in INFINITY_RULES below.

template <class F>
struct Fraction {
  F numerator;
  F denominator;
};

// AdamW (decay != 1) and Adam with L2. Operations are in the order of torch's single-tensor
// implementation: lerp_(g, 1 - beta1), mul_(beta2).addcmul_(g, g), addcdiv_(m, denominator).
// `AdamOf<false>` requires l2 == 0 and 1 - beta1 < 0.5 and omits the other cases.
template <bool kGeneral>
struct AdamOf {
  using Short = AdamOf<false>;
  static constexpr int kNumMoments = 2;
  static constexpr int kNumScalars = 9;
  static constexpr bool kUnsigned = false;  // code of the first moment; the second's always is
  static constexpr bool kDivides = true;    // `change` divides; otherwise it returns the numerator
  static constexpr bool kReadsWeight = kGeneral;
  float grad_scale, decay, l2, lerp, beta2, one_minus_beta2, step_size, correction, eps;
  bool from_start;  // torch's lerp for weights < 0.5

  static INFINITY_FUNCTION bool is_general(const float* s) {
    return s[2] != 0.0f || !(s[3] < 0.5f);
  }

  static INFINITY_FUNCTION AdamOf make(const float* s) {
    // torch's lerp is m + w*(g-m) for w < 0.5, else g - (1-w)*(g-m). The sign of 1-w is folded into
    // `lerp`: x - a*b and x + (-a)*b have the same bits.
    const bool from_start = s[3] < 0.5f;
    const float lerp = from_start ? s[3] : -(1.0f - s[3]);
    return {s[0], s[1], s[2], lerp, s[4], s[5], s[6], s[7], s[8], from_start};
  }

  template <class F>
  INFINITY_FUNCTION Fraction<F> begin(F p, F gradient, F& m, F& v) const {
    F g = gradient * grad_scale;
    if (kGeneral) g = l2 != 0.0f ? g + l2 * p : g;
    m = (!kGeneral || from_start ? m : g) + lerp * (g - m);
    v = v * beta2;
    v = v + (one_minus_beta2 * g) * g;
    return {step_size * m, INFINITY_SQRT(v)};
  }

  template <class F>
  INFINITY_FUNCTION F change(Fraction<F> fraction) const {
    return fraction.numerator / (fraction.denominator / correction + eps);
  }

  template <class F>
  INFINITY_FUNCTION F apply(F p, F change) const {
    return p * decay - change;
  }
};

using Adam = AdamOf<true>;

// Lion (Chen et al. 2023). The sign of 0 is 0 and that of NaN is NaN.
struct Lion {
  static constexpr int kNumMoments = 1;
  static constexpr int kNumScalars = 7;
  static constexpr bool kUnsigned = false;
  static constexpr bool kDivides = false;
  static constexpr bool kReadsWeight = false;
  float grad_scale, decay, beta1, one_minus_beta1, beta2, one_minus_beta2, lr;

  static INFINITY_FUNCTION Lion make(const float* s) {
    return {s[0], s[1], s[2], s[3], s[4], s[5], s[6]};
  }

  template <class F>
  INFINITY_FUNCTION Fraction<F> begin(F, F gradient, F& m, F&) const {
    const F g = gradient * grad_scale;
    const F mix = m * beta1 + one_minus_beta1 * g;
    const F not_positive = choose(mix < 0.0f, F{} - 1.0f, mix);
    const F sign = choose(mix > 0.0f, F{} + 1.0f, not_positive);
    m = m * beta2 + one_minus_beta2 * g;
    return {lr * sign, F{}};
  }

  template <class F>
  INFINITY_FUNCTION F change(Fraction<F> fraction) const {
    return fraction.numerator;
  }

  template <class F>
  INFINITY_FUNCTION F apply(F p, F change) const {
    return p * decay - change;
  }
};

// SGD with momentum, dampening and Nesterov (then `nesterov` is the momentum, otherwise 0). For the
// first step the caller passes momentum 0 and one_minus_dampening 1, since torch initializes the
// buffer to the gradient.
struct Momentum {
  static constexpr int kNumMoments = 1;
  static constexpr int kNumScalars = 6;
  static constexpr bool kUnsigned = false;
  static constexpr bool kDivides = false;
  static constexpr bool kReadsWeight = true;
  float grad_scale, l2, momentum, one_minus_dampening, nesterov, lr;

  static INFINITY_FUNCTION Momentum make(const float* s) {
    return {s[0], s[1], s[2], s[3], s[4], s[5]};
  }

  template <class F>
  INFINITY_FUNCTION Fraction<F> begin(F p, F gradient, F& m, F&) const {
    F g = gradient * grad_scale;
    g = l2 != 0.0f ? g + l2 * p : g;
    m = m * momentum;
    m = m + one_minus_dampening * g;
    return {lr * (nesterov != 0.0f ? g + nesterov * m : m), F{}};
  }

  template <class F>
  INFINITY_FUNCTION F change(Fraction<F> fraction) const {
    return fraction.numerator;
  }

  template <class F>
  INFINITY_FUNCTION F apply(F p, F change) const {
    return p - change;
  }
};

// SGD without momentum. Takes the scalars of `Momentum`.
struct Plain {
  static constexpr int kNumMoments = 0;
  static constexpr int kNumScalars = 6;
  static constexpr bool kUnsigned = false;
  static constexpr bool kDivides = false;
  static constexpr bool kReadsWeight = true;
  float grad_scale, l2, lr;

  static INFINITY_FUNCTION Plain make(const float* s) { return {s[0], s[1], s[5]}; }

  template <class F>
  INFINITY_FUNCTION Fraction<F> begin(F p, F gradient, F&, F&) const {
    F g = gradient * grad_scale;
    g = l2 != 0.0f ? g + l2 * p : g;
    return {lr * g, F{}};
  }

  template <class F>
  INFINITY_FUNCTION F change(Fraction<F> fraction) const {
    return fraction.numerator;
  }

  template <class F>
  INFINITY_FUNCTION F apply(F p, F change) const {
    return p - change;
  }
};

// Adagrad (Duchi et al. 2011). The moment is the sum of squares.
struct Adagrad {
  static constexpr int kNumMoments = 1;
  static constexpr int kNumScalars = 4;
  static constexpr bool kUnsigned = true;
  static constexpr bool kDivides = true;
  static constexpr bool kReadsWeight = true;
  float grad_scale, l2, step_size, eps;

  static INFINITY_FUNCTION Adagrad make(const float* s) { return {s[0], s[1], s[2], s[3]}; }

  template <class F>
  INFINITY_FUNCTION Fraction<F> begin(F p, F gradient, F& sum, F&) const {
    F g = gradient * grad_scale;
    g = l2 != 0.0f ? g + l2 * p : g;
    sum = sum + g * g;
    return {step_size * g, INFINITY_SQRT(sum)};
  }

  template <class F>
  INFINITY_FUNCTION F change(Fraction<F> fraction) const {
    return fraction.numerator / (fraction.denominator + eps);
  }

  template <class F>
  INFINITY_FUNCTION F apply(F p, F change) const {
    return p - change;
  }
};

// All rules. The name of the struct is `kernel` in infinity/optim/rules.py, the position its code.
#define INFINITY_RULES(RULE) RULE(Adam) RULE(Lion) RULE(Momentum) RULE(Plain) RULE(Adagrad)

#define INFINITY_CODE(name) k##name,
enum RuleCode : int { INFINITY_RULES(INFINITY_CODE) };
#undef INFINITY_CODE

}  // namespace
}  // namespace infinity
