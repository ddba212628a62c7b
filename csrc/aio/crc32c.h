// CRC32C (Castagnoli, reflected, as in iSCSI, ext4 and NVMe): checksums of chunks.
#pragma once

#include <cstddef>
#include <cstdint>

namespace infinity::aio {

// `initial` is the checksum of what came before, so that pieces can be added up.
uint32_t crc32c(const void* data, size_t length, uint32_t initial = 0);

// Copies the bytes as well, in the same pass: each is read once, so that the checksum is that of
// what was copied, even if somebody changes the source meanwhile. The ranges do not overlap.
uint32_t crc32c_copy(void* target, const void* source, size_t length, uint32_t initial = 0);

// crc32c() by one table of 256 words, a byte at a time: the fall-back, and what tests compare to.
uint32_t crc32c_by_table(const void* data, size_t length, uint32_t initial = 0);

// "sse4.2", "arm-crc" or "table": what crc32c() uses here.
const char* crc32c_kind();

}  // namespace infinity::aio
