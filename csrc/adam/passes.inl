// Kernels other than the update: accumulation, conversion, square sums, splitting and joining of
// masters, encoding and decoding of moments. Included by isa.cpp after kernel.inl.
//
// [Note: square sum]
// The order of additions is part of the definition, so that the CUDA kernels (squares.cuh) compute
// the same number:
//   1. The elements are divided into blocks of 4096; a short last block is padded with zeros.
//   2. In a block, lane j of 16 adds the fp64 squares of elements j, j+16, j+32, ... in that order.
//      The square of an fp32 value is exact in fp64, so a fused multiply-add gives the same bits.
//   3. Lanes are reduced by halves: lane j += lane j+8, then j+4, j+2, j+1.
//   4. Block sums are reduced pairwise, s[i] = s[2i] + s[2i+1], until one is left; an odd last one
//      is carried over unchanged (`fold_blocks` in dispatch.cpp).

namespace infinity {
namespace {

struct Bf16 {
  u16 bits;
};
struct Fp16 {
  u16 bits;
};

// Conversion of the element types to and from fp32. Stores round to nearest even, and write
// canonical NaNs.
inline float load(float value) { return value; }
inline float load(Bf16 value) { return from_bf16(value.bits); }
inline float load(Fp16 value) { return from_fp16(value.bits); }

inline void store(float& target, float value) { target = canonical(value); }
inline void store(Bf16& target, float value) { target.bits = to_bf16(value); }
inline void store(Fp16& target, float value) { target.bits = to_fp16(value); }

// target += source, added in fp32.
template <class Target, class Source>
void accumulate_range(const PairArguments& arguments, size_t begin, size_t end) {
  Target* __restrict target = static_cast<Target*>(arguments.target);
  const Source* __restrict source = static_cast<const Source*>(arguments.source);
  for (size_t i = begin; i < end; ++i) store(target[i], load(target[i]) + load(source[i]));
}

// Calls `function` with a value of the element type of `dtype`.
template <class Function>
INFINITY_INLINE void with_type(Dtype dtype, const Function& function) {
  switch (dtype) {
    case kBf16:
      return function(Bf16{});
    case kFp32:
      return function(float{});
    case kFp16:
      return function(Fp16{});
  }
}

void accumulate(const PairArguments& arguments, size_t begin, size_t end) {
  with_type(arguments.target_dtype, [&](auto target) {
    with_type(arguments.source_dtype, [&](auto source) {
      accumulate_range<decltype(target), decltype(source)>(arguments, begin, end);
    });
  });
}

template <class Target, class Source>
void convert_range(const PairArguments& arguments, size_t begin, size_t end) {
  Target* __restrict target = static_cast<Target*>(arguments.target);
  const Source* __restrict source = static_cast<const Source*>(arguments.source);
  if constexpr (sizeof(Target) > sizeof(Source)) {  // exact, and preserves NaN payloads
    for (size_t i = begin; i < end; ++i) target[i] = load(source[i]);
  } else {
    for (size_t i = begin; i < end; ++i) store(target[i], load(source[i]));
  }
}

// Equal types are copied as bytes, which preserves NaN payloads.
void convert(const PairArguments& arguments, size_t begin, size_t end) {
  with_type(arguments.target_dtype, [&](auto target) {
    with_type(arguments.source_dtype, [&](auto source) {
      constexpr size_t kSize = sizeof target;
      if (arguments.target_dtype == arguments.source_dtype) {
        __builtin_memcpy(static_cast<char*>(arguments.target) + begin * kSize,
                         static_cast<const char*>(arguments.source) + begin * kSize,
                         (end - begin) * kSize);
      } else {
        convert_range<decltype(target), decltype(source)>(arguments, begin, end);
      }
    });
  });
}

// Steps 2 and 3 of the square sum, for one block of `count` elements.
template <class Source>
double square_block(const Source* __restrict source, size_t count) {
  constexpr size_t kLanes = 16;
  double lane[kLanes] = {};
  const size_t full = count - count % kLanes;
  for (size_t i = 0; i < full; i += kLanes) {
    for (size_t j = 0; j < kLanes; ++j) {
      const double value = static_cast<double>(load(source[i + j]));
      lane[j] = lane[j] + value * value;
    }
  }
  for (size_t j = 0; j < count - full; ++j) {
    const double value = static_cast<double>(load(source[full + j]));
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
    const size_t remaining = arguments.n - first;
    arguments.sums[block] =
        square_block(source + first, remaining < kSquareBlock ? remaining : kSquareBlock);
  }
}

void square_blocks(const SquareArguments& arguments, size_t begin, size_t end) {
  with_type(arguments.source_dtype,
            [&](auto source) { square_range<decltype(source)>(arguments, begin, end); });
}

void split(const SplitArguments& arguments, size_t begin, size_t end) {
  const float* __restrict master = arguments.master;
  u16* __restrict weight = arguments.weight;
  i16* __restrict residual = arguments.residual;
  for (size_t i = begin; i < end; ++i) split_master(master[i], weight[i], residual[i]);
}

void join(const SplitArguments& arguments, size_t begin, size_t end) {
  float* __restrict master = arguments.master;
  const u16* __restrict weight = arguments.weight;
  const i16* __restrict residual = arguments.residual;
  for (size_t i = begin; i < end; ++i) {
    master[i] = canonical(join_master(weight[i], residual[i]));
  }
}

// Number of elements of the moment block at `at`, which ends at `end` at the latest.
INFINITY_INLINE size_t block_size(size_t at, size_t end) {
  return end - at < kMomentBlock ? end - at : kMomentBlock;
}

INFINITY_INLINE void encode_block(const float* values, u8* codes, float* scale, bool is_signed,
                                  size_t count) {
  u32 largest = 0;
  for (size_t i = 0; i < count; ++i) {
    largest = Lanes<u32>::max(largest, bits_of(values[i]) & kMagnitude);
  }
  *scale = block_scale(largest);
  const float inverse = block_inverse(*scale);
  for (size_t i = 0; i < count; ++i) {
    const float value = *scale == *scale ? values[i] : 0.0f;
    // `encode_unsigned` requires values >= +0: clear the sign, which -0 may have.
    codes[i] = is_signed ? encode_signed(value, inverse)
                         : encode_unsigned(float_of(bits_of(value) & kMagnitude), inverse,
                                           kRoundToNearest);
  }
}

INFINITY_INLINE void decode_block(const u8* codes, float scale, bool is_signed, float* values,
                                  size_t count) {
  for (size_t i = 0; i < count; ++i) {
    values[i] =
        canonical(is_signed ? decode_signed(codes[i], scale) : decode_unsigned(codes[i], scale));
  }
}

// Rounds to nearest in all formats, also in those that the update rounds stochastically: a single
// conversion accumulates no bias.
void encode(const CodeArguments& arguments, size_t begin, size_t end) {
  const float* values = arguments.values;
  if (arguments.format == kFp32Moment) {
    convert_range<float, float>({arguments.moment, values, kFp32, kFp32}, begin, end);
  } else if (arguments.format != kInt8Moment) {
    convert_range<Bf16, float>({arguments.moment, values, kBf16, kFp32}, begin, end);
  } else {
    for (size_t at = begin; at < end; at += kMomentBlock) {
      encode_block(values + at, static_cast<u8*>(arguments.moment) + at,
                   arguments.scales + at / kMomentBlock, arguments.is_signed, block_size(at, end));
    }
  }
}

void decode(const CodeArguments& arguments, size_t begin, size_t end) {
  float* values = arguments.values;
  if (arguments.format == kFp32Moment) {
    convert_range<float, float>({values, arguments.moment, kFp32, kFp32}, begin, end);
  } else if (arguments.format != kInt8Moment) {
    convert_range<float, Bf16>({values, arguments.moment, kFp32, kBf16}, begin, end);
  } else {
    for (size_t at = begin; at < end; at += kMomentBlock) {
      decode_block(static_cast<const u8*>(arguments.moment) + at,
                   arguments.scales[at / kMomentBlock], arguments.is_signed, values + at,
                   block_size(at, end));
    }
  }
}

}  // namespace
}  // namespace infinity
