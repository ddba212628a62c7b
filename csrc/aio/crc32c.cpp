// The instruction has a latency of three cycles and a throughput of one, so three streams are run
// at once and their checksums joined. Joining moves a checksum over n zero bytes, which is linear
// over GF(2): for the two stream lengths used here it is four look-ups in a table made at compile
// time.
#include "crc32c.h"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#elif defined(__aarch64__)
#include <arm_acle.h>
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace infinity::aio {
namespace {

constexpr uint32_t kPolynomial = 0x82F63B78;  // reflected

constexpr std::array<uint32_t, 256> make_bytes() {
  std::array<uint32_t, 256> table{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t state = byte;
    for (int bit = 0; bit < 8; ++bit) state = (state >> 1) ^ ((state & 1) != 0 ? kPolynomial : 0);
    table[byte] = state;
  }
  return table;
}
constexpr std::array<uint32_t, 256> kBytes = make_bytes();

// A linear map of 32-bit states: the image of each single bit.
using Map = std::array<uint32_t, 32>;

constexpr uint32_t apply(const Map& map, uint32_t state) {
  uint32_t image = 0;
  for (size_t bit = 0; state != 0; ++bit, state >>= 1) image ^= (state & 1) != 0 ? map[bit] : 0;
  return image;
}

constexpr Map twice(const Map& map) {
  Map result{};
  for (size_t bit = 0; bit < 32; ++bit) result[bit] = apply(map, map[bit]);
  return result;
}

// Moves a state over 2**log2_bytes zero bytes, a byte of the state at a time.
using Shift = std::array<std::array<uint32_t, 256>, 4>;

constexpr Shift make_shift(int log2_bytes) {
  Map map{};
  for (size_t bit = 0; bit < 32; ++bit) {
    const uint32_t state = uint32_t{1} << bit;
    map[bit] = (state >> 8) ^ kBytes[state & 0xFF];
  }
  for (int i = 0; i < log2_bytes; ++i) map = twice(map);
  Shift shift{};
  for (size_t part = 0; part < 4; ++part) {
    for (uint32_t byte = 0; byte < 256; ++byte) {
      shift[part][byte] = apply(map, byte << (8 * part));
    }
  }
  return shift;
}

constexpr int kLongLog2 = 12;  // streams of 4 KiB, then of 256 bytes, then the rest in one
constexpr int kShortLog2 = 8;
constexpr Shift kLongShift = make_shift(kLongLog2);
constexpr Shift kShortShift = make_shift(kShortLog2);

[[maybe_unused]] uint32_t moved(const Shift& shift, uint32_t state) {
  return shift[0][state & 0xFF] ^ shift[1][(state >> 8) & 0xFF] ^ shift[2][(state >> 16) & 0xFF] ^
         shift[3][state >> 24];
}

[[maybe_unused]] uint64_t word_at(const uint8_t* bytes) {
  uint64_t word;
  std::memcpy(&word, bytes, sizeof word);
  return word;
}

#if defined(__x86_64__) || defined(__aarch64__)
#if defined(__x86_64__)
#define INFINITY_CRC_TARGET __attribute__((target("sse4.2")))
INFINITY_CRC_TARGET inline uint32_t step8(uint32_t state, uint64_t word) {
  return static_cast<uint32_t>(_mm_crc32_u64(state, word));
}
INFINITY_CRC_TARGET inline uint32_t step1(uint32_t state, uint8_t byte) {
  return _mm_crc32_u8(state, byte);
}
constexpr const char* kInstruction = "sse4.2";
bool has_instruction() { return __builtin_cpu_supports("sse4.2") != 0; }
#else
#define INFINITY_CRC_TARGET __attribute__((target("+crc")))
INFINITY_CRC_TARGET inline uint32_t step8(uint32_t state, uint64_t word) {
  return __crc32cd(state, word);
}
INFINITY_CRC_TARGET inline uint32_t step1(uint32_t state, uint8_t byte) {
  return __crc32cb(state, byte);
}
constexpr const char* kInstruction = "arm-crc";
bool has_instruction() { return (::getauxval(AT_HWCAP) & HWCAP_CRC32) != 0; }
#endif

// Consumes as many triples of streams as there are.
template <int kLog2>
INFINITY_CRC_TARGET uint32_t triples(uint32_t state, const uint8_t** bytes, size_t* length,
                                     const Shift& shift) {
  constexpr size_t kStream = size_t{1} << kLog2;
  while (*length >= 3 * kStream) {
    const uint8_t* at = *bytes;
    uint32_t second = 0;
    uint32_t third = 0;
    for (size_t i = 0; i < kStream; i += 8) {
      state = step8(state, word_at(at + i));
      second = step8(second, word_at(at + kStream + i));
      third = step8(third, word_at(at + 2 * kStream + i));
    }
    state = moved(shift, moved(shift, state) ^ second) ^ third;
    *bytes += 3 * kStream;
    *length -= 3 * kStream;
  }
  return state;
}

INFINITY_CRC_TARGET uint32_t by_instruction(const void* data, size_t length, uint32_t initial) {
  const auto* bytes = static_cast<const uint8_t*>(data);
  uint32_t state = ~initial;
  state = triples<kLongLog2>(state, &bytes, &length, kLongShift);
  state = triples<kShortLog2>(state, &bytes, &length, kShortShift);
  for (; length >= 8; bytes += 8, length -= 8) state = step8(state, word_at(bytes));
  for (; length > 0; ++bytes, --length) state = step1(state, *bytes);
  return ~state;
}
#else
constexpr const char* kInstruction = "table";
bool has_instruction() { return false; }
uint32_t by_instruction(const void* data, size_t length, uint32_t initial) {
  return crc32c_by_table(data, length, initial);
}
#endif

const bool kHasInstruction = has_instruction();

}  // namespace

uint32_t crc32c_by_table(const void* data, size_t length, uint32_t initial) {
  const auto* bytes = static_cast<const uint8_t*>(data);
  uint32_t state = ~initial;
  for (size_t i = 0; i < length; ++i) state = (state >> 8) ^ kBytes[(state ^ bytes[i]) & 0xFF];
  return ~state;
}

uint32_t crc32c(const void* data, size_t length, uint32_t initial) {
  return kHasInstruction ? by_instruction(data, length, initial)
                         : crc32c_by_table(data, length, initial);
}

const char* crc32c_kind() { return kHasInstruction ? kInstruction : "table"; }

}  // namespace infinity::aio
