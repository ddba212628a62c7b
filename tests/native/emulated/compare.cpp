// Compares the update of the baseline kernels with that of the emulated AVX-512 kernels, bit for
// bit, on random input: every rule, layout, moment format and gradient type, several sizes. Prints
// the cases that differ; the exit code is 1 if there are any.
#include <cstdio>
#include <cstring>
#include <iterator>
#include <random>
#include <vector>

#include "kernels.h"
#include "update.inl"

namespace infinity {
extern const Kernels kEmulatedKernels;
}

namespace {

using namespace infinity;

struct State {
  std::vector<unsigned char> weight, master_state, moment[2];
  std::vector<float> scales[2];

  bool operator==(const State& other) const {
    const auto same = [](const std::vector<float>& a, const std::vector<float>& b) {
      return a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
    };
    return weight == other.weight && master_state == other.master_state &&
           moment[0] == other.moment[0] && moment[1] == other.moment[1] &&
           same(scales[0], other.scales[0]) && same(scales[1], other.scales[1]);
  }
};

std::mt19937_64 random_source(7);

// Normally distributed; is_wild: one in eight has random bits, NaN and infinity included.
float random_float(bool is_wild) {
  static std::normal_distribution<float> normal;
  if (is_wild && random_source() % 8 == 0) {
    const auto bits = static_cast<std::uint32_t>(random_source());
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
  }
  return normal(random_source) * 1e-2f;
}

// Resizes `bytes` to n elements of `size` bytes (4: fp32, 2: upper half of fp32, 1: random codes).
void fill(std::vector<unsigned char>& bytes, std::size_t n, std::size_t size, bool is_wild,
          bool is_positive) {
  bytes.resize(n * size);
  for (std::size_t i = 0; i < n; ++i) {
    float value = random_float(is_wild);
    if (is_positive) value = value < 0 ? -value : value;
    std::uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    if (size == 2) bits >>= 16;
    if (size == 1) bits = static_cast<std::uint32_t>(random_source() & 0xff);
    std::memcpy(bytes.data() + i * size, &bits, size);
  }
}

void run(const Kernels& kernels, UpdateArguments a, State& state) {
  a.weight = state.weight.data();
  a.master_state = state.master_state.empty() ? nullptr : state.master_state.data();
  for (int k = 0; k < 2; ++k) {
    a.moment[k] = state.moment[k].empty() ? nullptr : state.moment[k].data();
    a.scales[k] = state.scales[k].empty() ? nullptr : state.scales[k].data();
  }
  kernels.update(a, 0, a.n);
}

struct RuleTraits {
  int num_moments;
  bool is_unsigned;
};
#define INFINITY_RULE_TRAITS(rule) {rule::kNumMoments, rule::kUnsigned},
constexpr RuleTraits kRuleTraits[] = {INFINITY_RULES(INFINITY_RULE_TRAITS)};
constexpr int kNumRules = static_cast<int>(std::size(kRuleTraits));

// Valid for every rule. If the third one (L2) is 0, Adam uses its `Short` form.
constexpr float kScalars[kMaxScalars] = {0.5f, 0.1f, 0.3f, 0.1f, 0.9f, 0.1f, 1e-2f, 0.3f, 1e-8f};

}  // namespace

int main() {
  int tried = 0;
  int different = 0;
  for (int code = 0; code < kNumRules * 3 * 4 * 3 * 4 * 2; ++code) {
    int remaining = code;  // mixed-radix number, one digit per parameter
    const auto take = [&remaining](int count) {
      const int digit = remaining % count;
      remaining /= count;
      return digit;
    };
    UpdateArguments a{};
    a.rule = take(kNumRules);
    a.layout = static_cast<Layout>(take(3));
    a.format = static_cast<Format>(take(4));
    a.gradient_dtype = static_cast<Dtype>(take(3));
    a.n =
        std::vector<std::size_t>{128, 1, 3 * 128 + 77, 5 * 128}[static_cast<std::size_t>(take(4))];
    const bool is_wild = take(2) == 1;
    // Other formats begin at a tile boundary.
    const bool is_unaligned = a.format == kBf16Stochastic;
    a.key = random_source();
    a.first = (std::uint64_t{1} << 32) - 256 + (is_unaligned ? 31 : 0);
    std::memcpy(a.scalars, kScalars, sizeof a.scalars);
    if (!is_wild) a.scalars[2] = 0.0f;
    State before;
    fill(before.weight, a.n, a.layout == kFp32Weight ? 4 : 2, is_wild, false);
    if (a.layout != kFp32Weight) {
      fill(before.master_state, a.n, a.layout == kSplitWeight ? 2 : 4, is_wild, false);
    }
    for (int k = 0; k < kRuleTraits[a.rule].num_moments; ++k) {
      const std::size_t size = a.format == kFp32Moment ? 4 : (a.format == kInt8Moment ? 1 : 2);
      fill(before.moment[k], a.n, size, is_wild, k == 1 || kRuleTraits[a.rule].is_unsigned);
      for (std::size_t i = 0; a.format == kInt8Moment && i < (a.n + 127) / 128; ++i) {
        const float scale = random_float(false);
        before.scales[k].push_back(scale < 0 ? -scale : scale);
      }
    }
    std::vector<unsigned char> gradient;
    fill(gradient, a.n, a.gradient_dtype == kFp32 ? 4 : 2, is_wild, false);
    a.gradient = gradient.data();
    State one = before;
    State other = before;
    run(kBaselineKernels, a, one);
    run(kEmulatedKernels, a, other);
    ++tried;
    if (!(one == other)) {
      ++different;
      std::printf("rule %d layout %d format %d gradient %d n %zu wild %d differ\n", a.rule,
                  a.layout, a.format, a.gradient_dtype, a.n, is_wild);
    }
    if (one == before && a.n > 1) {  // a single element may be NaN before and after
      ++different;
      std::printf("nothing changed in case %d\n", code);
    }
  }
  std::printf("%d cases, %d different\n", tried, different);
  return different == 0 ? 0 : 1;
}
