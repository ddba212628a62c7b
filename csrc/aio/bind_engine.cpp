// `Engine` in Python.
#include <nanobind/stl/string.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "bind.h"
#include "engine.h"
#include "os.h"

namespace nb = nanobind;

namespace infinity::aio {
namespace {

BackendKind backend_kind(const std::string& name) {
  if (name == "auto") return BackendKind::automatic;
  if (name == "io_uring") return BackendKind::uring;
  if (name == "threads") return BackendKind::threads;
  throw std::invalid_argument("backend must be 'auto', 'io_uring' or 'threads', not '" + name +
                              "'");
}

// Converts one integer of segment `index`; `what` is its name in error messages.
uint64_t segment_field(nb::handle value, size_t index, const char* what) {
  uint64_t number = 0;
  if (nb::try_cast(value, number)) return number;
  const std::string where = "segment " + std::to_string(index) + ": the " + what;
  if (int64_t negative = 0; nb::try_cast(value, negative)) {
    throw std::invalid_argument(where + " is negative (" + std::to_string(negative) + ")");
  }
  throw nb::type_error((where + " must be an int that fits in 64 bits").c_str());
}

Segment to_segment(nb::handle item, size_t index) {
  nb::tuple fields;
  const PyFile* file = nullptr;
  if (!nb::try_cast(item, fields) || fields.size() != 4 || !nb::try_cast(fields[0], file) ||
      file == nullptr) {
    throw nb::type_error(
        ("segment " + std::to_string(index) + " must be a tuple (File, offset, length, address)")
            .c_str());
  }
  return {file->get(), segment_field(fields[1], index, "offset"),
          segment_field(fields[2], index, "length"), segment_field(fields[3], index, "address")};
}

// Adds the counters that have the same keys in counters() and device_counters().
void add_counters(nb::dict& result, const Counters& now) {
  result["read_bytes"] = now.bytes[0];
  result["write_bytes"] = now.bytes[1];
  result["read_requests"] = now.requests[0];
  result["write_requests"] = now.requests[1];
  result["read_queue_ns"] = now.queue_ns[0];
  result["write_queue_ns"] = now.queue_ns[1];
  result["in_flight_blocks"] = now.in_flight_blocks;
  result["queued_blocks"] = now.queued_blocks;
  result["busy_ns"] = now.busy_ns;
}

class PyEngine {
 public:
  PyEngine(const std::string& backend, uint64_t block_size, uint32_t queue_depth,
           uint32_t num_threads, uint64_t slow_bytes_per_s, double stuck_after_s,
           const std::string& faults) {
    EngineConfig config;
    config.backend = backend_kind(backend);
    config.block_size = block_size;
    config.queue_depth = queue_depth;
    config.num_threads = num_threads;
    config.slow_bytes_per_s = slow_bytes_per_s;
    config.stuck_after_s = stuck_after_s;
    config.faults = Faults::parse(faults);
    const nb::gil_scoped_release unlocked;
    engine_ = Engine::start(config);
  }
  ~PyEngine() {
    const nb::gil_scoped_release unlocked;
    engine_.reset();  // closes the engine, unless this is a forked child
  }
  PyEngine(const PyEngine&) = delete;
  PyEngine& operator=(const PyEngine&) = delete;

  PyTicket submit(int op, const nb::iterable& segments, int priority, nb::object keep) {
    check_process("submit");
    if (op != static_cast<int>(Op::read) && op != static_cast<int>(Op::write)) {
      throw std::invalid_argument("op must be READ or WRITE");
    }
    if (priority < 0 || priority >= static_cast<int>(kNumPriorities)) {
      throw std::invalid_argument("priority must be URGENT, NORMAL or BACKGROUND");
    }
    std::vector<Segment> list;
    for (nb::handle item : segments) list.push_back(to_segment(item, list.size()));
    // The GIL is not released, since submit() does not wait for I/O.
    return {engine_->submit(static_cast<Op>(op), std::move(list), static_cast<Priority>(priority)),
            std::move(keep)};
  }

  nb::dict counters() const {
    check_process("counters");
    const EngineCounters now = engine_->counters();
    nb::dict result;
    add_counters(result, now.total);
    result["read_ns"] = now.total.device_ns[0];
    result["write_ns"] = now.total.device_ns[1];
    result["tickets"] = now.tickets;
    result["leaked_tickets"] = now.leaked_tickets;
    result["leaked_bytes"] = now.leaked_bytes;
    return result;
  }

  nb::dict device_counters() const {
    check_process("device_counters");
    nb::dict result;
    for (const DeviceCounters& device : engine_->device_counters()) {
      nb::dict entry;
      add_counters(entry, device.counters);
      entry["read_device_ns"] = device.counters.device_ns[0];
      entry["write_device_ns"] = device.counters.device_ns[1];
      entry["backend"] = device.backend;
      result[device.device.c_str()] = entry;
    }
    return result;
  }

  void close() {
    check_process("close");
    const nb::gil_scoped_release unlocked;
    engine_->close(check_signals_without_gil);
  }

  const std::string& backend() const { return engine_->backend_name(); }
  const std::string& backend_reason() const { return engine_->backend_reason(); }

 private:
  void check_process(const char* op) const {
    if (engine_->process_id() != os::process_id()) throw_forked(op, engine_->process_id());
  }

  std::shared_ptr<Engine> engine_;
};

}  // namespace

void bind_engine(nb::module_& module) {
  using namespace nb::literals;
  module.attr("READ") = static_cast<int>(Op::read);
  module.attr("WRITE") = static_cast<int>(Op::write);
  module.attr("URGENT") = static_cast<int>(Priority::urgent);
  module.attr("NORMAL") = static_cast<int>(Priority::normal);
  module.attr("BACKGROUND") = static_cast<int>(Priority::background);
  nb::class_<PyEngine>(module, "Engine",
                       "Transfers blocks, at most queue_depth per device at a time.")
      .def(nb::init<const std::string&, uint64_t, uint32_t, uint32_t, uint64_t, double,
                    const std::string&>(),
           nb::kw_only(), "backend"_a = "auto", "block_size"_a = 1 << 20, "queue_depth"_a = 8,
           "num_threads"_a = 4, "slow_bytes_per_s"_a = 0, "stuck_after_s"_a = 0.0, "faults"_a = "")
      .def("submit", &PyEngine::submit, "op"_a, "segments"_a, nb::kw_only(),
           "priority"_a = static_cast<int>(Priority::normal), "keep"_a = nb::none())
      .def("counters", &PyEngine::counters)
      .def("device_counters", &PyEngine::device_counters)
      .def("close", &PyEngine::close)
      .def_prop_ro("backend", &PyEngine::backend)
      .def_prop_ro("backend_reason", &PyEngine::backend_reason);
}

}  // namespace infinity::aio
