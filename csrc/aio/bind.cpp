// The Python face: arguments in, exceptions out, the interpreter's lock released around every wait.
// No decision about input or output is taken here.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bind_error.h"
#include "engine.h"
#include "os.h"
#include "probe.h"

namespace nb = nanobind;

namespace infinity::aio {
namespace {

constexpr std::chrono::milliseconds kPulse(50);  // signals are looked at twice as often as promised

// Pre: the interpreter's lock is held. Throws KeyboardInterrupt or whatever a handler raised.
void check_signals() {
  if (PyErr_CheckSignals() != 0) throw nb::python_error();
}

[[noreturn]] void refuse_fork(const char* what, int owner) {
  throw IoFailure(
      EPERM, what, {}, 0, 0,
      "it belongs to process " + std::to_string(owner) + "; a forked child must create its own");
}

// --- File ----------------------------------------------------------------------------------------

class PyFile {
 public:
  PyFile(const std::string& path, bool create, bool read_only, const std::string& direct)
      : path_(path) {
    Direct mode = Direct::automatic;
    if (direct == "on") {
      mode = Direct::on;
    } else if (direct == "off") {
      mode = Direct::off;
    } else if (direct != "auto") {
      throw std::invalid_argument("direct must be 'auto', 'on' or 'off', not '" + direct + "'");
    }
    if (path.find('\0') != std::string::npos) {
      throw std::invalid_argument("the path holds a zero byte");
    }
    const nb::gil_scoped_release unlocked;
    file_ = File::open(path, create, read_only, mode);
  }

  const std::string& path() const { return path_; }
  int fd() const { return file_ ? file_->fd() : -1; }
  const std::shared_ptr<File>& get() const {
    if (!file_) throw std::invalid_argument("'" + path_ + "' is closed");
    return file_;
  }

  void allocate(int64_t size) const {
    if (size < 0) throw std::invalid_argument("size must not be negative");
    uninterrupted([size](const File& file) { return file.allocate(static_cast<uint64_t>(size)); });
  }
  void sync() const {
    uninterrupted([](const File& file) { return file.sync(); });
  }
  void close() {
    std::shared_ptr<File> last = std::exchange(file_, nullptr);
    const nb::gil_scoped_release unlocked;
    last.reset();
  }

 private:
  // Calls again after each signal, unless its Python handler raises.
  template <typename Attempt>
  void uninterrupted(const Attempt& attempt) const {
    const std::shared_ptr<File> file = get();
    while (true) {
      {
        const nb::gil_scoped_release unlocked;
        if (attempt(*file)) return;
      }
      check_signals();
    }
  }

  const std::string path_;
  std::shared_ptr<File> file_;
};

// --- Ticket --------------------------------------------------------------------------------------

class PyTicket {
 public:
  explicit PyTicket(std::shared_ptr<Ticket> ticket) : ticket_(std::move(ticket)) {}
  PyTicket(PyTicket&&) = default;
  PyTicket(const PyTicket&) = delete;
  PyTicket& operator=(const PyTicket&) = delete;
  PyTicket& operator=(PyTicket&&) = delete;

  // A ticket that nobody can wait for any more (a signal struck before it was stored, say) would
  // leave the kernel writing into memory its owner believes idle: the last holder waits.
  ~PyTicket() {
    if (!ticket_ || ticket_->done() || os::process_id() != ticket_->process_id) return;
    const nb::gil_scoped_release unlocked;
    while (!ticket_->done()) ticket_->wait_for(kPulse);
  }

