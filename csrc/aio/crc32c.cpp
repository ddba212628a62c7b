// The CRC32 instruction has a latency of three cycles and a throughput of one per cycle, so three
// streams are processed in parallel and their checksums combined. Combining shifts a checksum over
// n zero bytes, which is linear over GF(2). For the stream lengths used here it takes four lookups
// in a table computed at compile time.
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

constexpr std::array<uint32_t, 256> make_byte_table() {
  std::array<uint32_t, 256> table{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t state = byte;
    for (int bit = 0; bit < 8; ++bit) state = (state >> 1) ^ ((state & 1) != 0 ? kPolynomial : 0);
    table[byte] = state;
  }
  return table;
}
constexpr std::array<uint32_t, 256> kByteTable = make_byte_table();

// Linear map of 32-bit states over GF(2): the image of each bit.
using LinearMap = std::array<uint32_t, 32>;

constexpr uint32_t apply(const LinearMap& map, uint32_t state) {
  uint32_t image = 0;
  for (size_t bit = 0; state != 0; ++bit, state >>= 1) image ^= (state & 1) != 0 ? map[bit] : 0;
  return image;
}

// Returns the map applied twice.
constexpr LinearMap square(const LinearMap& map) {
  LinearMap result{};
  for (size_t bit = 0; bit < 32; ++bit) result[bit] = apply(map, map[bit]);
  return result;
}

// Map of a state over 2**log2_bytes zero bytes, as one table per byte of the state.
using ShiftTable = std::array<std::array<uint32_t, 256>, 4>;

constexpr ShiftTable make_shift_table(int log2_bytes) {
  LinearMap map{};
  for (size_t bit = 0; bit < 32; ++bit) {
    const uint32_t state = uint32_t{1} << bit;
    map[bit] = (state >> 8) ^ kByteTable[state & 0xFF];
  }
  for (int i = 0; i < log2_bytes; ++i) map = square(map);
  ShiftTable shift{};
  for (size_t i = 0; i < 4; ++i) {
    for (uint32_t byte = 0; byte < 256; ++byte) {
      shift[i][byte] = apply(map, byte << (8 * i));
    }
  }
  return shift;
}

// Stream lengths: 64 KiB, then 4 KiB, then 256 bytes; the remainder is one stream. The hardware
// prefetcher works per page, so streams of 4 KiB take 1.7 times as long for data not in the caches.
constexpr int kWideLog2 = 16;
constexpr int kLongLog2 = 12;
constexpr int kShortLog2 = 8;
constexpr ShiftTable kWideShift = make_shift_table(kWideLog2);
constexpr ShiftTable kLongShift = make_shift_table(kLongLog2);
constexpr ShiftTable kShortShift = make_shift_table(kShortLog2);

[[maybe_unused]] uint32_t shift_state(const ShiftTable& shift, uint32_t state) {
  return shift[0][state & 0xFF] ^ shift[1][(state >> 8) & 0xFF] ^ shift[2][(state >> 16) & 0xFF] ^
         shift[3][state >> 24];
}

[[maybe_unused]] uint64_t load_word(const uint8_t* bytes) {
  uint64_t word;
  std::memcpy(&word, bytes, sizeof word);
  return word;
}

#if defined(__x86_64__) || defined(__aarch64__)
#if defined(__x86_64__)
#define INFINITY_CRC_TARGET __attribute__((target("sse4.2")))
INFINITY_CRC_TARGET inline uint32_t crc_of_word(uint32_t state, uint64_t word) {
  return static_cast<uint32_t>(_mm_crc32_u64(state, word));
}
INFINITY_CRC_TARGET inline uint32_t crc_of_byte(uint32_t state, uint8_t byte) {
  return _mm_crc32_u8(state, byte);
}
constexpr const char* kHardwareKind = "sse4.2";
bool has_hardware_crc() { return __builtin_cpu_supports("sse4.2") != 0; }
#else
#define INFINITY_CRC_TARGET __attribute__((target("+crc")))
INFINITY_CRC_TARGET inline uint32_t crc_of_word(uint32_t state, uint64_t word) {
  return __crc32cd(state, word);
}
INFINITY_CRC_TARGET inline uint32_t crc_of_byte(uint32_t state, uint8_t byte) {
  return __crc32cb(state, byte);
}
constexpr const char* kHardwareKind = "arm-crc";
bool has_hardware_crc() { return (::getauxval(AT_HWCAP) & HWCAP_CRC32) != 0; }
#endif

