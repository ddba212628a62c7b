// Update kernel for all rules, layouts, gradient types and moment formats. Included by isa.cpp,
// which is compiled once per instruction set; the elementwise arithmetic is in update.inl.
//
// All functions are in an anonymous namespace, and no inline library function is used: if the
// linker merged a function across object files, a CPU could run code that it does not support.
//
// [Note: three stages]
// The dependency chain from the loads of an element to its new weight has a square root and two
// divisions. The reorder buffer of a CPU holds only a few elements of such a loop, so the loop
// would be bound by the latency of the chain instead of the throughput of the divider or of memory.
// The chain is therefore cut into three stages: moments and square roots; divisions; weights and
// codes of moments. The loop is software-pipelined over tiles: it runs stage 1 of a tile, stage 2
// of the previous tile and stage 3 of the one before that, which are independent (in one loop or
// two, see `kTwoLoops`). Intermediate values stay in the L1 cache; each array is read and written
// once.
//
// [Note: tiles]
// Tiles are aligned to multiples of the tile size, counted from the start of the parameter. Hence
// an 8-bit block is one tile, and the upper 32 bits of the element index are constant in a tile. A
// partial tile at the start or end of a range is copied to a zero-filled buffer of a full tile,
// updated there and copied back.

#include "kernels.h"
#include "lanes.inl"

namespace infinity {
namespace {

constexpr size_t kTile = kMomentBlock;

template <class G>
using FloatsOf = typename G::Floats;
template <class G>
using UnitsOf = typename G::Units;
template <class G>
using HalvesOf = typename G::Halves;

template <class G>
INFINITY_INLINE FloatsOf<G> as_floats(UnitsOf<G> bits) {
  return {{float_of(bits.at[0]), float_of(bits.at[1])}};
}
template <class G>
INFINITY_INLINE UnitsOf<G> as_units(FloatsOf<G> value) {
  return {{bits_of(value.at[0]), bits_of(value.at[1])}};
}

// Loads a group of gradients; kHalfGradient: bf16 or fp16, by `gradient_dtype`.
template <class G, bool kHalfGradient>
INFINITY_INLINE FloatsOf<G> load_gradient(const UpdateArguments& a, size_t i) {
  if constexpr (!kHalfGradient) {
    return G::load(static_cast<const float*>(a.gradient) + i);
  } else {
    const HalvesOf<G> halves = G::load16(static_cast<const u16*>(a.gradient) + i);
    if (a.gradient_dtype == kBf16) return as_floats<G>(G::interleave(HalvesOf<G>{}, halves));
    const UnitsOf<G> bits = G::interleave(halves, HalvesOf<G>{});
    return {{widen_fp16(bits.at[0]), widen_fp16(bits.at[1])}};
  }
}

// Masters in fp32: kFp32Weight, or kFp16Weight with a separate fp16 weight.
struct Fp32Master {
  static constexpr bool k16Bit = false;
  float* master;
  u16* fp16_weight;  // null for kFp32Weight

  explicit Fp32Master(const UpdateArguments& a)
      : master(static_cast<float*>(a.layout == kFp16Weight ? a.master_state : a.weight)),
        fp16_weight(static_cast<u16*>(a.layout == kFp16Weight ? a.weight : nullptr)) {}

  template <class G>
  INFINITY_INLINE FloatsOf<G> load(G, size_t i) const {
    return G::load(master + i);
  }
  template <class G>
  INFINITY_INLINE void store(G, size_t i, FloatsOf<G> value) const {
    G::store(master + i, value);
    if (fp16_weight != nullptr) {
      G::store16(fp16_weight + i,
                 G::low_halves({{fp16_bits(value.at[0]), fp16_bits(value.at[1])}}));
    }
  }
};

// Masters split into bf16 weights and int16 residuals: kSplitWeight.
struct SplitMaster {
  static constexpr bool k16Bit = true;
  u16* weight;
  u16* residual;

  explicit SplitMaster(const UpdateArguments& a)
      : weight(static_cast<u16*>(a.weight)), residual(static_cast<u16*>(a.master_state)) {}

