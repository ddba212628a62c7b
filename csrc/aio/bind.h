// Python bindings of csrc/aio: classes shared by the bind_*.cpp files, and helpers for waits.
//
// The GIL is released during all calls that may wait.
#pragma once

#include <nanobind/nanobind.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>

#include "file.h"
#include "ticket.h"

namespace infinity::aio {

constexpr std::chrono::milliseconds kPollInterval(50);  // at which waits check for signals

// Runs pending Python signal handlers. Throws what a handler raises, such as KeyboardInterrupt.
// Requires the GIL.
inline void check_signals() {
  if (PyErr_CheckSignals() != 0) throw nanobind::python_error();
}

// Acquires the GIL and calls check_signals().
inline void check_signals_without_gil() {
  const nanobind::gil_scoped_acquire locked;
  check_signals();
}

// Deadline of a wait. No timeout, and timeouts above 1e9 s, become 1e9 s (31 years).
class Deadline {
 public:
  explicit Deadline(std::optional<double> timeout_s) {
    constexpr double kMaxTimeoutS = 1e9;  // avoids overflow of Clock::duration
    const double seconds = timeout_s.value_or(kMaxTimeoutS);
    if (std::isnan(seconds)) throw std::invalid_argument("timeout_s must be a number");
    end_ = Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(
                              std::clamp(seconds, 0.0, kMaxTimeoutS)));
  }
  bool passed() const { return Clock::now() >= end_; }
  // Time until the deadline, at most kPollInterval.
  std::chrono::nanoseconds poll_timeout() const {
    return std::clamp<Clock::duration>(end_ - Clock::now(), Clock::duration::zero(), kPollInterval);
  }

 private:
  using Clock = std::chrono::steady_clock;
  Clock::time_point end_;
};

// `File` in Python.
class PyFile {
 public:
  PyFile(const std::string& path, bool create, bool read_only, const std::string& direct);

  const std::string& path() const { return path_; }
  int fd() const { return file_ ? file_->fd() : -1; }
  const std::shared_ptr<File>& get() const;  // throws std::invalid_argument if closed
  std::string device() const;
  void allocate(int64_t size) const;
  void sync() const;
  void close();

 private:
  const std::string path_;
  std::shared_ptr<File> file_;  // null if closed
};

// `Ticket` in Python.
class PyTicket {
 public:
  // `keep` is a Python object that is referenced until the kernel no longer accesses the memory.
  PyTicket(std::shared_ptr<Ticket> ticket, nanobind::object keep);
  // Waits for the ticket: the kernel may still write to memory whose owner drops it with the
  // ticket, for example if a signal handler raises before the ticket is stored. If the watchdog
  // reports the ticket as stuck, `keep` is leaked and counted instead.
  ~PyTicket();
  PyTicket(PyTicket&&) = default;
  PyTicket(const PyTicket&) = delete;
  PyTicket& operator=(const PyTicket&) = delete;
  PyTicket& operator=(PyTicket&&) = delete;

  bool wait(std::optional<double> timeout_s) const;
  bool cancel() const;
  std::optional<std::string> error() const;
  // Times of submission, start and completion; nullopt until done.
  using Times = std::optional<std::tuple<int64_t, int64_t, int64_t>>;
  Times times_ns() const;
  Ticket& get() const { return *ticket_; }
  void check_process(const char* op) const;  // throws IoFailure (EPERM) in a forked child

 private:
  std::shared_ptr<Ticket> ticket_;
  nanobind::object keep_;
};

// Throws the IoFailure (EPERM) of operation `op` on an object created by process `creator_pid`.
[[noreturn]] void throw_forked(const char* op, int creator_pid);

// Each adds its classes and constants to the module. bind_engine requires the other three.
void bind_error(nanobind::module_& module);
void bind_file(nanobind::module_& module);
void bind_ticket(nanobind::module_& module);
void bind_engine(nanobind::module_& module);

}  // namespace infinity::aio
