// The update, once, for every rule, layout, gradient type and moment format. isa.cpp includes this
// file and is compiled once per instruction set; the arithmetic of one element is in update.inl.
//
// Everything sits in an anonymous namespace and no inline library function is used: were the linker
// to merge one of these functions across files, a machine without AVX-512 might run AVX-512 code.
//
// [Note: three stages]
// From the loads of an element to its new weight there is a chain of a square root and two
// divisions with more before and after. The CPU's window of instructions under way holds only a few
// elements of such a loop, so it would wait for the chain and not for the divider or for memory.
// Therefore three short chains: the first stage makes moments and roots, the second divides, the
// third changes weights and stores codes. One loop does the first stage of a tile, the second stage
// of the tile before and the third stage of the one before that (or two loops do); no stage waits
// for another. What goes from stage to stage stays in the first-level cache. Memory sees one pass.
//
// [Note: tiles]
// Tiles begin at multiples of the tile size, counted from the start of the parameter: an 8-bit
// block is a tile, and the upper half of an index is constant in one. A tile that is not whole, at
// the start or end of a range, is copied into a whole one that is zero elsewhere, and back.

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

// --- gradients -----------------------------------------------------------------------------------

template <class G, bool kHalfGradient>
INFINITY_INLINE FloatsOf<G> gradient_at(const UpdateArguments& a, size_t i) {
  if constexpr (!kHalfGradient) {
    return G::load(static_cast<const float*>(a.gradient) + i);
  } else {
    const HalvesOf<G> halves = G::load16(static_cast<const u16*>(a.gradient) + i);
    if (a.gradient_dtype == kBf16) return as_floats<G>(G::interleave(HalvesOf<G>{}, halves));
    const UnitsOf<G> bits = G::interleave(halves, HalvesOf<G>{});
    return {{widen_fp16(bits.at[0]), widen_fp16(bits.at[1])}};
  }
}

// --- weights -------------------------------------------------------------------------------------

struct Whole {  // fp32, or an fp32 master with an fp16 weight beside it
  static constexpr bool kNarrow = false;
  float* master;
  u16* half;  // or null

  explicit Whole(const UpdateArguments& a)
      : master(static_cast<float*>(a.layout == kFp16Weight ? a.rest : a.weight)),
        half(static_cast<u16*>(a.layout == kFp16Weight ? a.weight : nullptr)) {}

  template <class G>
  INFINITY_INLINE FloatsOf<G> get(G, size_t i) const {
    return G::load(master + i);
  }
  template <class G>
  INFINITY_INLINE void put(G, size_t i, FloatsOf<G> value) const {
    G::store(master + i, value);
    if (half != nullptr) {
      G::store16(half + i, G::lowers({{fp16_bits(value.at[0]), fp16_bits(value.at[1])}}));
    }
  }
};

struct Split {  // bf16 and int16
  static constexpr bool kNarrow = true;
  u16* weight;
  u16* residual;

  explicit Split(const UpdateArguments& a)
      : weight(static_cast<u16*>(a.weight)), residual(static_cast<u16*>(a.rest)) {}

  template <class G>
  INFINITY_INLINE FloatsOf<G> get(G, size_t i) const {
    const HalvesOf<G> lower = G::load16(residual + i);
    const HalvesOf<G> upper = upper_of_split(G::load16(weight + i), lower);
    return as_floats<G>(G::interleave(lower, upper));
  }
  template <class G>
  INFINITY_INLINE void put(G, size_t i, FloatsOf<G> value) const {
    const UnitsOf<G> bits = as_units<G>(value);
    const HalvesOf<G> lower = G::lowers(bits);
    G::store16(weight + i, weight_of(G::uppers(bits), lower));
    G::store16(residual + i, lower);
  }
};

// --- what one tile hands from stage to stage -----------------------------------------------------

struct Handed {
  alignas(64) float over[kTile];  // after the second stage: the changes
  alignas(64) float under[kTile];
  alignas(64) float moments[2][kTile];  // 8 bits only
  size_t at;                            // the tile's first element
  RandomKey key;
  u32 index;         // of the tile's first element in its parameter, the low half
  float scale[2];    // 8 bits only: what the codes were stored with
  float inverse[2];  // and what they will be stored with
};

