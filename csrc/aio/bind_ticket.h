// `Ticket` in Python.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <tuple>

#include "ticket.h"

namespace infinity::aio {

class PyTicket {
 public:
  // `keep`: any Python object; it lives at least until the kernel has let go of the memory.
  PyTicket(std::shared_ptr<Ticket> ticket, nanobind::object keep);
  // A ticket that nobody can wait for any more (a signal struck before it was stored, say) would
  // leave the kernel writing into memory its owner believes idle: the last holder waits. When the
  // watchdog says that this is vain, `keep` is leaked on purpose and the leak is counted.
  ~PyTicket();
  PyTicket(PyTicket&&) = default;
  PyTicket(const PyTicket&) = delete;
  PyTicket& operator=(const PyTicket&) = delete;
  PyTicket& operator=(PyTicket&&) = delete;

  bool wait(std::optional<double> timeout_s) const;
  bool cancel() const;
  std::optional<std::string> error() const;
  // Submitted, begun, over; nothing until it is done.
  using Times = std::optional<std::tuple<int64_t, int64_t, int64_t>>;
  Times times_ns() const;
  Ticket& get() const { return *ticket_; }
  void own(const char* what) const;  // throws in a forked child

 private:
  std::shared_ptr<Ticket> ticket_;
  nanobind::object keep_;
};

// Thrown by whatever a forked child tries.
[[noreturn]] void refuse_fork(const char* what, int owner);

void bind_ticket(nanobind::module_& module);

}  // namespace infinity::aio
