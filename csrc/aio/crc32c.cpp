// The instruction has a latency of three cycles and a throughput of one, so three streams are run
// at once and their checksums joined. Joining moves a checksum over n zero bytes, which is linear
// over GF(2): for the stream lengths used here it is four look-ups in a table made at compile
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

// Streams of 64 KiB, then of 4 KiB, then of 256 bytes, then the rest in one. The processor reads
// ahead page by page: where bytes come from memory, streams of one page take 1.7 times as long.
constexpr int kWideLog2 = 16;
constexpr int kLongLog2 = 12;
constexpr int kShortLog2 = 8;
constexpr Shift kWideShift = make_shift(kWideLog2);
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

// What has been summed so far, and what is still to come. With a target the bytes go there too.
struct Work {
  const uint8_t* bytes;
  size_t length;
  uint8_t* target;

  void advance(size_t count, bool copies) {
    bytes += count;
    length -= count;
    if (copies) target += count;
  }
};

// Every word is loaded once, for the sum and for the copy.
template <bool kCopies>
inline uint64_t take(const uint8_t* bytes, uint8_t* target, size_t at) {
  const uint64_t word = word_at(bytes + at);
  if constexpr (kCopies) std::memcpy(target + at, &word, sizeof word);
  return word;
}

// Consumes as many triples of streams as there are.
template <int kLog2, bool kCopies>
INFINITY_CRC_TARGET uint32_t triples(uint32_t state, Work* work, const Shift& shift) {
  constexpr size_t kStream = size_t{1} << kLog2;
  while (work->length >= 3 * kStream) {
    const uint8_t* bytes = work->bytes;
    uint8_t* target = work->target;
    uint32_t second = 0;
    uint32_t third = 0;
    for (size_t i = 0; i < kStream; i += 8) {
      state = step8(state, take<kCopies>(bytes, target, i));
      second = step8(second, take<kCopies>(bytes, target, kStream + i));
      third = step8(third, take<kCopies>(bytes, target, 2 * kStream + i));
    }
    state = moved(shift, moved(shift, state) ^ second) ^ third;
    work->advance(3 * kStream, kCopies);
  }
  return state;
}

template <bool kCopies>
INFINITY_CRC_TARGET uint32_t by_instruction(Work work, uint32_t initial) {
  uint32_t state = ~initial;
  state = triples<kWideLog2, kCopies>(state, &work, kWideShift);
  state = triples<kLongLog2, kCopies>(state, &work, kLongShift);
  state = triples<kShortLog2, kCopies>(state, &work, kShortShift);
  for (; work.length >= 8; work.advance(8, kCopies)) {
    state = step8(state, take<kCopies>(work.bytes, work.target, 0));
  }
  for (; work.length > 0; work.advance(1, kCopies)) {
    const uint8_t byte = *work.bytes;
    if constexpr (kCopies) *work.target = byte;
    state = step1(state, byte);
  }
  return ~state;
}

uint32_t sum(const void* data, size_t length, uint32_t initial) {
  return by_instruction<false>({static_cast<const uint8_t*>(data), length, nullptr}, initial);
}

uint32_t sum_and_copy(void* target, const void* source, size_t length, uint32_t initial) {
  return by_instruction<true>(
      {static_cast<const uint8_t*>(source), length, static_cast<uint8_t*>(target)}, initial);
}
#else
constexpr const char* kInstruction = "table";
bool has_instruction() { return false; }
uint32_t sum(const void*, size_t, uint32_t) { return 0; }  // never called
uint32_t sum_and_copy(void*, const void*, size_t, uint32_t) { return 0; }
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
  return kHasInstruction ? sum(data, length, initial) : crc32c_by_table(data, length, initial);
}

uint32_t crc32c_copy(void* target, const void* source, size_t length, uint32_t initial) {
  if (kHasInstruction) return sum_and_copy(target, source, length, initial);
  if (length > 0) std::memcpy(target, source, length);
  return crc32c_by_table(target, length, initial);
}

const char* crc32c_kind() { return kHasInstruction ? kInstruction : "table"; }

}  // namespace infinity::aio