// The largest magnitudes of a tile so far.
struct Largest {
  WideU first = {};
  WideU second = {};

  template <int k>
  INFINITY_INLINE void see(WideF value) {
    WideU& wide = k == 0 ? first : second;
    wide = wide_greater(k == 0 ? bits_of(value) & kMagnitude : bits_of(value), wide);
  }
  static INFINITY_INLINE u32 across(WideU wide) {
    u32 found = 0;
    for (int i = 0; i < INFINITY_LANES; ++i) found = Lanes<u32>::greater(found, wide[i]);
    return found & kMagnitude;
  }
};

// --- the stages ----------------------------------------------------------------------------------

template <class Update, class Weights, Format kFormat, bool kHalfGradient>
struct Stages {
  static constexpr int kNumMoments = Update::kNumMoments;
  static constexpr bool kCodes = kFormat == kInt8Moment && kNumMoments > 0;
  static constexpr bool kUnsigned[2] = {Update::kUnsigned, true};
  // Whatever is narrow takes constants, and all three stages then more registers than there are.
  static constexpr bool kTwoLoops = kFormat != kFp32Moment || Weights::kNarrow;
  // Where most arrays are narrow, the fp32 ones pay for the order.
  using G = Wide<kFormat != kFp32Moment>;
  using Floats = FloatsOf<G>;
  using Units = UnitsOf<G>;
  using Halves = HalvesOf<G>;

  // Copies, on the stack of one function: a store to memory must not make them be read again.
  const UpdateArguments a;
  const Update update;
  const Weights weights;

  explicit Stages(const UpdateArguments& arguments)
      : a(arguments), update(Update::make(arguments.scalars)), weights(arguments) {}