  bool wait(std::optional<double> timeout_s) const {
    using Clock = std::chrono::steady_clock;
    constexpr double kForever = 1e9;  // half a lifetime; keeps the arithmetic in range
    const double seconds = timeout_s.value_or(kForever);
    if (std::isnan(seconds)) throw std::invalid_argument("timeout_s must be a number");
    const auto deadline =
        Clock::now() + std::chrono::duration_cast<Clock::duration>(
                           std::chrono::duration<double>(std::clamp(seconds, 0.0, kForever)));
    while (!ticket_->done()) {
      if (os::process_id() != ticket_->process_id) refuse_fork("wait", ticket_->process_id);
      const auto left = deadline - Clock::now();
      if (left <= Clock::duration::zero()) return false;
      {
        const nb::gil_scoped_release unlocked;
        ticket_->wait_for(std::min<Clock::duration>(left, kPulse));
      }
      check_signals();
    }
    if (ticket_->failure()) throw *ticket_->failure();
    return true;
  }
  bool done() const { return ticket_->done(); }
  uint64_t nbytes() const { return ticket_->nbytes; }
  int op() const { return static_cast<int>(ticket_->op); }
  int64_t latency_ns() const { return ticket_->latency_ns(); }
  std::optional<std::string> error() const {
    if (!ticket_->done() || !ticket_->failure()) return std::nullopt;
    return ticket_->failure()->message;
  }

 private:
  std::shared_ptr<Ticket> ticket_;
};

// --- Engine --------------------------------------------------------------------------------------

BackendKind backend_kind(const std::string& name) {
  if (name == "auto") return BackendKind::automatic;
  if (name == "io_uring") return BackendKind::uring;
  if (name == "threads") return BackendKind::threads;
  throw std::invalid_argument("backend must be 'auto', 'io_uring' or 'threads', not '" + name +
                              "'");
}

uint64_t segment_part(nb::handle value, size_t index, const char* what) {
  uint64_t number = 0;
  if (nb::try_cast(value, number)) return number;
  const std::string where = "segment " + std::to_string(index) + ": the " + what;
  if (int64_t below = 0; nb::try_cast(value, below)) {
    throw std::invalid_argument(where + " is negative (" + std::to_string(below) + ")");
  }
  throw nb::type_error((where + " must be an int that fits in 64 bits").c_str());
}

Segment to_segment(nb::handle item, size_t index) {
  nb::tuple parts;
  const PyFile* file = nullptr;
  if (!nb::try_cast(item, parts) || parts.size() != 4 || !nb::try_cast(parts[0], file) ||
      file == nullptr) {
    throw nb::type_error(
        ("segment " + std::to_string(index) + " must be a tuple (File, offset, length, address)")
            .c_str());
  }
  return {file->get(), segment_part(parts[1], index, "offset"),
          segment_part(parts[2], index, "length"), segment_part(parts[3], index, "address")};
}

class PyEngine {
 public:
  PyEngine(const std::string& backend, uint64_t block_size, uint32_t queue_depth,
           uint32_t num_threads, uint64_t slow_bytes_per_s) {
    const EngineConfig config{backend_kind(backend), block_size, queue_depth, num_threads,
                              slow_bytes_per_s};
    const nb::gil_scoped_release unlocked;
    engine_ = std::make_unique<Engine>(config);
  }

  ~PyEngine() {
    if (!engine_) return;
    if (is_foreign()) {
      // The threads did not survive the fork: joining them would hang. The copy is left alone.
      static_cast<void>(engine_.release());
      return;
    }
    const nb::gil_scoped_release unlocked;
    engine_.reset();
  }
  PyEngine(const PyEngine&) = delete;
  PyEngine& operator=(const PyEngine&) = delete;

  PyTicket submit(int op, nb::iterable segments) {
    own("submit");
    if (op != static_cast<int>(Op::read) && op != static_cast<int>(Op::write)) {
      throw std::invalid_argument("op must be READ or WRITE");
    }
    std::vector<Segment> list;
    for (nb::handle item : segments) list.push_back(to_segment(item, list.size()));
    // The lock of the interpreter is kept: this never waits for the disk.
    return PyTicket(engine_->submit(static_cast<Op>(op), std::move(list)));
  }

  nb::dict counters() const {
    own("counters");
    const Counters now = engine_->counters();
    nb::dict result;
    result["read_bytes"] = now.bytes[0];
    result["write_bytes"] = now.bytes[1];
    result["read_requests"] = now.requests[0];
    result["write_requests"] = now.requests[1];
    result["tickets"] = now.tickets;
    result["in_flight_blocks"] = now.in_flight_blocks;
    result["queued_blocks"] = now.queued_blocks;
    result["read_ns"] = now.block_ns[0];
    result["write_ns"] = now.block_ns[1];
    result["busy_ns"] = now.busy_ns;
    return result;
  }

