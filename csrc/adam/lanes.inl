// Vectors of the instruction set that this file is compiled for.
//
// A group has 2 * INFINITY_LANES elements: two vectors of 32-bit elements (`Floats`; `Units` for
// the bits), or one vector of 16-bit elements (`Halves`). Arithmetic uses GCC's vector extension;
// square roots, saturated operations and conversions between 32, 16 and 8 bits use intrinsics.
//
// [Note: packed order]
// AVX2 and AVX-512 unpack and pack within lanes of 128 bits: with AVX2, unpacking a vector of 16
// halves yields the elements {0-3, 8-11} and {4-7, 12-15}. Elementwise arithmetic does not depend
// on the order, so `Group<true>` keeps this packed order and permutes fp32 arrays when it loads and
// stores them; `Group<false>` keeps the natural order and permutes the halves instead.

#include "update.inl"

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace infinity {
namespace {

using std::size_t;

#define INFINITY_INLINE inline __attribute__((always_inline))

#if defined(__AVX512F__)
#define INFINITY_LANES 16
#elif defined(__AVX2__)
#define INFINITY_LANES 8
#else
#define INFINITY_LANES 4
#endif

typedef float WideF __attribute__((vector_size(4 * INFINITY_LANES)));
typedef u32 WideU __attribute__((vector_size(4 * INFINITY_LANES)));
typedef u16 WideH __attribute__((vector_size(4 * INFINITY_LANES)));

// Operations that depend on the instruction set:
//   unpack_low, unpack_high
//       Interleave the 16-bit elements of the low (high) half of each 128-bit lane: `lower` and
//       `upper` become the halves of 32-bit elements.
//   pack_halves
//       The inverse, for elements below 2^16.
//   widen_bytes, narrow_bytes
//       Convert bytes in memory to 16-bit elements in natural order, and back (below 2^8).
//   permute_before_unpack, permute_after_pack
//       Permute halves such that unpacking and packing are in natural order.
//   to_packed, from_packed
//       Permute a group of fp32 from natural to packed order, and back.

#if defined(__AVX512F__)

INFINITY_INLINE WideF wide_sqrt(WideF value) { return (WideF)_mm512_sqrt_ps((__m512)value); }
INFINITY_INLINE WideU wide_max(WideU a, WideU b) {
  return (WideU)_mm512_max_epu32((__m512i)a, (__m512i)b);
}
INFINITY_INLINE WideH wide_subtract_saturated(WideH a, WideH b) {
  return (WideH)_mm512_subs_epu16((__m512i)a, (__m512i)b);
}
INFINITY_INLINE WideH wide_min(WideH a, WideH b) {
  return (WideH)_mm512_min_epu16((__m512i)a, (__m512i)b);
}
INFINITY_INLINE WideU unpack_low(WideH lower, WideH upper) {
  return (WideU)_mm512_unpacklo_epi16((__m512i)lower, (__m512i)upper);
}
INFINITY_INLINE WideU unpack_high(WideH lower, WideH upper) {
  return (WideU)_mm512_unpackhi_epi16((__m512i)lower, (__m512i)upper);
}
INFINITY_INLINE WideH pack_halves(WideU first, WideU second) {  // values below 2^16
  return (WideH)_mm512_packus_epi32((__m512i)first, (__m512i)second);
}
INFINITY_INLINE WideH widen_bytes(const u8* from) {
  return (WideH)_mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}
INFINITY_INLINE void narrow_bytes(u8* to, WideH value) {  // values below 2^8
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi16_epi8((__m512i)value));
}
INFINITY_INLINE WideH permute_before_unpack(WideH value) {
  const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
  return (WideH)_mm512_permutexvar_epi64(order, (__m512i)value);
}
INFINITY_INLINE WideH permute_after_pack(WideH value) {
  const __m512i order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
  return (WideH)_mm512_permutexvar_epi64(order, (__m512i)value);
}
INFINITY_INLINE void to_packed(WideF& first, WideF& second) {
  const __m512 a = (__m512)first;
  const __m512 b = (__m512)second;
  first = (WideF)_mm512_shuffle_f32x4(a, b, 0x88);
  second = (WideF)_mm512_shuffle_f32x4(a, b, 0xdd);
}
INFINITY_INLINE void from_packed(WideF& first, WideF& second) {
  const __m512d a = _mm512_castps_pd((__m512)first);
  const __m512d b = _mm512_castps_pd((__m512)second);
  const __m512i low = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11);
  const __m512i high = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
  first = (WideF)_mm512_castpd_ps(_mm512_permutex2var_pd(a, low, b));
  second = (WideF)_mm512_castpd_ps(_mm512_permutex2var_pd(a, high, b));
}

#elif defined(__AVX2__)

