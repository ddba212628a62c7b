#include <algorithm>
#include <random>
#include <vector>

#include "check.h"
#include "crc32c.h"

using namespace infinity::aio;

namespace {

// CRC32C by its definition, bit by bit.
uint32_t by_bits(const std::vector<uint8_t>& bytes, size_t begin, size_t end) {
  uint32_t state = 0xFFFFFFFF;
  for (size_t i = begin; i < end; ++i) {
    state ^= bytes[i];
    for (int bit = 0; bit < 8; ++bit) state = (state >> 1) ^ ((state & 1) != 0 ? 0x82F63B78u : 0u);
  }
  return ~state;
}

}  // namespace

TEST(crc32c_known_vectors) {
  CHECK(crc32c("123456789", 9) == 0xE3069283);
  CHECK(crc32c("", 0) == 0);
  const std::vector<uint8_t> zeros(32, 0);
  CHECK(crc32c(zeros.data(), 32) == 0x8A9136AA);  // RFC 3720, B.4
  const std::vector<uint8_t> ones(32, 0xFF);
  CHECK(crc32c(ones.data(), 32) == 0x62A8AB43);
}

TEST(crc32c_equals_the_definition) {
  std::mt19937 random(1);
  std::vector<uint8_t> bytes(3 * 65536 + 3 * 3 * 4096 + 3 * 256 + 77);
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random());
  const size_t full = bytes.size();
  for (const size_t length :
       {size_t{1}, size_t{7}, size_t{8}, size_t{255}, size_t{767}, size_t{768}, size_t{769},
        size_t{12287}, size_t{12288}, size_t{12289}, size_t{13056}, size_t{196607}, size_t{196608},
        size_t{196609}, full - 5}) {
    for (const size_t begin : {size_t{0}, size_t{1}, size_t{5}}) {
      if (begin + length > full) continue;
      const uint32_t expected = by_bits(bytes, begin, begin + length);
      CHECK(crc32c(&bytes[begin], length) == expected);
      CHECK(crc32c_by_table(&bytes[begin], length) == expected);
      const size_t half = length / 2;
      CHECK(crc32c(&bytes[begin + half], length - half, crc32c(&bytes[begin], half)) == expected);
      std::vector<uint8_t> copy(length + 2, 0xAA);
      CHECK(crc32c_copy(&copy[1], &bytes[begin], length) == expected);
      CHECK(copy.front() == 0xAA && copy.back() == 0xAA);
      CHECK(std::equal(copy.begin() + 1, copy.end() - 1, &bytes[begin]));
    }
  }
}