  template <class G>
  INFINITY_INLINE FloatsOf<G> load(G, size_t i) const {
    const HalvesOf<G> lower = G::load16(residual + i);
    const HalvesOf<G> upper = upper_of_split(G::load16(weight + i), lower);
    return as_floats<G>(G::interleave(lower, upper));
  }
  template <class G>
  INFINITY_INLINE void store(G, size_t i, FloatsOf<G> value) const {
    const UnitsOf<G> bits = as_units<G>(value);
    const HalvesOf<G> lower = G::low_halves(bits);
    G::store16(weight + i, weight_of(G::high_halves(bits), lower));
    G::store16(residual + i, lower);
  }
};

// Intermediate values of one tile, passed from stage to stage; arrays are in lane order.
struct TileState {
  alignas(64) float numerators[kTile];  // after stage 2: the changes of the weights
  alignas(64) float denominators[kTile];
  alignas(64) float moments[2][kTile];  // 8-bit moments only
  size_t begin;                         // first element of the tile
  RandomKey key;
  u32 index;         // low 32 bits of the index of that element in its parameter
  float scale[2];    // 8-bit moments only: scales of the loaded codes
  float inverse[2];  // 8-bit moments only: reciprocals of the scales of the stored codes
};

// Running maximum, per lane, of the magnitudes of a tile's moments.
struct LargestMagnitude {
  WideU first = {};
  WideU second = {};

  // The second moment is never negative. Its sign, which a NaN may have, is cleared in `reduce`.
  template <int k>
  INFINITY_INLINE void include(WideF value) {
    WideU& wide = k == 0 ? first : second;
    wide = wide_max(k == 0 ? bits_of(value) & kMagnitude : bits_of(value), wide);
  }
  // Returns the maximum over the lanes.
  static INFINITY_INLINE u32 reduce(WideU wide) {
    u32 largest = 0;
    for (int i = 0; i < INFINITY_LANES; ++i) largest = Lanes<u32>::max(largest, wide[i]);
    return largest & kMagnitude;
  }
};

// Update of full tiles. [Note: three stages]
template <class Update, class Weights, Format kFormat, bool kHalfGradient>
struct Stages {
  static constexpr int kNumMoments = Update::kNumMoments;
  static constexpr bool kCodes = kFormat == kInt8Moment && kNumMoments > 0;
  static constexpr bool kUnsigned[2] = {Update::kUnsigned, true};
  // 8- and 16-bit conversions need vector constants; one loop with all stages would spill
  // registers.
  static constexpr bool kTwoLoops = kFormat != kFp32Moment || Weights::k16Bit;
  // With 8- or 16-bit moments most arrays are not fp32: permute the fp32 arrays instead.
  // [Note: packed order]
  using G = Group<kFormat != kFp32Moment>;
  using Floats = FloatsOf<G>;
  using Units = UnitsOf<G>;
  using Halves = HalvesOf<G>;

  // By value, so that the compiler can keep them in registers: stores through the data pointers
  // could alias the original.
  const UpdateArguments a;
  const Update update;
  const Weights weights;

  explicit Stages(const UpdateArguments& arguments)
      : a(arguments), update(Update::make(arguments.scalars)), weights(arguments) {}

  template <int k>
  INFINITY_INLINE Floats load_moment(size_t i, float scale) const {
    if constexpr (kFormat == kFp32Moment) {
      return G::load(static_cast<const float*>(a.moment[k]) + i);
    } else if constexpr (kCodes) {
      const Halves code = G::load8(static_cast<const u8*>(a.moment[k]) + i);
      const Halves upper = kUnsigned[k] ? upper_of_unsigned(code) : upper_of_signed(code);
      const Floats value = as_floats<G>(G::interleave(Halves{}, upper));
      return {{value.at[0] * scale, value.at[1] * scale}};
    } else {
      const Halves upper = G::load16(static_cast<const u16*>(a.moment[k]) + i);
      return as_floats<G>(G::interleave(Halves{}, upper));
    }
  }

  template <int k>
  INFINITY_INLINE void store_moment(size_t i, Floats value, Units random) const {
    if constexpr (kFormat == kFp32Moment) {
      G::store(static_cast<float*>(a.moment[k]) + i,
               {{canonical(value.at[0]), canonical(value.at[1])}});
    } else {
      Units bits;
      for (int j = 0; j < 2; ++j) {
        if constexpr (kFormat == kBf16Stochastic) {
          const WideU bits16 = k == 0 ? low_random(random.at[j]) : high_random(random.at[j]);
          bits.at[j] = bf16_stochastic_bits(value.at[j], bits16);
        } else {
          bits.at[j] = bf16_bits(value.at[j]);
        }
      }
      G::store16(static_cast<u16*>(a.moment[k]) + i, G::low_halves(bits));
    }
  }

