// The arithmetic of one element, once, for the CPU loops (kernel.inl) and for CUDA (fused_adam.cu).
//
// Functions over scalars, which also take GCC's vectors of fp32 (lanes.inl): F is float or such a
// vector, U its unsigned integers. No headers, no library calls. A CUDA file defines
// INFINITY_FUNCTION and INFINITY_SQRT before it includes this one, and uses the scalar faces (u16
// to_bf16(float), ...). Loops, warps and the maximum of a block are the includer's business.
//
// Same bits everywhere: every operation is one IEEE fp32 operation, rounded on its own (no fused
// multiply-add, true division and square root), or an integer operation. A
// NaN's payload and sign depend on operand order and on the machine, therefore every NaN that
// leaves arithmetic is stored as 0x7fc00000 (`canonical`). tests/support/reference.py says the
// same thing in numpy.
#pragma once

#ifndef INFINITY_FUNCTION
#define INFINITY_FUNCTION inline __attribute__((always_inline))
#define INFINITY_SQRT(value) Lanes<F>::root(value)
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
constexpr u32 kMagnitude = 0x7fffffffu;

// The integers that belong to floats, and the other way round.
template <class T>
struct Lanes;
template <>
struct Lanes<float> {
  using Bits = u32;
#ifndef __CUDACC__
  static INFINITY_FUNCTION float root(float value) { return __builtin_sqrtf(value); }
#endif
};
template <>
struct Lanes<u32> {
  using Float = float;
  static INFINITY_FUNCTION u32 lesser(u32 a, u32 b) { return a < b ? a : b; }
  static INFINITY_FUNCTION u32 greater(u32 a, u32 b) { return a < b ? b : a; }
  static INFINITY_FUNCTION u32 above(u32 a, u32 b) { return a < b ? 0 : a - b; }
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

// `mask` is a bool, or a vector of them.
template <class Mask, class T>
INFINITY_FUNCTION T choose(Mask mask, T yes, T no) {
  return mask ? yes : no;
}

template <class F>
INFINITY_FUNCTION BitsOf<F> canonical_bits(F value) {
  return choose(value != value, BitsOf<F>{} + kNan, bits_of(value));
}
template <class F>
INFINITY_FUNCTION F canonical(F value) {
  return float_of(canonical_bits(value));
}

// --- 16-bit formats: the bits are the low half of a U --------------------------------------------

template <class U>
INFINITY_FUNCTION FloatOf<U> widen_bf16(U half) {
  return float_of(half << 16);
}

// Nearest, ties to even; a NaN becomes 0x7fc0.
template <class F>
INFINITY_FUNCTION BitsOf<F> bf16_bits(F value) {
  const BitsOf<F> bits = bits_of(value);
  const BitsOf<F> rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return choose(value != value, BitsOf<F>{} + (kNan >> 16), rounded);
}

// Away from zero with the probability that makes the mean right; `random` has 16 bits.
template <class F>
INFINITY_FUNCTION BitsOf<F> bf16_stochastic_bits(F value, BitsOf<F> random) {
  const BitsOf<F> rounded = (bits_of(value) + random) >> 16;
  return choose(value != value, BitsOf<F>{} + (kNan >> 16), rounded);
}

template <class U>
INFINITY_FUNCTION FloatOf<U> widen_fp16(U half) {
  const U magnitude = (half & 0x7fffu) << 13;
  const U normal = magnitude + (112u << 23);
  // 2^-14 + m - 2^-14 is exact, and no fp32 denormal appears.
  const U tiny = bits_of(float_of(magnitude + (113u << 23)) - float_of(113u << 23));
  const U huge = magnitude + (224u << 23);  // infinity and NaN
  const U finite = choose(magnitude < (1u << 23), tiny, normal);
  return float_of(choose(magnitude >= (31u << 23), huge, finite) | ((half & 0x8000u) << 16));
}

// Nearest, ties to even; from 65520 on infinity; a NaN becomes 0x7e00.
template <class F>
INFINITY_FUNCTION BitsOf<F> fp16_bits(F value) {
  using U = BitsOf<F>;
  const U magnitude = bits_of(value) & kMagnitude;
  const U normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  // 0.5 has an ulp of 2^-24, which is fp16's smallest step: the addition rounds.
  const U tiny = bits_of(float_of(magnitude) + 0.5f) - (126u << 23);
  const U finite = choose(magnitude < (113u << 23), tiny, normal);
  const U bounded = choose(magnitude >= (143u << 23), U{} + 0x7c00u, finite);
  const U bits = bounded | ((bits_of(value) >> 16) & 0x8000u);
  return choose(magnitude > kInfinity, U{} + 0x7e00u, bits);
}

// --- the split master: bf16 weight, int16 residual -----------------------------------------------
// weight = (bits + 0x8000) >> 16, residual = bits - (weight << 16), both mod 2^16.

// The upper half of the master: a negative residual borrows from it. H as for the 8-bit codes.
template <class H>
INFINITY_FUNCTION H upper_of_split(H weight, H residual) {
  return weight - (residual >> 15);
}
template <class H>
INFINITY_FUNCTION H weight_of(H upper, H lower) {
  return upper + (lower >> 15);
}

// --- random bits ---------------------------------------------------------------------------------
// A hash of (key, index of the element in its parameter): no state, so the cut between threads and
// calls cannot show. Every element has 32 bits, of which each moment takes its own.

struct RandomKey {
  u32 first;
  u32 second;
};

// Once per call and per 2^32 elements: `index_high` is the index >> 32.
INFINITY_FUNCTION RandomKey random_key(u64 key, u32 index_high) {
  u64 mixed = key + 0x9e3779b97f4a7c15ull * (static_cast<u64>(index_high) + 1);
  mixed = (mixed ^ (mixed >> 30)) * 0xbf58476d1ce4e5b9ull;
  mixed = (mixed ^ (mixed >> 27)) * 0x94d049bb133111ebull;
  mixed = mixed ^ (mixed >> 31);
  return {static_cast<u32>(mixed), static_cast<u32>(mixed >> 32)};
}

// The higher a bit, the better it is mixed.
template <class U>
INFINITY_FUNCTION U random_bits(RandomKey key, U index_low) {
  const U mixed = (index_low ^ key.first) * 0x7feb352du;
  return ((mixed ^ (mixed >> 15)) + key.second) * 0x846ca68bu;
}

// 16 bits each, for the first and the second moment in bf16.
template <class U>
INFINITY_FUNCTION U low_random(U bits) {
  return (bits ^ (bits >> 16)) & 0xffffu;
}
template <class U>
INFINITY_FUNCTION U high_random(U bits) {
  return bits >> 16;
}

// --- 8-bit moments -------------------------------------------------------------------------------
// A code is a small float relative to the largest magnitude of its block (`kMomentBlock` elements,
// one scale): eight steps per octave, cut from the upper half of an fp32 number.
//   signed     the sign and 127 magnitudes down to 2^-16 of the scale; what is less becomes 0,
//   which
//              has code 0. Rounds to nearest.
//   unsigned   256 magnitudes down to 2^-32 of the scale, and no zero, as the update divides by the
//              root. Rounds stochastically: a sum that grows by less than a step must still grow.
// Zeroed bytes have scale 0 and mean 0. A block that holds a value which is not finite has scale
// NaN and codes 0, and decodes to NaN as a whole: pass 0 for every value of such a block.
// H is 16 bits of an element: the low half of a u32, or a vector of u16.

constexpr u32 kMomentBlock = 128;
constexpr u32 kOne = 0x3f80u >> 4;  // 1.0 without all but 3 bits of its mantissa
constexpr u32 kSignedLeast = kOne - 127;
constexpr u32 kUnsignedLeast = kOne - 255;
constexpr u32 kHalf = 0x80000000u;  // in place of random bits: rounds to nearest

// `magnitude` is the largest `bits & kMagnitude` of the block, as an integer.
INFINITY_FUNCTION float block_scale(u32 magnitude) {
  const u32 normal = magnitude < 0x00800000u ? 0x00800000u : magnitude;  // 1 / scale is finite
  const u32 scale = magnitude == 0 ? 0 : normal;
  return float_of(magnitude >= kInfinity ? kNan : scale);
}

INFINITY_FUNCTION float block_inverse(float scale) { return scale > 0.0f ? 1.0f / scale : 0.0f; }

// value / scale, of whose upper half the code is cut.
template <class F>
INFINITY_FUNCTION BitsOf<F> signed_bits(F value, float inverse) {
  return bits_of(value * inverse);
}
// `value` is not negative, nor -0.
template <class F>
INFINITY_FUNCTION BitsOf<F> unsigned_bits(F value, float inverse, BitsOf<F> random) {
  return bits_of(value * inverse) + (random >> 12);
}

template <class H>
INFINITY_FUNCTION H signed_code(H upper) {
  const H magnitude = Lanes<H>::above(((upper & 0x7fff) + 8) >> 4, kSignedLeast);
  return magnitude | ((upper >> 8) & 0x80);
}
template <class H>
INFINITY_FUNCTION H unsigned_code(H upper) {
  return Lanes<H>::lesser(Lanes<H>::above(upper >> 4, kUnsignedLeast), H{} + 255);
}

// The upper half of value / scale; the lower one is 0.
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

// --- scalar faces --------------------------------------------------------------------------------

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

// --- rules ---------------------------------------------------------------------------------------
// A rule is made from its scalars, each rounded to fp32 once, in the order in which
// infinity/optim/rules.py returns them. `begin` takes the parameter, the gradient as it is stored
// and the moments; it makes the new moments and a fraction, and reads the parameter only if
// `kReadsWeight`.
// `change` divides the fraction, `apply` subtracts it; the includer stores (`canonical` first).
// `maximize` is the sign of grad_scale. A rule with a `Short` form takes that for scalars that are
// not `is_general`. A rule is known to everybody by its line in `INFINITY_RULES`, at the end.

template <class F>
struct Fraction {
  F over;
  F under;
};

// AdamW (decay != 1) and Adam with L2, in the order of torch's single-tensor path:
// lerp_(g, 1 - beta1), mul_(beta2).addcmul_(g, g), addcdiv_(m, denominator). `AdamOf<false>` leaves
// out what l2 = 0 and beta1 > 0.5 do not need.
template <bool kGeneral>
struct AdamOf {
  using Short = AdamOf<false>;
  static constexpr int kNumMoments = 2;
  static constexpr int kNumScalars = 9;
  static constexpr bool kUnsigned = false;  // first moment; a second one always is
  static constexpr bool kDivides = true;
  static constexpr bool kReadsWeight = kGeneral;
  float grad_scale, decay, l2, lerp, beta2, one_minus_beta2, step_size, correction, eps;
  bool near;

