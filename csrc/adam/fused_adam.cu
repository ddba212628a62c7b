// CUDA kernels of the optimizer. Layouts, arithmetic and results, bit for bit, are those of the CPU
// kernels (kernel.inl and passes.inl).
//
// Compiled by NVRTC at run time (infinity/optim/cuda_compile.py), one variant at a time, selected
// by macros:
//   INFINITY_RULE       one of INFINITY_RULES (update.inl)
//   INFINITY_LAYOUT     Fp32Weight, SplitWeight, Fp16Weight
//   INFINITY_GRADIENT   Fp32, Bf16, Fp16
//   INFINITY_MOMENTS    Fp32Moment, Bf16Moment, Bf16Stochastic, Int8Moment
// Without INFINITY_RULE the file has the kernels of square sums. Equal bits require the options
// --fmad=false --prec-div=true --prec-sqrt=true --ftz=false.
//
// No system headers are included. tests/support/cuda_on_host.h emulates the CUDA intrinsics used
// here, so that the tests run this file on a CPU.

#ifndef INFINITY_FUNCTION
#define INFINITY_FUNCTION __device__ __forceinline__
#define INFINITY_SQRT(value) __fsqrt_rn(value)
#endif

#include "segments.cuh"
#include "squares.cuh"
#include "update.inl"

namespace infinity {
namespace {

using Values = Four<float>;
using Randoms = Four<u32>;

// Layouts: load and store the fp32 masters `p`, and store the weights.

// fp32 weights, which are the masters.
struct Fp32Weight {
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

// bf16 weights and int16 residuals.
struct SplitWeight {
  template <bool kVector>
  static INFINITY_FUNCTION Values load(const Segment& s, Range<kVector> range) {
    const Four<u16> weight = load_four<u16>(s.weight, range);
    const Four<i16> residual = load_four<i16>(s.master_state, range);
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
    store_four(s.master_state, range, residual);
  }
};

// fp16 weights, which are only written, and fp32 masters.
struct Fp16Weight {
  template <bool kVector>
  static INFINITY_FUNCTION Values load(const Segment& s, Range<kVector> range) {
    return load_four<float>(s.master_state, range);
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
    store_four(s.master_state, range, master);
  }
};

// Memory of one of the moments of a segment.
struct MomentMemory {
  void* values;
  float* scales;   // Int8Moment only
  bool is_second;  // the two moments use different random bits
};

template <class Type, bool kVector>
INFINITY_FUNCTION Values load_moments(MomentMemory memory, Range<kVector> range) {
  const auto stored = load_four<typename Type::Stored>(memory.values, range);
  Values moments;
  for (u32 i = 0; i < kPerLane; ++i) moments.at[i] = Type::widen(stored.at[i]);
  return moments;
}

// Formats of moments. `load` and `store` are templates over kUnsigned, the code of Int8Moment;
// kRandom says whether `store` uses the random bits.

// One element each of type `Type`, rounded to nearest.
template <class Type>
struct ElementwiseMoment {
  static constexpr bool kRandom = false;

  template <bool kUnsigned, bool kVector>
  static INFINITY_FUNCTION Values load(MomentMemory memory, Range<kVector> range) {
    return load_moments<Type>(memory, range);
  }

  template <bool kUnsigned, bool kVector>
  static INFINITY_FUNCTION void store(MomentMemory memory, Range<kVector> range,
                                      const Values& moments, const Randoms&) {
    Four<typename Type::Stored> stored;
    for (u32 i = 0; i < kPerLane; ++i) stored.at[i] = Type::narrow(moments.at[i]);
    store_four(memory.values, range, stored);
  }
};

using Fp32Moment = ElementwiseMoment<Fp32>;
using Bf16Moment = ElementwiseMoment<Bf16>;

// bf16, rounded stochastically.
struct Bf16Stochastic {
  static constexpr bool kRandom = true;

  template <bool kUnsigned, bool kVector>
  static INFINITY_FUNCTION Values load(MomentMemory memory, Range<kVector> range) {
    return load_moments<Bf16>(memory, range);
  }

  template <bool kUnsigned, bool kVector>
  static INFINITY_FUNCTION void store(MomentMemory memory, Range<kVector> range,
                                      const Values& moments, const Randoms& randoms) {
    Four<u16> stored;
    for (u32 i = 0; i < kPerLane; ++i) {
      const u32 bits = randoms.at[i];
      const u32 random = memory.is_second ? high_random(bits) : low_random(bits);
      stored.at[i] = to_bf16_stochastic(moments.at[i], random);
    }
    store_four(memory.values, range, stored);
  }
};

// 8-bit codes, with one scale for the 128 elements of a warp.
struct Int8Moment {
  static constexpr bool kRandom = true;