  template <int k>
  INFINITY_INLINE void buffer_moment(TileState& state, LargestMagnitude& largest, size_t i,
                                     Floats value) const {
    G::store_lanes(state.moments[k] + i, value);
    largest.include<k>(value.at[0]);
    largest.include<k>(value.at[1]);
  }

  template <int k>
  INFINITY_INLINE void store_code(const TileState& state, size_t i) const {
    const Floats value = G::load_lanes(state.moments[k] + i);
    const float inverse = state.inverse[k];
    Units bits;
    if constexpr (kUnsigned[k]) {
      const Units index = G::iota(0, i);  // the tile's index is in the key, see `begin_tile`
      bits.at[0] = unsigned_bits(value.at[0], inverse, random_bits(state.key, index.at[0]));
      bits.at[1] = unsigned_bits(value.at[1], inverse, random_bits(state.key, index.at[1]));
    } else {
      bits.at[0] = signed_bits(value.at[0], inverse);
      bits.at[1] = signed_bits(value.at[1], inverse);
    }
    const Halves upper = G::high_halves(bits);
    G::store8(static_cast<u8*>(a.moment[k]) + state.begin + i,
              kUnsigned[k] ? unsigned_code(upper) : signed_code(upper));
  }

  // Stage 1: updates the moments and computes the fractions. With 8-bit moments, buffers the new
  // moments, since their scale is known only at the end of the tile.
  INFINITY_INLINE void stage1(TileState& state, LargestMagnitude& largest, size_t i) const {
    const size_t index = state.begin + i;
    Floats m = {};
    Floats v = {};
    if constexpr (kNumMoments > 0) m = load_moment<0>(index, state.scale[0]);
    if constexpr (kNumMoments > 1) v = load_moment<1>(index, state.scale[1]);
    Floats p = {};
    if constexpr (Update::kReadsWeight) p = weights.load(G{}, index);
    const Floats gradient = load_gradient<G, kHalfGradient>(a, index);
    const auto one = update.begin(p.at[0], gradient.at[0], m.at[0], v.at[0]);
    const auto two = update.begin(p.at[1], gradient.at[1], m.at[1], v.at[1]);
    G::store_lanes(state.numerators + i, {{one.numerator, two.numerator}});
    if constexpr (Update::kDivides) {
      G::store_lanes(state.denominators + i, {{one.denominator, two.denominator}});
    }
    if constexpr (kCodes) {
      buffer_moment<0>(state, largest, i, m);
      if constexpr (kNumMoments > 1) buffer_moment<1>(state, largest, i, v);
    } else {
      Units random = {};
      if constexpr (kFormat == kBf16Stochastic) {
        random = G::iota(state.index, i);
        random = {{random_bits(state.key, random.at[0]), random_bits(state.key, random.at[1])}};
      }
      if constexpr (kNumMoments > 0) store_moment<0>(index, m, random);
      if constexpr (kNumMoments > 1) store_moment<1>(index, v, random);
    }
  }

  // Stage 2: computes the changes.
  INFINITY_INLINE void stage2(TileState& state, size_t i) const {
    if constexpr (Update::kDivides) {
      const Floats numerators = G::load_lanes(state.numerators + i);
      const Floats denominators = G::load_lanes(state.denominators + i);
      const WideF one = update.change(Fraction<WideF>{numerators.at[0], denominators.at[0]});
      const WideF two = update.change(Fraction<WideF>{numerators.at[1], denominators.at[1]});
      G::store_lanes(state.numerators + i, {{one, two}});
    }
  }

  // Stage 3: applies the changes to the weights, and encodes 8-bit moments.
  INFINITY_INLINE void stage3(const TileState& state, size_t i) const {
    const size_t index = state.begin + i;
    const Floats change = G::load_lanes(state.numerators + i);
    const Floats p = weights.load(G{}, index);
    const WideF one = canonical(update.apply(p.at[0], change.at[0]));
    const WideF two = canonical(update.apply(p.at[1], change.at[1]));
    weights.store(G{}, index, {{one, two}});
    if constexpr (kCodes) {
      store_code<0>(state, i);
      if constexpr (kNumMoments > 1) store_code<1>(state, i);
    }
  }

  // Prepares the state of the tile that begins at `at`.
  INFINITY_INLINE void begin_tile(TileState& state, size_t at) const {
    state.begin = at;
    const u64 index = a.first + at;
    state.key = random_key(a.key, static_cast<u32>(index >> 32));
    state.index = static_cast<u32>(index);
    if constexpr (kCodes) {
      // `random_bits` hashes index ^ key.first. The tile's index is a multiple of the tile size, so
      // index + i == index ^ i, and the tile's index can be folded into the key.
      state.key.first ^= state.index;
      for (int k = 0; k < kNumMoments; ++k) state.scale[k] = a.scales[k][at / kMomentBlock];
    }
  }