  static INFINITY_FUNCTION bool is_general(const float* s) {
    return s[2] != 0.0f || !(s[3] < 0.5f);
  }

  static INFINITY_FUNCTION AdamOf make(const float* s) {
    // lerp: m + w*(g-m) for w < 0.5, else g - (1-w)*(g-m); `x - a*b` and `x + (-a)*b` are equal.
    const bool near = s[3] < 0.5f;
    const float lerp = near ? s[3] : -(1.0f - s[3]);
    return {s[0], s[1], s[2], lerp, s[4], s[5], s[6], s[7], s[8], near};
  }

  template <class F>
  INFINITY_FUNCTION Fraction<F> begin(F p, F gradient, F& m, F& v) const {
    F g = gradient * grad_scale;
    if (kGeneral) g = l2 != 0.0f ? g + l2 * p : g;
    m = (!kGeneral || near ? m : g) + lerp * (g - m);
    v = v * beta2;
    v = v + (one_minus_beta2 * g) * g;
    return {step_size * m, INFINITY_SQRT(v)};
  }

  template <class F>
  INFINITY_FUNCTION F change(Fraction<F> made) const {
    return made.over / (made.under / correction + eps);
  }

  template <class F>
  INFINITY_FUNCTION F apply(F p, F change) const {
    return p * decay - change;
  }
};

using Adam = AdamOf<true>;

// Lion (Chen et al. 2023): the sign of an interpolation; a NaN stays a NaN.
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
    const F down = choose(mix < 0.0f, F{} - 1.0f, mix);
    const F sign = choose(mix > 0.0f, F{} + 1.0f, down);
    m = m * beta2 + one_minus_beta2 * g;
    return {lr * sign, F{}};
  }

  template <class F>
  INFINITY_FUNCTION F change(Fraction<F> made) const {
    return made.over;
  }

  template <class F>
  INFINITY_FUNCTION F apply(F p, F change) const {
    return p * decay - change;
  }
};