// Bytes still to be processed, and where they are copied to if `copies`.
struct Cursor {
  const uint8_t* bytes;
  size_t length;
  uint8_t* target;

  void advance(size_t count, bool copies) {
    bytes += count;
    length -= count;
    if (copies) target += count;
  }
};

// Loads a word once for both the checksum and the copy.
template <bool kCopies>
inline uint64_t load_and_copy(const uint8_t* bytes, uint8_t* target, size_t at) {
  const uint64_t word = load_word(bytes + at);
  if constexpr (kCopies) std::memcpy(target + at, &word, sizeof word);
  return word;
}

// Processes three streams of 2**kLog2 bytes each at a time, while that many bytes are left.
template <int kLog2, bool kCopies>
INFINITY_CRC_TARGET uint32_t process_streams(uint32_t state, Cursor* cursor,
                                             const ShiftTable& shift) {
  constexpr size_t kStream = size_t{1} << kLog2;
  while (cursor->length >= 3 * kStream) {
    const uint8_t* bytes = cursor->bytes;
    uint8_t* target = cursor->target;
    uint32_t second = 0;
    uint32_t third = 0;
    for (size_t i = 0; i < kStream; i += 8) {
      state = crc_of_word(state, load_and_copy<kCopies>(bytes, target, i));
      second = crc_of_word(second, load_and_copy<kCopies>(bytes, target, kStream + i));
      third = crc_of_word(third, load_and_copy<kCopies>(bytes, target, 2 * kStream + i));
    }
    state = shift_state(shift, shift_state(shift, state) ^ second) ^ third;
    cursor->advance(3 * kStream, kCopies);
  }
  return state;
}

template <bool kCopies>
INFINITY_CRC_TARGET uint32_t crc32c_hardware(Cursor cursor, uint32_t initial) {
  uint32_t state = ~initial;
  state = process_streams<kWideLog2, kCopies>(state, &cursor, kWideShift);
  state = process_streams<kLongLog2, kCopies>(state, &cursor, kLongShift);
  state = process_streams<kShortLog2, kCopies>(state, &cursor, kShortShift);
  for (; cursor.length >= 8; cursor.advance(8, kCopies)) {
    state = crc_of_word(state, load_and_copy<kCopies>(cursor.bytes, cursor.target, 0));
  }
  for (; cursor.length > 0; cursor.advance(1, kCopies)) {
    const uint8_t byte = *cursor.bytes;
    if constexpr (kCopies) *cursor.target = byte;
    state = crc_of_byte(state, byte);
  }
  return ~state;
}

uint32_t hardware_sum(const void* data, size_t length, uint32_t initial) {
  return crc32c_hardware<false>({static_cast<const uint8_t*>(data), length, nullptr}, initial);
}

uint32_t hardware_sum_and_copy(void* target, const void* source, size_t length, uint32_t initial) {
  return crc32c_hardware<true>(
      {static_cast<const uint8_t*>(source), length, static_cast<uint8_t*>(target)}, initial);
}
#else
constexpr const char* kHardwareKind = "table";
bool has_hardware_crc() { return false; }
uint32_t hardware_sum(const void*, size_t, uint32_t) { return 0; }  // never called
uint32_t hardware_sum_and_copy(void*, const void*, size_t, uint32_t) { return 0; }
#endif

const bool kHasHardwareCrc = has_hardware_crc();

}  // namespace

uint32_t crc32c_by_table(const void* data, size_t length, uint32_t initial) {
  const auto* bytes = static_cast<const uint8_t*>(data);
  uint32_t state = ~initial;
  for (size_t i = 0; i < length; ++i) state = (state >> 8) ^ kByteTable[(state ^ bytes[i]) & 0xFF];
  return ~state;
}

uint32_t crc32c(const void* data, size_t length, uint32_t initial) {
  return kHasHardwareCrc ? hardware_sum(data, length, initial)
                         : crc32c_by_table(data, length, initial);
}

uint32_t crc32c_copy(void* target, const void* source, size_t length, uint32_t initial) {
  if (kHasHardwareCrc) return hardware_sum_and_copy(target, source, length, initial);
  if (length > 0) std::memcpy(target, source, length);
  return crc32c_by_table(target, length, initial);
}

const char* crc32c_kind() { return kHasHardwareCrc ? kHardwareKind : "table"; }

}  // namespace infinity::aio
