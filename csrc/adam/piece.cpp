#include "piece.h"

#include <algorithm>
#include <iterator>
#include <stdexcept>
#include <string>

#include "update.inl"

namespace infinity {
namespace {

struct RuleInfo {
  const char* name;
  std::size_t num_moments;
  std::size_t num_scalars;
};
#define INFINITY_RULE_INFO(rule) {#rule, rule::kNumMoments, rule::kNumScalars},
constexpr RuleInfo kRuleInfos[] = {INFINITY_RULES(INFINITY_RULE_INFO)};  // indexed by RuleCode
constexpr int kNumRules = static_cast<int>(std::size(kRuleInfos));
static_assert(std::all_of(std::begin(kRuleInfos), std::end(kRuleInfos),
                          [](const RuleInfo& info) { return info.num_scalars <= kMaxScalars; }));

int checked_code(const char* name, int code, int end) {
  if (code >= 0 && code < end) return code;
  throw std::invalid_argument("unknown " + std::string(name) + " code " + std::to_string(code));
}

std::size_t weight_size(Layout layout) { return layout == kFp32Weight ? 4 : 2; }

std::size_t master_state_size(Layout layout) {
  return layout == kFp32Weight ? 0 : (layout == kSplitWeight ? 2 : 4);
}

}  // namespace

std::vector<std::string> rule_names() {
  std::vector<std::string> names;
  for (const RuleInfo& info : kRuleInfos) names.emplace_back(info.name);
  return names;
}

std::size_t size_of(Dtype dtype) { return dtype == kFp32 ? 4 : 2; }

std::size_t moment_size(Format format) {
  return format == kFp32Moment ? 4 : (format == kInt8Moment ? 1 : 2);
}

Dtype checked_dtype(int code) { return static_cast<Dtype>(checked_code("dtype", code, kFp16 + 1)); }

Format checked_format(int code) {
  return static_cast<Format>(checked_code("format", code, kInt8Moment + 1));
}

void* checked_address(const char* name, Address address, std::size_t n, std::size_t alignment) {
  if (address == 0 && n != 0) throw std::invalid_argument(std::string(name) + " is null");
  if (address % alignment != 0) {
    throw std::invalid_argument(std::string(name) + " is not aligned to its element size, " +
                                std::to_string(alignment) + " bytes");
  }
  return reinterpret_cast<void*>(address);
}

Piece::Piece(std::size_t n, int rule, int layout, int format, int gradient_dtype, std::uint64_t key,
             std::uint64_t first, Address weight, Address master_state, Address moment1,
             Address scales1, Address moment2, Address scales2, Address gradient,
             const std::vector<double>& scalars) {
  UpdateArguments& a = arguments_;
  a.rule = checked_code("rule", rule, kNumRules);
  a.layout = static_cast<Layout>(checked_code("layout", layout, kFp16Weight + 1));
  a.format = checked_format(format);
  a.gradient_dtype = checked_dtype(gradient_dtype);
  a.n = n;
  a.key = key;
  // Without random bits and blocks the result does not depend on `first`; 0 aligns the tiles with
  // the piece.
  a.first = a.format == kBf16Stochastic || a.format == kInt8Moment ? first : 0;
  const RuleInfo info = kRuleInfos[a.rule];
  const bool has_blocks = a.format == kInt8Moment && info.num_moments > 0;
  if (has_blocks && first % kMomentBlock != 0) {
    throw std::invalid_argument("a piece with 8-bit moments begins at element " +
                                std::to_string(first) + ", which is not a multiple of " +
                                std::to_string(kMomentBlock));
  }
  if (scalars.size() != info.num_scalars) {
    throw std::invalid_argument("the rule takes " + std::to_string(info.num_scalars) +
                                " scalars, not " + std::to_string(scalars.size()));
  }
  for (std::size_t i = 0; i < scalars.size(); ++i) a.scalars[i] = static_cast<float>(scalars[i]);
  a.weight = checked_address("weight", weight, n, weight_size(a.layout));
  const std::size_t size = master_state_size(a.layout);
  a.master_state = size == 0 ? nullptr : checked_address("master_state", master_state, n, size);
  a.gradient = checked_address("gradient", gradient, n, size_of(a.gradient_dtype));
  const Address moments[2] = {moment1, moment2};
  const Address scales[2] = {scales1, scales2};
  for (std::size_t k = 0; k < info.num_moments; ++k) {
    const std::string name = "moment " + std::to_string(k + 1);
    a.moment[k] = checked_address(name.c_str(), moments[k], n, moment_size(a.format));
    if (!has_blocks) continue;
    const std::string scales_name = "scales of " + name;
    a.scales[k] = static_cast<float*>(checked_address(scales_name.c_str(), scales[k], n, 4));
  }
  check_apart(ranges());
}

std::vector<Range> Piece::ranges() const {
  const UpdateArguments& a = arguments_;
  std::vector<Range> ranges;
  ranges.reserve(7);
  const auto add = [&](const char* name, const void* pointer, std::size_t nbytes, bool is_written) {
    const auto begin = reinterpret_cast<Address>(pointer);
    if (begin != 0 && nbytes != 0) ranges.push_back({name, begin, begin + nbytes, is_written});
  };
  const std::size_t moment_bytes = a.n * moment_size(a.format);
  const std::size_t scale_bytes = (a.n + kMomentBlock - 1) / kMomentBlock * sizeof(float);
  add("weight", a.weight, a.n * weight_size(a.layout), true);
  add("master_state", a.master_state, a.n * master_state_size(a.layout), true);
  add("moment 1", a.moment[0], moment_bytes, true);
  add("moment 2", a.moment[1], moment_bytes, true);
  add("scales of moment 1", a.scales[0], scale_bytes, true);
  add("scales of moment 2", a.scales[1], scale_bytes, true);
  add("gradient", a.gradient, a.n * size_of(a.gradient_dtype), false);
  return ranges;
}

void check_apart(std::vector<Range> ranges) {
  std::sort(ranges.begin(), ranges.end(),
            [](const Range& one, const Range& other) { return one.begin < other.begin; });
  // Sweep in order of begin. A range overlaps an earlier one if it begins before the largest end so
  // far: of all ranges if it is written, otherwise of the written ones.
  const Range* furthest = nullptr;
  const Range* furthest_written = nullptr;
  for (const Range& range : ranges) {
    const Range* other = range.is_written ? furthest : furthest_written;
    if (other != nullptr && range.begin < other->end) {
      throw std::invalid_argument(std::string(other->name) + " and " + range.name +
                                  " overlap in memory");
    }
    if (furthest == nullptr || range.end > furthest->end) furthest = &range;
    if (range.is_written && (furthest_written == nullptr || range.end > furthest_written->end)) {
      furthest_written = &range;
    }
  }
}

}  // namespace infinity
