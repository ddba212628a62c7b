// Waiting as Python wants it: the interpreter's lock released, signals looked at.
#pragma once

#include <nanobind/nanobind.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <optional>
#include <stdexcept>

namespace infinity::aio {

constexpr std::chrono::milliseconds kPulse(50);  // signals are looked at twice as often as promised

// Pre: the interpreter's lock is held. Throws KeyboardInterrupt or whatever a handler raised.
inline void check_signals() {
  if (PyErr_CheckSignals() != 0) throw nanobind::python_error();
}

// The same for code that runs without the lock.
inline void check_signals_unlocked() {
  const nanobind::gil_scoped_acquire locked;
  check_signals();
}

// The end of a wait; None is far away.
class Deadline {
 public:
  explicit Deadline(std::optional<double> timeout_s) {
    constexpr double kForever = 1e9;  // half a lifetime; keeps the arithmetic in range
    const double seconds = timeout_s.value_or(kForever);
    if (std::isnan(seconds)) throw std::invalid_argument("timeout_s must be a number");
    end_ = Clock::now() + std::chrono::duration_cast<Clock::duration>(
                              std::chrono::duration<double>(std::clamp(seconds, 0.0, kForever)));
  }
  bool passed() const { return Clock::now() >= end_; }
  // Until the end or the next look at signals, whichever comes first.
  std::chrono::nanoseconds pulse() const {
    return std::clamp<Clock::duration>(end_ - Clock::now(), Clock::duration::zero(), kPulse);
  }

 private:
  using Clock = std::chrono::steady_clock;
  Clock::time_point end_;
};

}  // namespace infinity::aio
