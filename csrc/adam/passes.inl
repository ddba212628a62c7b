// The one-pass helpers beside the update: sums, conversions, square sums, split and join, 8-bit
// codes. Included by isa.cpp after kernel.inl.
//
// Square sum. The tree is part of the definition, so that a GPU can compute the same number:
//   1. blocks of 4096 elements, the last one may be short (missing elements count as zero);
//   2. in a block, lane j of 16 adds the fp64 squares of elements j, j+16, j+32, ... in that order
//      (the square of an fp32 value is exact in fp64, so fma changes nothing);
//   3. lanes fold by halves: lane j += lane j+8, then j+4, j+2, j+1;
//   4. blocks fold by neighbors: s[i] = s[2i] + s[2i+1], an odd last one moves up unchanged, until
//      one is left (dispatch.cpp, `fold_blocks`).

namespace infinity {
namespace {

struct Bf16 {
  u16 bits;
};
struct Fp16 {
  u16 bits;
};

inline float load(float value) { return value; }
inline float load(Bf16 value) { return from_bf16(value.bits); }
inline float load(Fp16 value) { return from_fp16(value.bits); }

inline void store(float& target, float value) { target = canonical(value); }
inline void store(Bf16& target, float value) { target.bits = to_bf16(value); }
inline void store(Fp16& target, float value) { target.bits = to_fp16(value); }

template <class Target, class Source>
void accumulate_range(const PairArguments& arguments, size_t begin, size_t end) {
  Target* __restrict target = static_cast<Target*>(arguments.target);
  const Source* __restrict source = static_cast<const Source*>(arguments.source);
  for (size_t i = begin; i < end; ++i) store(target[i], load(target[i]) + load(source[i]));
}

// Calls `pass` with an element of the type that `dtype` names.
template <class Pass>
INFINITY_INLINE void with_type(Dtype dtype, const Pass& pass) {
  switch (dtype) {
    case kBf16:
      return pass(Bf16{});
    case kFp32:
      return pass(float{});
    case kFp16:
      return pass(Fp16{});
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
  if constexpr (sizeof(Target) > sizeof(Source)) {  // exact: payloads of NaN survive
    for (size_t i = begin; i < end; ++i) target[i] = load(source[i]);
  } else {
    for (size_t i = begin; i < end; ++i) store(target[i], load(source[i]));
  }
}

// Between equal types it moves bytes, so that payloads of NaN survive a copy.
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

// --- moments as fp32 -----------------------------------------------------------------------------

INFINITY_INLINE size_t block_size(size_t at, size_t end) {
  return end - at < kMomentBlock ? end - at : kMomentBlock;
}

INFINITY_INLINE void encode_block(const float* values, u8* codes, float* scale, bool is_signed,
                                  size_t count) {
  u32 largest = 0;
  for (size_t i = 0; i < count; ++i) {
    largest = Lanes<u32>::greater(largest, bits_of(values[i]) & kMagnitude);
  }
  *scale = block_scale(largest);
  const float inverse = block_inverse(*scale);
  for (size_t i = 0; i < count; ++i) {
    const float value = *scale == *scale ? values[i] : 0.0f;
    // What is unsigned must not be -0 either.
    codes[i] = is_signed ? encode_signed(value, inverse)
                         : encode_unsigned(float_of(bits_of(value) & kMagnitude), inverse, kHalf);
  }
}

INFINITY_INLINE void decode_block(const u8* codes, float scale, bool is_signed, float* values,
                                  size_t count) {
  for (size_t i = 0; i < count; ++i) {
    values[i] =
        canonical(is_signed ? decode_signed(codes[i], scale) : decode_unsigned(codes[i], scale));
  }
}

// Rounds to nearest in every format: there is no step whose noise must average out.
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