// SGD with momentum: dampening, Nesterov (look_ahead != 0). In the first step the caller passes
// momentum 0 and undamped 1, as torch's buffer starts as the gradient.
struct Momentum {
  static constexpr int kNumMoments = 1;
  static constexpr int kNumScalars = 6;
  static constexpr bool kUnsigned = false;
  static constexpr bool kDivides = false;
  static constexpr bool kReadsWeight = true;
  float grad_scale, l2, momentum, undamped, look_ahead, lr;

  static INFINITY_FUNCTION Momentum make(const float* s) {
    return {s[0], s[1], s[2], s[3], s[4], s[5]};
  }

  template <class F>
  INFINITY_FUNCTION Fraction<F> begin(F p, F gradient, F& m, F&) const {
    F g = gradient * grad_scale;
    g = l2 != 0.0f ? g + l2 * p : g;
    m = m * momentum;
    m = m + undamped * g;
    return {lr * (look_ahead != 0.0f ? g + look_ahead * m : m), F{}};
  }

  template <class F>
  INFINITY_FUNCTION F change(Fraction<F> made) const {
    return made.over;
  }

  template <class F>
  INFINITY_FUNCTION F apply(F p, F change) const {
    return p - change;
  }
};

// SGD without momentum; the scalars of `Momentum`.
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
  INFINITY_FUNCTION F change(Fraction<F> made) const {
    return made.over;
  }

  template <class F>
  INFINITY_FUNCTION F apply(F p, F change) const {
    return p - change;
  }
};

// Adagrad (Duchi et al. 2011): one moment, the sum of squares.
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
  INFINITY_FUNCTION F change(Fraction<F> made) const {
    return made.over / (made.under + eps);
  }

  template <class F>
  INFINITY_FUNCTION F apply(F p, F change) const {
    return p - change;
  }
};

// Every rule, by the name of its struct: the `kernel` of infinity/optim/rules.py.
#define INFINITY_RULES(RULE) RULE(Adam) RULE(Lion) RULE(Momentum) RULE(Plain) RULE(Adagrad)

#define INFINITY_CODE(name) k##name,
enum RuleCode : int { INFINITY_RULES(INFINITY_CODE) };
#undef INFINITY_CODE

}  // namespace
}  // namespace infinity