  void close() {
    own("close");
    engine_->begin_close();
    bool drained = false;
    while (!drained) {
      {
        const nb::gil_scoped_release unlocked;
        drained = engine_->wait_drained(kPulse);
        if (drained) engine_->finish_close();
      }
      check_signals();
    }
  }

  const std::string& backend() const { return engine_->backend_name(); }
  const std::string& backend_reason() const { return engine_->backend_reason(); }

 private:
  bool is_foreign() const { return engine_->process_id() != os::process_id(); }
  void own(const char* what) const {
    if (is_foreign()) refuse_fork(what, engine_->process_id());
  }

  std::unique_ptr<Engine> engine_;
};

// --- probe ---------------------------------------------------------------------------------------

nb::dict probe(const std::string& directory) {
  ProbeResult found;
  {
    const nb::gil_scoped_release unlocked;
    found = probe_directory(directory, [] {
      const nb::gil_scoped_acquire locked;
      check_signals();
    });
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
  result["direct"] = found.direct;
  result["memory_alignment"] = found.memory_alignment;
  result["offset_alignment"] = found.offset_alignment;
  result["file_system"] = found.file_system;
  return result;
}

}  // namespace
}  // namespace infinity::aio

NB_MODULE(_aio, module) {
  using namespace infinity::aio;  // NOLINT: the module's own scope
  using namespace nb::literals;
  nb::set_leak_warnings(false);  // an engine kept alive by a traceback is no news; we never print
  module.doc() = "Asynchronous reads and writes between files and memory addresses.";
  module.attr("READ") = static_cast<int>(Op::read);
  module.attr("WRITE") = static_cast<int>(Op::write);
  bind_error(module);

  nb::class_<PyFile>(module, "File", "An open file; requests in flight keep it open.")
      .def(nb::init<const std::string&, bool, bool, const std::string&>(), "path"_a, nb::kw_only(),
           "create"_a = false, "read_only"_a = false, "direct"_a = "auto")
      .def_prop_ro("path", &PyFile::path)
      .def_prop_ro("fd", &PyFile::fd)
      .def_prop_ro("direct", [](const PyFile& self) { return self.get()->direct(); })
      .def_prop_ro("memory_alignment",
                   [](const PyFile& self) { return self.get()->memory_alignment(); })
      .def_prop_ro("offset_alignment",
                   [](const PyFile& self) { return self.get()->offset_alignment(); })
      .def_prop_ro("size", [](const PyFile& self) { return self.get()->size(); })
      .def("allocate", &PyFile::allocate, "size"_a)
      .def("sync", &PyFile::sync)
      .def("close", &PyFile::close);

  nb::class_<PyTicket>(module, "Ticket", "One request; valid also after its engine is gone.")
      .def("wait", &PyTicket::wait, "timeout_s"_a = nb::none())
      .def("done", &PyTicket::done)
      .def_prop_ro("nbytes", &PyTicket::nbytes)
      .def_prop_ro("op", &PyTicket::op)
      .def_prop_ro("error", &PyTicket::error)
      .def_prop_ro("latency_ns", &PyTicket::latency_ns);

  nb::class_<PyEngine>(module, "Engine", "Moves blocks, at most queue_depth at once.")
      .def(nb::init<const std::string&, uint64_t, uint32_t, uint32_t, uint64_t>(), nb::kw_only(),
           "backend"_a = "auto", "block_size"_a = 1 << 20, "queue_depth"_a = 8, "num_threads"_a = 4,
           "slow_bytes_per_s"_a = 0)
      .def("submit", &PyEngine::submit, "op"_a, "segments"_a)
      .def("counters", &PyEngine::counters)
      .def("close", &PyEngine::close)
      .def_prop_ro("backend", &PyEngine::backend)
      .def_prop_ro("backend_reason", &PyEngine::backend_reason);

  module.def("probe", &probe, "directory"_a);
}