INFINITY_INLINE WideF wide_sqrt(WideF value) { return (WideF)_mm256_sqrt_ps((__m256)value); }
INFINITY_INLINE WideU wide_max(WideU a, WideU b) {
  return (WideU)_mm256_max_epu32((__m256i)a, (__m256i)b);
}
INFINITY_INLINE WideH wide_subtract_saturated(WideH a, WideH b) {
  return (WideH)_mm256_subs_epu16((__m256i)a, (__m256i)b);
}
INFINITY_INLINE WideH wide_min(WideH a, WideH b) {
  return (WideH)_mm256_min_epu16((__m256i)a, (__m256i)b);
}
INFINITY_INLINE WideU unpack_low(WideH lower, WideH upper) {
  return (WideU)_mm256_unpacklo_epi16((__m256i)lower, (__m256i)upper);
}
INFINITY_INLINE WideU unpack_high(WideH lower, WideH upper) {
  return (WideU)_mm256_unpackhi_epi16((__m256i)lower, (__m256i)upper);
}
INFINITY_INLINE WideH pack_halves(WideU first, WideU second) {  // values below 2^16
  return (WideH)_mm256_packus_epi32((__m256i)first, (__m256i)second);
}
INFINITY_INLINE WideH widen_bytes(const u8* from) {
  return (WideH)_mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}
INFINITY_INLINE void narrow_bytes(u8* to, WideH value) {  // values below 2^8
  const __m256i all = (__m256i)value;
  const __m128i low = _mm256_castsi256_si128(all);
  const __m128i bytes = _mm_packus_epi16(low, _mm256_extracti128_si256(all, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), bytes);
}
INFINITY_INLINE WideH permute_before_unpack(WideH value) {
  return (WideH)_mm256_permute4x64_epi64((__m256i)value, 0xd8);
}
INFINITY_INLINE WideH permute_after_pack(WideH value) { return permute_before_unpack(value); }
INFINITY_INLINE void to_packed(WideF& first, WideF& second) {
  const __m256 a = (__m256)first;
  const __m256 b = (__m256)second;
  first = (WideF)_mm256_permute2f128_ps(a, b, 0x20);
  second = (WideF)_mm256_permute2f128_ps(a, b, 0x31);
}
INFINITY_INLINE void from_packed(WideF& first, WideF& second) { to_packed(first, second); }

#else  // 128 bits: packed order equals natural order

INFINITY_INLINE WideH permute_before_unpack(WideH value) { return value; }
INFINITY_INLINE WideH permute_after_pack(WideH value) { return value; }
INFINITY_INLINE void to_packed(WideF&, WideF&) {}
INFINITY_INLINE void from_packed(WideF&, WideF&) {}

#if defined(__x86_64__)

INFINITY_INLINE WideF wide_sqrt(WideF value) { return (WideF)_mm_sqrt_ps((__m128)value); }
INFINITY_INLINE WideU wide_max(WideU a, WideU b) { return a < b ? b : a; }
INFINITY_INLINE WideH wide_subtract_saturated(WideH a, WideH b) {
  return (WideH)_mm_subs_epu16((__m128i)a, (__m128i)b);
}
INFINITY_INLINE WideH wide_min(WideH a, WideH b) { return a - wide_subtract_saturated(a, b); }
INFINITY_INLINE WideU unpack_low(WideH lower, WideH upper) {
  return (WideU)_mm_unpacklo_epi16((__m128i)lower, (__m128i)upper);
}
INFINITY_INLINE WideU unpack_high(WideH lower, WideH upper) {
  return (WideU)_mm_unpackhi_epi16((__m128i)lower, (__m128i)upper);
}
INFINITY_INLINE WideH pack_halves(WideU first, WideU second) {
  // SSE2 has signed saturation only: sign-extend the low halves, so that none saturates.
  const __m128i a = _mm_srai_epi32(_mm_slli_epi32((__m128i)first, 16), 16);
  const __m128i b = _mm_srai_epi32(_mm_slli_epi32((__m128i)second, 16), 16);
  return (WideH)_mm_packs_epi32(a, b);
}
INFINITY_INLINE WideH widen_bytes(const u8* from) {
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
  return (WideH)_mm_unpacklo_epi8(bytes, _mm_setzero_si128());
}
INFINITY_INLINE void narrow_bytes(u8* to, WideH value) {
  const __m128i bytes = _mm_packus_epi16((__m128i)value, (__m128i)value);
  _mm_storel_epi64(reinterpret_cast<__m128i*>(to), bytes);
}

#elif defined(__aarch64__)

INFINITY_INLINE WideF wide_sqrt(WideF value) { return (WideF)vsqrtq_f32((float32x4_t)value); }
INFINITY_INLINE WideU wide_max(WideU a, WideU b) {
  return (WideU)vmaxq_u32((uint32x4_t)a, (uint32x4_t)b);
}
INFINITY_INLINE WideH wide_subtract_saturated(WideH a, WideH b) {
  return (WideH)vqsubq_u16((uint16x8_t)a, (uint16x8_t)b);
}
INFINITY_INLINE WideH wide_min(WideH a, WideH b) {
  return (WideH)vminq_u16((uint16x8_t)a, (uint16x8_t)b);
}
INFINITY_INLINE WideU unpack_low(WideH lower, WideH upper) {
  return (WideU)vzip1q_u16((uint16x8_t)lower, (uint16x8_t)upper);
}
INFINITY_INLINE WideU unpack_high(WideH lower, WideH upper) {
  return (WideU)vzip2q_u16((uint16x8_t)lower, (uint16x8_t)upper);
}
INFINITY_INLINE WideH pack_halves(WideU first, WideU second) {
  return (WideH)vuzp1q_u16((uint16x8_t)first, (uint16x8_t)second);
}
INFINITY_INLINE WideH widen_bytes(const u8* from) { return (WideH)vmovl_u8(vld1_u8(from)); }
INFINITY_INLINE void narrow_bytes(u8* to, WideH value) {
  vst1_u8(to, vmovn_u16((uint16x8_t)value));
}

