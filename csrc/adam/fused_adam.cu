// The optimizer on a CUDA device: same layouts, same arithmetic, same bits as the CPU's kernel.inl.
//
// Compiled by NVRTC at run time (infinity/optim/cuda_compile.py), one variant at a time, chosen by
// macros:
//   INFINITY_RULE       one of INFINITY_RULES                      (update.inl)
//   INFINITY_LAYOUT     Whole, Split, Half
//   INFINITY_GRADIENT   Fp32, Bf16, Fp16
//   INFINITY_MOMENTS    Exact, Rounded, Stochastic, Blocks
// Without INFINITY_RULE it holds the helpers: sums of squares. Options that belong to
// the definition: --fmad=false --prec-div=true --prec-sqrt=true --ftz=false.
//
// No headers. tests/support/cuda_on_host.h gives the few CUDA words used here a meaning on a CPU,
// so that this very file runs, thread by thread, where there is no GPU.

#ifndef INFINITY_FUNCTION
#define INFINITY_FUNCTION __device__ __forceinline__
#define INFINITY_BITS_OF(value) __float_as_uint(value)
#define INFINITY_FLOAT_OF(bits) __uint_as_float(bits)
#define INFINITY_SQRT(value) __fsqrt_rn(value)
#endif

#include "helpers.cuh"
#include "segments.cuh"
#include "update.inl"

namespace infinity {
namespace {

using Values = Four<float>;
using Randoms = Four<u32>;

// --- masters -------------------------------------------------------------------------------------

struct Whole {  // fp32 weights
  template <bool kVector>
  static INFINITY_FUNCTION Values load(const Segment& s, Range<kVector> range) {
    return load_four<float>(s.weight, range);
  }

  template <bool kVector>
  static INFINITY_FUNCTION void store(const Segment& s, Range<kVector> range, const Values& p) {
    Four<float> weight;
    for (u32 i = 0; i < kPerLane; ++i) weight.at[i] = canonical(p.at[i]);
    store_four(s.weight, range, weight);
  }
};

struct Split {  // bf16 weights, int16 residuals
  template <bool kVector>
  static INFINITY_FUNCTION Values load(const Segment& s, Range<kVector> range) {
    const Four<u16> weight = load_four<u16>(s.weight, range);
    const Four<i16> residual = load_four<i16>(s.rest, range);
    Values p;
    for (u32 i = 0; i < kPerLane; ++i) p.at[i] = join_master(weight.at[i], residual.at[i]);
    return p;
  }

  template <bool kVector>
  static INFINITY_FUNCTION void store(const Segment& s, Range<kVector> range, const Values& p) {
    Four<u16> weight;
    Four<i16> residual;
    for (u32 i = 0; i < kPerLane; ++i) split_master(p.at[i], weight.at[i], residual.at[i]);
    store_four(s.weight, range, weight);
    store_four(s.rest, range, residual);
  }
};

struct Half {  // fp16 weights, which are written only, and fp32 masters
  template <bool kVector>
  static INFINITY_FUNCTION Values load(const Segment& s, Range<kVector> range) {
    return load_four<float>(s.rest, range);
  }

  template <bool kVector>
  static INFINITY_FUNCTION void store(const Segment& s, Range<kVector> range, const Values& p) {
    Four<u16> weight;
    Four<float> master;
    for (u32 i = 0; i < kPerLane; ++i) {
      master.at[i] = canonical(p.at[i]);
      weight.at[i] = to_fp16(master.at[i]);
    }
    store_four(s.weight, range, weight);
    store_four(s.rest, range, master);
  }
};

// --- moments -------------------------------------------------------------------------------------

// Where one of a segment's moments is, and how it is told from the other.
struct Place {
  void* values;
  float* scales;
  bool second;  // takes the other random bits
};

template <class Type, bool kVector>
INFINITY_FUNCTION Values load_moments(Place place, Range<kVector> range) {
  const auto stored = load_four<typename Type::Stored>(place.values, range);
  Values moments;
  for (u32 i = 0; i < kPerLane; ++i) moments.at[i] = Type::widen(stored.at[i]);
  return moments;
}

template <class Type>
struct Plainly {  // every element by itself, in the nearest value
  static constexpr bool kRandom = false;