  // Computes and stores the scale of moment k; zeroes the buffered moments if one is not finite.
  template <int k>
  INFINITY_INLINE void store_scale(TileState& state, WideU largest) const {
    const float scale = block_scale(LargestMagnitude::reduce(largest));
    a.scales[k][state.begin / kMomentBlock] = scale;
    state.inverse[k] = block_inverse(scale);
    if (scale != scale) {
      for (float& moment : state.moments[k]) moment = 0.0f;
    }
  }

  INFINITY_INLINE void store_scale(TileState& state, const LargestMagnitude& largest) const {
    if constexpr (kCodes) {
      store_scale<0>(state, largest.first);
      if constexpr (kNumMoments > 1) store_scale<1>(state, largest.second);
    }
  }

  // Runs stage 1 on `newest`, stage 2 on `middle` and stage 3 on `oldest`.
  INFINITY_INLINE void run_stages(TileState& newest, TileState& middle, const TileState& oldest,
                                  LargestMagnitude& largest) const {
    if constexpr (kTwoLoops) {
      for (size_t i = 0; i < kTile; i += G::kWidth) stage1(newest, largest, i);
      for (size_t i = 0; i < kTile; i += G::kWidth) {
        stage2(middle, i);
        stage3(oldest, i);
      }
    } else {
      for (size_t i = 0; i < kTile; i += G::kWidth) {
        stage1(newest, largest, i);
        stage2(middle, i);
        stage3(oldest, i);
      }
    }
  }

  // Single stages of one tile, to fill and drain the pipeline.
  __attribute__((noinline)) void run_stage1(TileState& state, size_t at) const {
    begin_tile(state, at);
    LargestMagnitude largest;
    for (size_t i = 0; i < kTile; i += G::kWidth) stage1(state, largest, i);
    store_scale(state, largest);
  }
  __attribute__((noinline)) void run_stage2(TileState& state) const {
    for (size_t i = 0; i < kTile; i += G::kWidth) stage2(state, i);
  }
  __attribute__((noinline)) void run_stage3(const TileState& state) const {
    for (size_t i = 0; i < kTile; i += G::kWidth) stage3(state, i);
  }