#else
#error "infinity._adam supports x86-64 and arm64 only"
#endif
#endif

template <>
struct Lanes<WideF> {
  using Bits = WideU;
  static INFINITY_INLINE WideF sqrt(WideF value) { return wide_sqrt(value); }
};
template <>
struct Lanes<WideU> {
  using Float = WideF;
};
template <>
struct Lanes<WideH> {
  static INFINITY_INLINE WideH min(WideH a, WideH b) { return wide_min(a, b); }
  static INFINITY_INLINE WideH subtract_saturated(WideH a, u16 b) {
    return wide_subtract_saturated(a, WideH{} + b);
  }
};

template <class Vector>
INFINITY_INLINE Vector load_vector(const void* from) {
  Vector value;
  __builtin_memcpy(&value, from, sizeof value);
  return value;
}

// The indices 0, 1, 2, ... of one tile, in lane order.
template <bool kPacked>
struct Iota {
  alignas(64) u32 at[kMomentBlock] = {};
  constexpr Iota() {
    constexpr u32 kGroup = 2 * INFINITY_LANES;
    for (u32 i = 0; i < kMomentBlock; ++i) {
      const u32 lane = i % kGroup % INFINITY_LANES;
      const u32 second = i % kGroup / INFINITY_LANES;
      const u32 element = lane / 4 * 8 + second * 4 + lane % 4;
      at[i] = kPacked ? i - i % kGroup + element : i;
    }
  }
};
template <bool kPacked>
constexpr Iota<kPacked> kIota;

// Loads, stores and conversions of groups. [Note: packed order]
template <bool kPacked>
struct Group {
  static constexpr size_t kLanes = INFINITY_LANES;
  static constexpr size_t kWidth = 2 * kLanes;
  using Halves = WideH;
  struct Floats {
    WideF at[2];
  };
  struct Units {
    WideU at[2];
  };

  static INFINITY_INLINE Floats load(const float* from) {
    Floats value = load_lanes(from);
    if constexpr (kPacked) to_packed(value.at[0], value.at[1]);
    return value;
  }
  static INFINITY_INLINE void store(float* to, Floats value) {
    if constexpr (kPacked) from_packed(value.at[0], value.at[1]);
    store_lanes(to, value);
  }
  // Load and store a buffer that is in lane order: no permutation.
  static INFINITY_INLINE Floats load_lanes(const float* from) {
    return {{load_vector<WideF>(from), load_vector<WideF>(from + kLanes)}};
  }
  static INFINITY_INLINE void store_lanes(float* to, Floats value) {
    __builtin_memcpy(to, &value.at[0], sizeof value.at[0]);
    __builtin_memcpy(to + kLanes, &value.at[1], sizeof value.at[1]);
  }
  static INFINITY_INLINE Halves load16(const u16* from) {
    const Halves value = load_vector<Halves>(from);
    return kPacked ? value : permute_before_unpack(value);
  }
  static INFINITY_INLINE void store16(u16* to, Halves value) {
    if constexpr (!kPacked) value = permute_after_pack(value);
    __builtin_memcpy(to, &value, sizeof value);
  }
  static INFINITY_INLINE Halves load8(const u8* from) {
    return kPacked ? widen_bytes(from) : permute_before_unpack(widen_bytes(from));
  }
  static INFINITY_INLINE void store8(u8* to, Halves value) {
    narrow_bytes(to, kPacked ? value : permute_after_pack(value));
  }
  // Returns elements with the given 16-bit halves.
  static INFINITY_INLINE Units interleave(Halves lower, Halves upper) {
    return {{unpack_low(lower, upper), unpack_high(lower, upper)}};
  }
  static INFINITY_INLINE Halves low_halves(Units value) {
    return pack_halves(value.at[0] & 0xffffu, value.at[1] & 0xffffu);
  }
  static INFINITY_INLINE Halves high_halves(Units value) {
    return pack_halves(value.at[0] >> 16, value.at[1] >> 16);
  }
  // Returns first + i, first + i + 1, ...; requires i + kWidth <= kMomentBlock.
  static INFINITY_INLINE Units iota(u32 first, size_t i) {
    const u32* from = kIota<kPacked>.at + i;
    return {{load_vector<WideU>(from) + first, load_vector<WideU>(from + kLanes) + first}};
  }
};

}  // namespace
}  // namespace infinity