  template <bool kUnsigned, bool kVector>
  static INFINITY_FUNCTION Values load(Place place, Range<kVector> range) {
    return load_moments<Type>(place, range);
  }

  template <bool kUnsigned, bool kVector>
  static INFINITY_FUNCTION void store(Place place, Range<kVector> range, const Values& moments,
                                      const Randoms&) {
    Four<typename Type::Stored> stored;
    for (u32 i = 0; i < kPerLane; ++i) stored.at[i] = Type::narrow(moments.at[i]);
    store_four(place.values, range, stored);
  }
};

using Exact = Plainly<Fp32>;
using Rounded = Plainly<Bf16>;

struct Stochastic {  // bf16, rounded at random
  static constexpr bool kRandom = true;

  template <bool kUnsigned, bool kVector>
  static INFINITY_FUNCTION Values load(Place place, Range<kVector> range) {
    return load_moments<Bf16>(place, range);
  }

  template <bool kUnsigned, bool kVector>
  static INFINITY_FUNCTION void store(Place place, Range<kVector> range, const Values& moments,
                                      const Randoms& randoms) {
    Four<u16> stored;
    for (u32 i = 0; i < kPerLane; ++i) {
      const u32 bits = randoms.at[i];
      const u32 random = place.second ? high_random(bits) : low_random(bits);
      stored.at[i] = to_bf16_stochastic(moments.at[i], random);
    }
    store_four(place.values, range, stored);
  }
};

struct Blocks {  // a byte each, and a scale for the 128 elements of a warp
  static constexpr bool kRandom = true;

  template <bool kUnsigned, bool kVector>
  static INFINITY_FUNCTION Values load(Place place, Range<kVector> range) {
    const Four<u8> codes = load_four<u8>(place.values, range);
    const float scale = place.scales[range.index / kMomentBlock];
    Values moments;
    for (u32 i = 0; i < kPerLane; ++i) {
      const u8 code = codes.at[i];
      moments.at[i] = kUnsigned ? decode_unsigned(code, scale) : decode_signed(code, scale);
    }
    return moments;
  }

