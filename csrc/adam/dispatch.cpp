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
  throw std::invalid_argument("isa '" + isa +
                              "' is not available on this CPU; use one of: " + names);
}

double fold_blocks(std::vector<double>& sums) {
  if (sums.empty()) return 0.0;
  for (std::size_t count = sums.size(); count > 1; count = (count + 1) / 2) {
    for (std::size_t i = 0; i < count / 2; ++i) sums[i] = sums[2 * i] + sums[2 * i + 1];
    if (count % 2 == 1) sums[count / 2] = sums[count - 1];
  }
  const bool is_nan = sums[0] != sums[0];  // sign and payload depend on the machine
  return is_nan ? std::numeric_limits<double>::quiet_NaN() : sums[0];
}

#if defined(__x86_64__)

void stream_copy(void* target, const void* source, std::size_t nbytes) {
  constexpr std::size_t kLine = 64;  // bytes of a cache line, to which the stores are aligned
  auto* to = static_cast<char*>(target);
  const auto* from = static_cast<const char*>(source);
  std::size_t head = (kLine - reinterpret_cast<std::uintptr_t>(to) % kLine) % kLine;
  if (head > nbytes) head = nbytes;
  std::memcpy(to, from, head);
  std::size_t i = head;
  for (; i + kLine <= nbytes; i += kLine) {
    const auto* vectors = reinterpret_cast<const __m128i*>(from + i);
    auto* line = reinterpret_cast<__m128i*>(to + i);
    const __m128i a = _mm_loadu_si128(vectors);
    const __m128i b = _mm_loadu_si128(vectors + 1);
    const __m128i c = _mm_loadu_si128(vectors + 2);
    const __m128i d = _mm_loadu_si128(vectors + 3);
    _mm_stream_si128(line, a);
    _mm_stream_si128(line + 1, b);
    _mm_stream_si128(line + 2, c);
    _mm_stream_si128(line + 3, d);
  }
  std::memcpy(to + i, from + i, nbytes - i);
  _mm_sfence();  // orders the non-temporal stores before later stores of this thread
}

#else

void stream_copy(void* target, const void* source, std::size_t nbytes) {
  std::memcpy(target, source, nbytes);
}

#endif

}  // namespace infinity
