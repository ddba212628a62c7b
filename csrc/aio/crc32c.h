// CRC32C: the Castagnoli polynomial, reflected, as in iSCSI (RFC 3720), ext4 and NVMe.
#pragma once

#include <cstddef>
#include <cstdint>

namespace infinity::aio {

// Returns the checksum of `length` bytes. `initial` is the checksum of the preceding bytes, so that
// data can be processed in several calls.
uint32_t crc32c(const void* data, size_t length, uint32_t initial = 0);

// Copies the bytes and returns their checksum in one pass. With hardware support each source byte
// is read once; otherwise the checksum is computed from the copy. So the checksum is that of the
// copied bytes even if the source is modified concurrently. The ranges must not overlap.
uint32_t crc32c_copy(void* target, const void* source, size_t length, uint32_t initial = 0);

// crc32c() by a table of 256 words, one byte at a time: the fallback, and the reference in tests.
uint32_t crc32c_by_table(const void* data, size_t length, uint32_t initial = 0);

// Implementation that crc32c() uses on this CPU: "sse4.2", "arm-crc" or "table".
const char* crc32c_kind();

}  // namespace infinity::aio