  // Updates [begin, end), which consists of full tiles.
  void run(size_t begin, size_t end) const {
    if (begin == end) return;
    TileState tiles[3];
    TileState* oldest = &tiles[0];
    run_stage1(*oldest, begin);
    size_t at = begin + kTile;
    if (at < end) {
      TileState* middle = &tiles[1];
      TileState* newest = &tiles[2];
      run_stage1(*middle, at);
      run_stage2(*oldest);
      // The address of `this` escapes to the functions above, that of this copy does not: stores
      // through data pointers cannot alias it.
      const Stages local(a);
      for (at += kTile; at < end; at += kTile) {
        local.begin_tile(*newest, at);
        LargestMagnitude largest;
        local.run_stages(*newest, *middle, *oldest, largest);
        local.store_scale(*newest, largest);
        TileState* const finished = oldest;
        oldest = middle;
        middle = newest;
        newest = finished;
      }
      run_stage3(*oldest);
      oldest = middle;
    }
    run_stage2(*oldest);
    run_stage3(*oldest);
  }
};

// Buffers of one full tile, large enough for every element type.
struct PaddedTile {
  alignas(64) unsigned char weight[kTile * 4];
  alignas(64) unsigned char master_state[kTile * 4];
  alignas(64) unsigned char moment[2][kTile * 4];
  alignas(64) unsigned char gradient[kTile * 4];
};

// Copies elements [at, at + count) to a zero-filled tile, calls `run_tile` on it, and copies the
// results back. [Note: tiles]
void run_partial_tile(const UpdateArguments& a, size_t at, size_t count,
                      void (*run_tile)(const UpdateArguments&)) {
  PaddedTile buffers;
  __builtin_memset(&buffers, 0, sizeof buffers);
  UpdateArguments tile = a;
  tile.first = a.first + at;
  struct Array {
    void* memory;
    void* buffer;
    size_t size;  // of an element
  };
  const size_t moment_size = a.format == kFp32Moment ? 4 : (a.format == kInt8Moment ? 1 : 2);
  const size_t master_state_size = a.layout == kFp16Weight ? 4 : 2;
  const Array arrays[4] = {{a.weight, buffers.weight, a.layout == kFp32Weight ? 4ul : 2ul},
                           {a.master_state, buffers.master_state, master_state_size},
                           {a.moment[0], buffers.moment[0], moment_size},
                           {a.moment[1], buffers.moment[1], moment_size}};
  for (const Array& array : arrays) {
    if (array.memory == nullptr) continue;
    __builtin_memcpy(array.buffer, static_cast<char*>(array.memory) + at * array.size,
                     count * array.size);
  }
  const size_t gradient_size = a.gradient_dtype == kFp32 ? 4 : 2;
  __builtin_memcpy(buffers.gradient, static_cast<const char*>(a.gradient) + at * gradient_size,
                   count * gradient_size);
  tile.weight = buffers.weight;
  tile.master_state = buffers.master_state;
  tile.gradient = buffers.gradient;
  for (int k = 0; k < 2; ++k) {
    tile.moment[k] = buffers.moment[k];
    if (a.scales[k] != nullptr) tile.scales[k] = a.scales[k] + at / kMomentBlock;
  }
  run_tile(tile);
  for (const Array& array : arrays) {
    if (array.memory == nullptr) continue;
    __builtin_memcpy(static_cast<char*>(array.memory) + at * array.size, array.buffer,
                     count * array.size);
  }
}

// Updates [begin, end): a partial tile up to the first tile boundary, full tiles, a partial tile.
template <class Update, class Weights, Format kFormat, bool kHalfGradient>
void update_range(const UpdateArguments& a, size_t begin, size_t end) {
  using S = Stages<Update, Weights, kFormat, kHalfGradient>;
  const auto partial_tile = [&](size_t at, size_t count) {
    run_partial_tile(a, at, count, [](const UpdateArguments& tile) { S(tile).run(0, kTile); });
  };
  const size_t offset = static_cast<size_t>((a.first + begin) % kTile);
  if (offset != 0) {
    const size_t remaining = kTile - offset;
    const size_t count = end - begin < remaining ? end - begin : remaining;
    partial_tile(begin, count);
    begin += count;
  }
  const size_t tail = (end - begin) % kTile;
  S(a).run(begin, end - tail);
  if (tail != 0) partial_tile(end - tail, tail);
}

// Dispatch from run-time arguments to the template instances: rule, layout, format, gradient.

template <class Update, class Weights, Format kFormat>
void update_gradient(const UpdateArguments& a, size_t begin, size_t end) {
  if (a.gradient_dtype == kFp32) {
    update_range<Update, Weights, kFormat, false>(a, begin, end);
  } else {
    update_range<Update, Weights, kFormat, true>(a, begin, end);
  }
}

template <class Update, class Weights>
void update_format(const UpdateArguments& a, size_t begin, size_t end) {
  if constexpr (Update::kNumMoments == 0) {
    update_gradient<Update, Weights, kFp32Moment>(a, begin, end);
  } else {
    switch (a.format) {
      case kFp32Moment:
        return update_gradient<Update, Weights, kFp32Moment>(a, begin, end);
      case kBf16Moment:
        return update_gradient<Update, Weights, kBf16Moment>(a, begin, end);
      case kBf16Stochastic:
        return update_gradient<Update, Weights, kBf16Stochastic>(a, begin, end);
      case kInt8Moment:
        return update_gradient<Update, Weights, kInt8Moment>(a, begin, end);
    }
  }
}

template <class Update>
void update_layout(const UpdateArguments& a, size_t begin, size_t end) {
  if (a.layout == kSplitWeight) {
    update_format<Update, SplitMaster>(a, begin, end);
  } else {
    update_format<Update, Fp32Master>(a, begin, end);
  }
}

template <class Update>
void update_rule(const UpdateArguments& a, size_t begin, size_t end) {
  if constexpr (requires { typename Update::Short; }) {
    if (!Update::is_general(a.scalars)) {
      return update_layout<typename Update::Short>(a, begin, end);
    }
  }
  update_layout<Update>(a, begin, end);
}

void update(const UpdateArguments& a, size_t begin, size_t end) {
  switch (a.rule) {
#define INFINITY_CASE(name) \
  case k##name:             \
    return update_rule<name>(a, begin, end);
    INFINITY_RULES(INFINITY_CASE)
#undef INFINITY_CASE
  }
}

}  // namespace
}  // namespace infinity
