#include "dispatch.h"

#include <cstdint>
#include <cstring>
#include <limits>
#include <stdexcept>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace infinity {

std::vector<const Kernels*> available_kernels() {
  std::vector<const Kernels*> kernels{&kBaselineKernels};
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (avx2) kernels.push_back(&kAvx2Kernels);
  if (avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    kernels.push_back(&kAvx512Kernels);
  }
#endif
  return kernels;
}

const Kernels* find_kernels(const std::string& isa) {
  const auto kernels = available_kernels();
  if (isa == "auto") return kernels.back();
  std::string names = "auto";
  for (const Kernels* candidate : kernels) {
    if (isa == candidate->name) return candidate;
    names += std::string(", ") + candidate->name;
  }
  throw std::invalid_argument("isa '" + isa + "' is not available here; use one of: " + names);
}

double fold_blocks(std::vector<double>& sums) {
  if (sums.empty()) return 0.0;
  for (std::size_t count = sums.size(); count > 1; count = (count + 1) / 2) {
    for (std::size_t i = 0; i < count / 2; ++i) sums[i] = sums[2 * i] + sums[2 * i + 1];
    if (count % 2 == 1) sums[count / 2] = sums[count - 1];
  }
  const bool is_nan = sums[0] != sums[0];
  return is_nan ? std::numeric_limits<double>::quiet_NaN() : sums[0];
}

#if defined(__x86_64__)

void stream_copy(void* target, const void* source, std::size_t nbytes) {
  constexpr std::size_t kLine = 64;
  auto* to = static_cast<char*>(target);
  const auto* from = static_cast<const char*>(source);
  std::size_t head = (kLine - reinterpret_cast<std::uintptr_t>(to) % kLine) % kLine;
  if (head > nbytes) head = nbytes;
  std::memcpy(to, from, head);
  std::size_t i = head;
  for (; i + kLine <= nbytes; i += kLine) {
    const auto* wide = reinterpret_cast<const __m128i*>(from + i);
    auto* line = reinterpret_cast<__m128i*>(to + i);
    const __m128i a = _mm_loadu_si128(wide);
    const __m128i b = _mm_loadu_si128(wide + 1);
    const __m128i c = _mm_loadu_si128(wide + 2);
    const __m128i d = _mm_loadu_si128(wide + 3);
    _mm_stream_si128(line, a);
    _mm_stream_si128(line + 1, b);
    _mm_stream_si128(line + 2, c);
    _mm_stream_si128(line + 3, d);
  }
  std::memcpy(to + i, from + i, nbytes - i);
  _mm_sfence();
}

StandardFloats::StandardFloats() : saved_(_mm_getcsr()) { _mm_setcsr(0x1f80u); }
StandardFloats::~StandardFloats() { _mm_setcsr(static_cast<unsigned>(saved_)); }

#else

void stream_copy(void* target, const void* source, std::size_t nbytes) {
  std::memcpy(target, source, nbytes);
}

#if defined(__aarch64__)
StandardFloats::StandardFloats() {
  asm volatile("mrs %0, fpcr" : "=r"(saved_));
  asm volatile("msr fpcr, %0" ::"r"(0ULL));
}
StandardFloats::~StandardFloats() { asm volatile("msr fpcr, %0" ::"r"(saved_)); }
#else
StandardFloats::StandardFloats() : saved_(0) {}
StandardFloats::~StandardFloats() = default;
#endif

#endif

}  // namespace infinity