  template <bool kUnsigned, bool kVector>
  static INFINITY_FUNCTION Values load(MomentMemory memory, Range<kVector> range) {
    const Four<u8> codes = load_four<u8>(memory.values, range);
    const float scale = memory.scales[range.index / kMomentBlock];
    Values moments;
    for (u32 i = 0; i < kPerLane; ++i) {
      const u8 code = codes.at[i];
      moments.at[i] = kUnsigned ? decode_unsigned(code, scale) : decode_signed(code, scale);
    }
    return moments;
  }

  // Must be called by all lanes of a warp, because of the shuffles; lanes beyond the end have a
  // count of 0.
  template <bool kUnsigned, bool kVector>
  static INFINITY_FUNCTION void store(MomentMemory memory, Range<kVector> range,
                                      const Values& moments, const Randoms& randoms) {
    u32 largest = 0;
    for (u32 i = 0; i < kPerLane; ++i) {
      const u32 magnitude = i < range.count ? canonical_bits(moments.at[i]) & kMagnitude : 0;
      largest = magnitude > largest ? magnitude : largest;
    }
    for (u32 half = kWarp / 2; half > 0; half /= 2) {
      const u32 other = __shfl_xor_sync(kFullMask, largest, half);
      largest = other > largest ? other : largest;
    }
    const float scale = block_scale(largest);
    const float inverse = block_inverse(scale);
    Four<u8> codes;
    for (u32 i = 0; i < kPerLane; ++i) {
      const float value = scale == scale ? moments.at[i] : 0.0f;  // for a NaN scale
      codes.at[i] = kUnsigned ? encode_unsigned(value, inverse, randoms.at[i])
                              : encode_signed(value, inverse);
    }
    store_four(memory.values, range, codes);
    if (threadIdx.x % kWarp == 0) memory.scales[range.index / kMomentBlock] = scale;
  }
};

// Returns the random bits of four elements, which may cross a multiple of 2^32.
INFINITY_FUNCTION Randoms randoms_of(const Segment& s, u64 index) {
  const u64 first = s.first + index;
  const u32 high = static_cast<u32>(first >> 32);
  const RandomKey key = random_key(s.key, high);
  Randoms randoms;
  for (u32 i = 0; i < kPerLane; ++i) {
    const u64 element = first + i;
    const bool crossed = static_cast<u32>(element >> 32) != high;
    randoms.at[i] =
        random_bits(crossed ? random_key(s.key, high + 1) : key, static_cast<u32>(element));
  }
  return randoms;
}

// Updates the elements of one thread.
template <class Rule, class Layout, class Gradient, class Format, bool kVector>
INFINITY_FUNCTION void update_four(const Rule& rule, const Segment& s, Range<kVector> range) {
  const MomentMemory memory1{s.moment1, s.scales1, false};
  const MomentMemory memory2{s.moment2, s.scales2, true};
  const auto gradients = load_four<typename Gradient::Stored>(s.gradient, range);
  Values p = Layout::load(s, range);
  Values m = {};
  Values v = {};
  if constexpr (Rule::kNumMoments > 0) m = Format::template load<Rule::kUnsigned>(memory1, range);
  if constexpr (Rule::kNumMoments > 1) v = Format::template load<true>(memory2, range);

  for (u32 i = 0; i < kPerLane; ++i) {
    const float gradient = Gradient::widen(gradients.at[i]);
    p.at[i] = rule.apply(p.at[i], rule.change(rule.begin(p.at[i], gradient, m.at[i], v.at[i])));
  }

  Layout::store(s, range, p);
  Randoms randoms = {};
  if constexpr (Format::kRandom && Rule::kNumMoments > 0) randoms = randoms_of(s, range.index);
  if constexpr (Rule::kNumMoments > 0) {
    Format::template store<Rule::kUnsigned>(memory1, range, m, randoms);
  }
  if constexpr (Rule::kNumMoments > 1) Format::template store<true>(memory2, range, v, randoms);
}

// Updates the tile of this thread block. Each warp processes whole moment blocks of 128 elements,
// in turn. Branches are uniform per warp, as the shuffles of `Int8Moment::store` require.
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
      const u64 remaining = index < s.n ? s.n - index : 0;
      const u32 count = remaining < kPerLane ? static_cast<u32>(remaining) : kPerLane;
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
