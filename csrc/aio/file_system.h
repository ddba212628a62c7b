// Names of file systems, and what each does to us.
#pragma once

#include <cstdint>
#include <string>

namespace infinity::aio {

// "ext4", "xfs", "overlayfs", ..., or the magic number of statfs in hexadecimal.
std::string file_system_name(int64_t magic);

// Why direct I/O is not to be had on it, for people.
std::string no_direct_reason(const std::string& file_system);

}  // namespace infinity::aio
