// `File` in Python.
#include <nanobind/stl/string.h>

#include <stdexcept>
#include <utility>

#include "bind.h"

namespace nb = nanobind;

namespace infinity::aio {
namespace {

Direct direct_mode(const std::string& name) {
  if (name == "auto") return Direct::automatic;
  if (name == "on") return Direct::on;
  if (name == "off") return Direct::off;
  throw std::invalid_argument("direct must be 'auto', 'on' or 'off', not '" + name + "'");
}

// Calls `attempt` without the GIL until it returns true, and signal handlers in between.
template <typename Attempt>
void retry_interrupted(const Attempt& attempt) {
  while (true) {
    {
      const nb::gil_scoped_release unlocked;
      if (attempt()) return;
    }
    check_signals();
  }
}

}  // namespace

PyFile::PyFile(const std::string& path, bool create, bool read_only, const std::string& direct)
    : path_(path) {
  const Direct mode = direct_mode(direct);
  if (path.find('\0') != std::string::npos) {
    throw std::invalid_argument("the path contains a null byte");
  }
  const nb::gil_scoped_release unlocked;
  file_ = File::open(path, create, read_only, mode);
}

const std::shared_ptr<File>& PyFile::get() const {
  if (!file_) throw std::invalid_argument("'" + path_ + "' is closed");
  return file_;
}

std::string PyFile::device() const {
  const os::Device device = get()->device();
  return std::to_string(device.major) + ":" + std::to_string(device.minor);
}

void PyFile::allocate(int64_t size) const {
  if (size < 0) throw std::invalid_argument("size must not be negative");
  const std::shared_ptr<File> file = get();
  retry_interrupted([&] { return file->allocate(static_cast<uint64_t>(size)); });
}

void PyFile::sync() const {
  const std::shared_ptr<File> file = get();
  retry_interrupted([&] { return file->sync(); });
}

void PyFile::close() {
  std::shared_ptr<File> file = std::exchange(file_, nullptr);
  const nb::gil_scoped_release unlocked;
  file.reset();
}

void bind_file(nb::module_& module) {
  using namespace nb::literals;
  nb::class_<PyFile>(module, "File", "Open file; requests in flight keep it open.")
      .def(nb::init<const std::string&, bool, bool, const std::string&>(), "path"_a, nb::kw_only(),
           "create"_a = false, "read_only"_a = false, "direct"_a = "auto")
      .def_prop_ro("path", &PyFile::path)
      .def_prop_ro("fd", &PyFile::fd)
      .def_prop_ro("direct", [](const PyFile& self) { return self.get()->direct(); })
      .def_prop_ro("direct_reason", [](const PyFile& self) { return self.get()->direct_reason(); })
      .def_prop_ro("file_system", [](const PyFile& self) { return self.get()->file_system(); })
      .def_prop_ro("device", &PyFile::device)
      .def_prop_ro("memory_alignment",
                   [](const PyFile& self) { return self.get()->memory_alignment(); })
      .def_prop_ro("offset_alignment",
                   [](const PyFile& self) { return self.get()->offset_alignment(); })
      .def_prop_ro("size", [](const PyFile& self) { return self.get()->size(); })
      .def("allocate", &PyFile::allocate, "size"_a)
      .def("sync", &PyFile::sync)
      .def("close", &PyFile::close);
}

}  // namespace infinity::aio