  template <int k>
  INFINITY_INLINE Floats get_moment(size_t i, float scale) const {
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
  INFINITY_INLINE void put_moment(size_t i, Floats value, Units random) const {
    if constexpr (kFormat == kFp32Moment) {
      G::store(static_cast<float*>(a.moment[k]) + i,
               {{canonical(value.at[0]), canonical(value.at[1])}});
    } else {
      Units bits;
      for (int j = 0; j < 2; ++j) {
        if constexpr (kFormat == kBf16Stochastic) {
          const WideU own = k == 0 ? low_random(random.at[j]) : high_random(random.at[j]);
          bits.at[j] = bf16_stochastic_bits(value.at[j], own);
        } else {
          bits.at[j] = bf16_bits(value.at[j]);
        }
      }
      G::store16(static_cast<u16*>(a.moment[k]) + i, G::lowers(bits));
    }
  }

  template <int k>
  INFINITY_INLINE void keep_moment(Handed& handed, Largest& largest, size_t i, Floats value) const {
    G::keep(handed.moments[k] + i, value);
    largest.see<k>(value.at[0]);
    largest.see<k>(value.at[1]);
  }

  template <int k>
  INFINITY_INLINE void put_code(const Handed& handed, size_t i) const {
    const Floats value = G::load_kept(handed.moments[k] + i);
    const float inverse = handed.inverse[k];
    Units bits;
    if constexpr (kUnsigned[k]) {
      const Units index = G::counted(0, i);  // the key has the tile's own
      bits.at[0] = unsigned_bits(value.at[0], inverse, random_bits(handed.key, index.at[0]));
      bits.at[1] = unsigned_bits(value.at[1], inverse, random_bits(handed.key, index.at[1]));
    } else {
      bits.at[0] = signed_bits(value.at[0], inverse);
      bits.at[1] = signed_bits(value.at[1], inverse);
    }
    const Halves upper = G::uppers(bits);
    G::store8(static_cast<u8*>(a.moment[k]) + handed.at + i,
              kUnsigned[k] ? unsigned_code(upper) : signed_code(upper));
  }

  // Moments and fractions.
  INFINITY_INLINE void first(Handed& handed, Largest& largest, size_t i) const {
    const size_t here = handed.at + i;
    Floats m = {};
    Floats v = {};
    if constexpr (kNumMoments > 0) m = get_moment<0>(here, handed.scale[0]);
    if constexpr (kNumMoments > 1) v = get_moment<1>(here, handed.scale[1]);
    Floats p = {};
    if constexpr (Update::kReadsWeight) p = weights.get(G{}, here);
    const Floats gradient = gradient_at<G, kHalfGradient>(a, here);
    const auto one = update.begin(p.at[0], gradient.at[0], m.at[0], v.at[0]);
    const auto two = update.begin(p.at[1], gradient.at[1], m.at[1], v.at[1]);
    G::keep(handed.over + i, {{one.over, two.over}});
    if constexpr (Update::kDivides) G::keep(handed.under + i, {{one.under, two.under}});
    if constexpr (kCodes) {
      keep_moment<0>(handed, largest, i, m);
      if constexpr (kNumMoments > 1) keep_moment<1>(handed, largest, i, v);
    } else {
      Units random = {};
      if constexpr (kFormat == kBf16Stochastic) {
        random = G::counted(handed.index, i);
        random = {{random_bits(handed.key, random.at[0]), random_bits(handed.key, random.at[1])}};
      }
      if constexpr (kNumMoments > 0) put_moment<0>(here, m, random);
      if constexpr (kNumMoments > 1) put_moment<1>(here, v, random);
    }
  }

  // Changes.
  INFINITY_INLINE void second(Handed& handed, size_t i) const {
    if constexpr (Update::kDivides) {
      const Floats over = G::load_kept(handed.over + i);
      const Floats under = G::load_kept(handed.under + i);
      const WideF one = update.change(Fraction<WideF>{over.at[0], under.at[0]});
      const WideF two = update.change(Fraction<WideF>{over.at[1], under.at[1]});
      G::keep(handed.over + i, {{one, two}});
    }
  }

  // Weights, and codes of moments.
  INFINITY_INLINE void third(const Handed& handed, size_t i) const {
    const size_t here = handed.at + i;
    const Floats change = G::load_kept(handed.over + i);
    const Floats p = weights.get(G{}, here);
    const WideF one = canonical(update.apply(p.at[0], change.at[0]));
    const WideF two = canonical(update.apply(p.at[1], change.at[1]));
    weights.put(G{}, here, {{one, two}});
    if constexpr (kCodes) {
      put_code<0>(handed, i);
      if constexpr (kNumMoments > 1) put_code<1>(handed, i);
    }
  }

  INFINITY_INLINE void open(Handed& handed, size_t at) const {
    handed.at = at;
    const u64 index = a.first + at;
    handed.key = random_key(a.key, static_cast<u32>(index >> 32));
    handed.index = static_cast<u32>(index);
    if constexpr (kCodes) {
      // A tile begins at a multiple of its size: what is added to the index may be exclusive-ored.
      handed.key.first ^= handed.index;
      for (int k = 0; k < kNumMoments; ++k) handed.scale[k] = a.scales[k][at / kMomentBlock];
    }
  }

  template <int k>
  INFINITY_INLINE void close(Handed& handed, WideU largest) const {
    const float scale = block_scale(Largest::across(largest));
    a.scales[k][handed.at / kMomentBlock] = scale;
    handed.inverse[k] = block_inverse(scale);
    if (scale != scale) {
      for (float& moment : handed.moments[k]) moment = 0.0f;
    }
  }

  INFINITY_INLINE void close(Handed& handed, const Largest& largest) const {
    if constexpr (kCodes) {
      close<0>(handed, largest.first);
      if constexpr (kNumMoments > 1) close<1>(handed, largest.second);
    }
  }

  // --- loops over whole tiles --------------------------------------------------------------------

  INFINITY_INLINE void stages(Handed& handed, Handed& before, const Handed& oldest,
                              Largest& largest) const {
    if constexpr (kTwoLoops) {
      for (size_t i = 0; i < kTile; i += G::kWidth) first(handed, largest, i);
      for (size_t i = 0; i < kTile; i += G::kWidth) {
        second(before, i);
        third(oldest, i);
      }
    } else {
      for (size_t i = 0; i < kTile; i += G::kWidth) {
        first(handed, largest, i);
        second(before, i);
        third(oldest, i);
      }
    }
  }

  __attribute__((noinline)) void first_alone(Handed& handed, size_t at) const {
    open(handed, at);
    Largest largest;
    for (size_t i = 0; i < kTile; i += G::kWidth) first(handed, largest, i);
    close(handed, largest);
  }
  __attribute__((noinline)) void second_alone(Handed& handed) const {
    for (size_t i = 0; i < kTile; i += G::kWidth) second(handed, i);
  }
  __attribute__((noinline)) void third_alone(const Handed& handed) const {
    for (size_t i = 0; i < kTile; i += G::kWidth) third(handed, i);
  }

  // [begin, end) is whole tiles.
  void run(size_t begin, size_t end) const {
    if (begin == end) return;
    Handed tiles[3];
    Handed* oldest = &tiles[0];
    first_alone(*oldest, begin);
    size_t at = begin + kTile;
    if (at < end) {
      Handed* before = &tiles[1];
      Handed* handed = &tiles[2];
      first_alone(*before, at);
      second_alone(*oldest);
      const Stages here(a);  // nobody has its address: a store cannot make it be read again
      for (at += kTile; at < end; at += kTile) {
        here.open(*handed, at);
        Largest largest;
        here.stages(*handed, *before, *oldest, largest);
        here.close(*handed, largest);
        Handed* const done = oldest;
        oldest = before;
        before = handed;
        handed = done;
      }
      third_alone(*oldest);
      oldest = before;
    }
    second_alone(*oldest);
    third_alone(*oldest);
  }
};

// --- tiles that are not whole --------------------------------------------------------------------

// Room for one tile of everything; what a short tile lacks is zero.
struct Spare {
  alignas(64) unsigned char weight[kTile * 4];
  alignas(64) unsigned char rest[kTile * 4];
  alignas(64) unsigned char moment[2][kTile * 4];
  alignas(64) unsigned char gradient[kTile * 4];
};

void run_short_tile(const UpdateArguments& a, size_t at, size_t count,
                    void (*run_tile)(const UpdateArguments&)) {
  Spare spare;
  __builtin_memset(&spare, 0, sizeof spare);
  UpdateArguments moved = a;
  moved.first = a.first + at;
  struct Part {
    void* from;
    void* room;
    size_t size;
  };
  const size_t moment_size = a.format == kFp32Moment ? 4 : (a.format == kInt8Moment ? 1 : 2);
  const size_t rest_size = a.layout == kFp16Weight ? 4 : 2;
  const Part parts[4] = {{a.weight, spare.weight, a.layout == kFp32Weight ? 4ul : 2ul},
                         {a.rest, spare.rest, rest_size},
                         {a.moment[0], spare.moment[0], moment_size},
                         {a.moment[1], spare.moment[1], moment_size}};
  for (const Part& part : parts) {
    if (part.from == nullptr) continue;
    __builtin_memcpy(part.room, static_cast<char*>(part.from) + at * part.size, count * part.size);
  }
  const size_t gradient_size = a.gradient_dtype == kFp32 ? 4 : 2;
  __builtin_memcpy(spare.gradient, static_cast<const char*>(a.gradient) + at * gradient_size,
                   count * gradient_size);
  moved.weight = spare.weight;
  moved.rest = spare.rest;
  moved.gradient = spare.gradient;
  for (int k = 0; k < 2; ++k) {
    moved.moment[k] = spare.moment[k];
    if (a.scales[k] != nullptr) moved.scales[k] = a.scales[k] + at / kMomentBlock;
  }
  run_tile(moved);
  for (const Part& part : parts) {
    if (part.from == nullptr) continue;
    __builtin_memcpy(static_cast<char*>(part.from) + at * part.size, part.room, count * part.size);
  }
}

template <class Update, class Weights, Format kFormat, bool kHalfGradient>
void update_range(const UpdateArguments& a, size_t begin, size_t end) {
  using S = Stages<Update, Weights, kFormat, kHalfGradient>;
  const auto short_tile = [&](size_t at, size_t count) {
    run_short_tile(a, at, count, [](const UpdateArguments& tile) { S(tile).run(0, kTile); });
  };
  const size_t into = static_cast<size_t>((a.first + begin) % kTile);
  if (into != 0) {
    const size_t left = kTile - into;
    const size_t count = end - begin < left ? end - begin : left;
    short_tile(begin, count);
    begin += count;
  }
  const size_t rest = (end - begin) % kTile;
  S(a).run(begin, end - rest);
  if (rest != 0) short_tile(end - rest, rest);
}

// --- the choice of a loop ------------------------------------------------------------------------

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
    update_format<Update, Split>(a, begin, end);
  } else {
    update_format<Update, Whole>(a, begin, end);
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
