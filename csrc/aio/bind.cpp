// Module infinity._aio: module-level functions. Documentation is in infinity/_aio.pyi.
#include "bind.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <stdexcept>
#include <string>

#include "crc32c.h"
#include "probe.h"

namespace nb = nanobind;

namespace infinity::aio {
namespace {

nb::dict probe(const std::string& directory) {
  ProbeResult found;
  {
    const nb::gil_scoped_release unlocked;
    found = probe_directory(directory, check_signals_without_gil);
  }
  const auto backend = [](const BackendProbe& result) {
    nb::dict entry;
    entry["ok"] = result.ok;
    entry["reason"] = result.reason;
    return entry;
  };
  nb::dict result;
  result["io_uring"] = backend(found.uring);
  result["threads"] = backend(found.threads);
  return result;
}

const uint8_t* bytes_at(uint64_t address, uint64_t nbytes) {
  if (address == 0 && nbytes > 0) throw std::invalid_argument("the address is null");
  return reinterpret_cast<const uint8_t*>(address);
}

uint32_t checksum(uint64_t address, uint64_t nbytes, uint32_t initial) {
  const uint8_t* bytes = bytes_at(address, nbytes);
  const nb::gil_scoped_release unlocked;
  return crc32c(bytes, nbytes, initial);
}

uint32_t copy_checksum(uint64_t target_address, uint64_t address, uint64_t nbytes,
                       uint32_t initial) {
  const uint8_t* bytes = bytes_at(address, nbytes);
  if (target_address == 0 && nbytes > 0) throw std::invalid_argument("the target_address is null");
  auto* target = reinterpret_cast<uint8_t*>(target_address);
  const nb::gil_scoped_release unlocked;
  return crc32c_copy(target, bytes, nbytes, initial);
}

void checksum_blocks(uint64_t address, uint64_t nbytes, uint64_t block, uint64_t out_address) {
  const uint8_t* bytes = bytes_at(address, nbytes);
  if (block == 0) throw std::invalid_argument("block must be at least 1 byte");
  if (out_address == 0 && nbytes > 0) throw std::invalid_argument("the out_address is null");
  auto* out = reinterpret_cast<uint8_t*>(out_address);
  const nb::gil_scoped_release unlocked;
  for (uint64_t at = 0; at < nbytes; at += std::min(block, nbytes - at)) {
    const uint32_t sum = crc32c(bytes + at, std::min(block, nbytes - at));
    for (int byte = 0; byte < 4; ++byte) *out++ = static_cast<uint8_t>(sum >> (8 * byte));
  }
}

}  // namespace
}  // namespace infinity::aio

NB_MODULE(_aio, module) {
  using namespace infinity::aio;  // NOLINT
  using namespace nb::literals;
  nb::set_leak_warnings(false);  // a traceback may keep an engine alive until exit
  module.doc() = "Asynchronous reads and writes between files and memory addresses.";
  bind_error(module);
  bind_file(module);
  bind_ticket(module);
  bind_engine(module);
  module.def("probe", &probe, "directory"_a);
  module.def("crc32c", &checksum, "address"_a, "nbytes"_a, "initial"_a = 0);
  module.def("crc32c_copy", &copy_checksum, "target_address"_a, "address"_a, "nbytes"_a,
             "initial"_a = 0);
  module.def("crc32c_blocks", &checksum_blocks, "address"_a, "nbytes"_a, "block"_a,
             "out_address"_a);
  module.attr("crc32c_kind") = crc32c_kind();
}
