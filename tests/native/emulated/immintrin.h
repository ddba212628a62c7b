// Emulation, as scalar loops, of the AVX-512 intrinsics that csrc/adam/lanes.inl uses, after
// Intel's intrinsics guide: runs the 512-bit kernels on CPUs without AVX-512.
#pragma once

typedef float __m512 __attribute__((vector_size(64), may_alias));
typedef double __m512d __attribute__((vector_size(64), may_alias));
typedef long long __m512i __attribute__((vector_size(64), may_alias));
typedef long long __m256i __attribute__((vector_size(32), may_alias));

namespace emulated {
typedef unsigned Words __attribute__((vector_size(64)));
typedef unsigned short Halves __attribute__((vector_size(64)));
typedef unsigned char Bytes32 __attribute__((vector_size(32)));
typedef long long Unaligned256 __attribute__((vector_size(32), aligned(1), may_alias));
}  // namespace emulated

#define EMULATED static inline __attribute__((always_inline))

EMULATED __m512 _mm512_sqrt_ps(__m512 a) {
  for (int i = 0; i < 16; ++i) a[i] = __builtin_sqrtf(a[i]);
  return a;
}

EMULATED __m512i _mm512_max_epu32(__m512i a, __m512i b) {
  emulated::Words x = (emulated::Words)a, y = (emulated::Words)b;
  for (int i = 0; i < 16; ++i) x[i] = x[i] > y[i] ? x[i] : y[i];
  return (__m512i)x;
}

EMULATED __m512i _mm512_subs_epu16(__m512i a, __m512i b) {
  emulated::Halves x = (emulated::Halves)a, y = (emulated::Halves)b;
  for (int i = 0; i < 32; ++i) x[i] = x[i] > y[i] ? (unsigned short)(x[i] - y[i]) : 0;
  return (__m512i)x;
}

EMULATED __m512i _mm512_min_epu16(__m512i a, __m512i b) {
  emulated::Halves x = (emulated::Halves)a, y = (emulated::Halves)b;
  for (int i = 0; i < 32; ++i) x[i] = x[i] < y[i] ? x[i] : y[i];
  return (__m512i)x;
}

// Interleaves the low (high) four 16-bit elements of a and b in each 128-bit lane.
EMULATED __m512i _mm512_unpacklo_epi16(__m512i a, __m512i b) {
  emulated::Halves x = (emulated::Halves)a, y = (emulated::Halves)b, to;
  for (int i = 0; i < 32; ++i) {
    const int from = i / 8 * 8 + i % 8 / 2;
    to[i] = i % 2 == 0 ? x[from] : y[from];
  }
  return (__m512i)to;
}

EMULATED __m512i _mm512_unpackhi_epi16(__m512i a, __m512i b) {
  emulated::Halves x = (emulated::Halves)a, y = (emulated::Halves)b, to;
  for (int i = 0; i < 32; ++i) {
    const int from = i / 8 * 8 + 4 + i % 8 / 2;
    to[i] = i % 2 == 0 ? x[from] : y[from];
  }
  return (__m512i)to;
}

// In each 128-bit lane: four signed 32-bit elements of a, then four of b, saturated to 0 ... 65535.
EMULATED __m512i _mm512_packus_epi32(__m512i a, __m512i b) {
  emulated::Words x = (emulated::Words)a, y = (emulated::Words)b;
  emulated::Halves to;
  for (int i = 0; i < 32; ++i) {
    const int from = i / 8 * 4 + i % 4;
    const int word = (int)(i % 8 < 4 ? x[from] : y[from]);
    to[i] = (unsigned short)(word < 0 ? 0 : (word > 65535 ? 65535 : word));
  }
  return (__m512i)to;
}

EMULATED __m256i _mm256_loadu_si256(const __m256i* from) {
  return (__m256i) * (const emulated::Unaligned256*)from;
}

EMULATED void _mm256_storeu_si256(__m256i* to, __m256i value) {
  *(emulated::Unaligned256*)to = (emulated::Unaligned256)value;
}

EMULATED __m512i _mm512_cvtepu8_epi16(__m256i a) {
  emulated::Bytes32 x = (emulated::Bytes32)a;
  emulated::Halves to;
  for (int i = 0; i < 32; ++i) to[i] = x[i];
  return (__m512i)to;
}

EMULATED __m256i _mm512_cvtepi16_epi8(__m512i a) {
  emulated::Halves x = (emulated::Halves)a;
  emulated::Bytes32 to;
  for (int i = 0; i < 32; ++i) to[i] = (unsigned char)x[i];
  return (__m256i)to;
}

EMULATED __m512i _mm512_setr_epi64(long long a, long long b, long long c, long long d, long long e,
                                   long long f, long long g, long long h) {
  return (__m512i){a, b, c, d, e, f, g, h};
}

EMULATED __m512i _mm512_permutexvar_epi64(__m512i index, __m512i a) {
  __m512i to;
  for (int i = 0; i < 8; ++i) to[i] = a[index[i] & 7];
  return to;
}

// Selects two 128-bit lanes of a by bits 0-3 of `control` and two of b by bits 4-7.
EMULATED __m512 _mm512_shuffle_f32x4(__m512 a, __m512 b, int control) {
  __m512 to;
  for (int i = 0; i < 16; ++i) {
    const int lane = (control >> (2 * (i / 4))) & 3;
    to[i] = i < 8 ? a[lane * 4 + i % 4] : b[lane * 4 + i % 4];
  }
  return to;
}

EMULATED __m512d _mm512_castps_pd(__m512 a) { return (__m512d)a; }
EMULATED __m512 _mm512_castpd_ps(__m512d a) { return (__m512)a; }

EMULATED __m512d _mm512_permutex2var_pd(__m512d a, __m512i index, __m512d b) {
  __m512d to;
  for (int i = 0; i < 8; ++i) to[i] = (index[i] & 8) != 0 ? b[index[i] & 7] : a[index[i] & 7];
  return to;
}