  // All lanes of a warp come here together; those behind the end have a count of 0.
  template <bool kUnsigned, bool kVector>
  static INFINITY_FUNCTION void store(Place place, Range<kVector> range, const Values& moments,
                                      const Randoms& randoms) {
    u32 largest = 0;
    for (u32 i = 0; i < kPerLane; ++i) {
      const u32 magnitude = i < range.count ? canonical_bits(moments.at[i]) & kMagnitude : 0;
      largest = magnitude > largest ? magnitude : largest;
    }
    for (u32 half = kWarp / 2; half > 0; half /= 2) {
      const u32 other = __shfl_xor_sync(kAll, largest, half);
      largest = other > largest ? other : largest;
    }
    const float scale = block_scale(largest);
    const float inverse = block_inverse(scale);
    Four<u8> codes;
    for (u32 i = 0; i < kPerLane; ++i) {
      const float value = scale == scale ? moments.at[i] : 0.0f;  // NaN: codes do not matter
      codes.at[i] = kUnsigned ? encode_unsigned(value, inverse, randoms.at[i])
                              : encode_signed(value, inverse);
    }
    store_four(place.values, range, codes);
    if (threadIdx.x % kWarp == 0) place.scales[range.index / kMomentBlock] = scale;
  }
};

// --- the update ----------------------------------------------------------------------------------

// Four neighbors may lie on both sides of a multiple of 2^32.
INFINITY_FUNCTION Randoms randoms_of(const Segment& s, u64 index) {
  const u64 first = s.first + index;
  const u32 high = static_cast<u32>(first >> 32);
  const RandomKey key = random_key(s.key, high);
  Randoms randoms;
  for (u32 i = 0; i < kPerLane; ++i) {
    const u64 element = first + i;
    const bool over = static_cast<u32>(element >> 32) != high;
    randoms.at[i] =
        random_bits(over ? random_key(s.key, high + 1) : key, static_cast<u32>(element));
  }
  return randoms;
}

template <class Rule, class Layout, class Gradient, class Format, bool kVector>
INFINITY_FUNCTION void update_four(const Rule& rule, const Segment& s, Range<kVector> range) {
  const Place place1{s.moment1, s.scales1, false};
  const Place place2{s.moment2, s.scales2, true};
  const auto gradients = load_four<typename Gradient::Stored>(s.gradient, range);
  Values p = Layout::load(s, range);
  Values m = {};
  Values v = {};
  if constexpr (Rule::kNumMoments > 0) m = Format::template load<Rule::kUnsigned>(place1, range);
  if constexpr (Rule::kNumMoments > 1) v = Format::template load<true>(place2, range);

  for (u32 i = 0; i < kPerLane; ++i) {
    const float gradient = Gradient::widen(gradients.at[i]);
    p.at[i] = rule.apply(p.at[i], rule.change(rule.begin(p.at[i], gradient, m.at[i], v.at[i])));
  }

  Layout::store(s, range, p);
  Randoms randoms = {};
  if constexpr (Format::kRandom && Rule::kNumMoments > 0) randoms = randoms_of(s, range.index);
  if constexpr (Rule::kNumMoments > 0) {
    Format::template store<Rule::kUnsigned>(place1, range, m, randoms);
  }
  if constexpr (Rule::kNumMoments > 1) Format::template store<true>(place2, range, v, randoms);
}

// A warp takes blocks of 128 elements of its tile in turn, so that blocks stay whole. All its lanes
// take the same branches here: they must meet in `Blocks`.
template <class Rule, class Layout, class Gradient, class Format, class Table>
INFINITY_FUNCTION void update_tile(const Table& table) {
  const Segment& s = table.segments[find_segment(table, blockIdx.x)];
  const Rule rule = Rule::make(table.scalars[s.scalars]);
  const u32 warp = threadIdx.x / kWarp;
  const u32 lane = threadIdx.x % kWarp;
  const u64 begin = static_cast<u64>(blockIdx.x - s.first_tile) * kTile;
  for (u32 offset = warp * kMomentBlock; offset < kTile; offset += kWarps * kMomentBlock) {
    const u64 block = begin + offset;
    if (block >= s.n) break;
    const u64 index = block + lane * kPerLane;
    if (s.wide != 0 && s.n - block >= kMomentBlock) {
      update_four<Rule, Layout, Gradient, Format>(rule, s, Range<true>{index, kPerLane});
    } else {
      const u64 rest = index < s.n ? s.n - index : 0;
      const u32 count = rest < kPerLane ? static_cast<u32>(rest) : kPerLane;
      update_four<Rule, Layout, Gradient, Format>(rule, s, Range<false>{index, count});
    }
  }
}

}  // namespace
}  // namespace infinity

#ifdef INFINITY_RULE
#define INFINITY_UPDATE(name, table_type)                                                  \
  extern "C" __global__ void __launch_bounds__(infinity::kThreads)                         \
      name(const __grid_constant__ infinity::table_type table) {                           \
    infinity::update_tile<infinity::INFINITY_RULE, infinity::INFINITY_LAYOUT,              \
                          infinity::INFINITY_GRADIENT, infinity::INFINITY_MOMENTS>(table); \
  }
INFINITY_UPDATE(update_small, SmallUpdate)
INFINITY_UPDATE(update_large, LargeUpdate)
#else
#define INFINITY_SQUARES(type)                                                \
  extern "C" __global__ void __launch_bounds__(infinity::kThreads)            \
      square_tiles_##type(const __grid_constant__ infinity::SumTable table) { \
    infinity::square_tile<infinity::type>(table);                             \
  }
INFINITY_SQUARES(Fp32)
INFINITY_SQUARES(Bf16)
INFINITY_SQUARES(Fp16)

extern "C" __global__ void __launch_bounds__(infinity::kFoldThreads)
    fold_partials(const __grid_constant__ infinity::SumTable table) {
  infinity::fold_partials(table);
}
#endif
