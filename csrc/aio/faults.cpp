#include "faults.h"

#include <charconv>
#include <cmath>
#include <iterator>
#include <stdexcept>
#include <string_view>
#include <vector>

namespace infinity::aio {
namespace {

struct Kind {
  const char* name;
  Fault fault;
};
constexpr Kind kKinds[] = {
    {"eio", Fault::eio},     {"enospc", Fault::enospc},   {"short", Fault::partial},
    {"delay", Fault::delay}, {"reorder", Fault::reorder}, {"flip", Fault::flip},
    {"stuck", Fault::stuck},
};

[[noreturn]] void throw_invalid(const std::string& why) {
  throw std::invalid_argument(
      "faults: " + why +
      "; the format is seed=1,kinds=eio+enospc+short+delay+reorder+flip+stuck,rate=0.01");
}

template <typename Number>
Number parse_number(std::string_view text, const char* what) {
  Number number{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc{} || end != text.data() + text.size()) {
    throw_invalid(std::string(what) + " is not a number: '" + std::string(text) + "'");
  }
  return number;
}

std::vector<std::string_view> split(std::string_view text, char separator) {
  std::vector<std::string_view> fields;
  while (true) {
    const size_t end = text.find(separator);
    fields.push_back(text.substr(0, end));
    if (end == std::string_view::npos) return fields;
    text.remove_prefix(end + 1);
  }
}

uint32_t parse_kinds(std::string_view text) {
  uint32_t kinds = 0;
  for (const std::string_view name : split(text, '+')) {
    uint32_t bit = 0;
    for (const Kind& kind : kKinds) {
      if (name == kind.name) bit = static_cast<uint32_t>(kind.fault);
    }
    if (bit == 0) throw_invalid("unknown kind '" + std::string(name) + "'");
    kinds |= bit;
  }
  return kinds;
}

// Output function of SplitMix64: each input bit affects all output bits.
uint64_t splitmix64(uint64_t x) {
  x += 0x9E3779B97F4A7C15;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
  return x ^ (x >> 31);
}

}  // namespace

Faults Faults::parse(const std::string& text) {
  Faults faults;
  if (text.empty()) return faults;
  faults.rate = 0.01;
  for (const Kind& kind : kKinds) faults.kinds |= static_cast<uint32_t>(kind.fault);
  for (const std::string_view field : split(text, ',')) {
    const size_t equals = field.find('=');
    const std::string_view name = field.substr(0, equals);
    const std::string_view value =
        equals == std::string_view::npos ? std::string_view{} : field.substr(equals + 1);
    if (name == "seed") {
      faults.seed = parse_number<uint64_t>(value, "seed");
      faults.enabled = true;
    } else if (name == "kinds") {
      faults.kinds = parse_kinds(value);
    } else if (name == "rate") {
      faults.rate = parse_number<double>(value, "rate");
      if (!(faults.rate >= 0 && faults.rate <= 1)) throw_invalid("rate must be between 0 and 1");
    } else {
      throw_invalid("unknown setting '" + std::string(name) + "'");
    }
  }
  if (!faults.enabled) throw_invalid("the seed is missing");
  return faults;
}

uint64_t Faults::random_below(const Block& block, uint64_t salt, uint64_t bound) const {
  return splitmix64(splitmix64(splitmix64(seed) ^ block.serial) ^ (uint64_t{block.attempts} << 32) ^
                    salt) %
         bound;
}

Fault Faults::choose(const Block& block) const {
  constexpr uint64_t kScale = uint64_t{1} << 40;
  if (!enabled || random_below(block, 1, kScale) >= static_cast<uint64_t>(std::ldexp(rate, 40))) {
    return Fault::none;
  }
  Fault possible[std::size(kKinds)];
  size_t num_possible = 0;
  for (const Kind& kind : kKinds) {
    if (!has(kind.fault)) continue;
    if (kind.fault == Fault::enospc && block.op != Op::write) continue;
    if (kind.fault == Fault::flip && block.op != Op::read) continue;
    possible[num_possible++] = kind.fault;
  }
  return num_possible == 0 ? Fault::none : possible[random_below(block, 2, num_possible)];
}

}  // namespace infinity::aio
