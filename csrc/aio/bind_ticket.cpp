// `Ticket` in Python.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include <cerrno>
#include <tuple>
#include <utility>

#include "bind.h"
#include "os.h"

namespace nb = nanobind;

namespace infinity::aio {

void throw_forked(const char* op, int creator_pid) {
  throw IoFailure(EPERM, op, {}, 0, 0,
                  "the object was created by process " + std::to_string(creator_pid) +
                      "; a forked child must create its own");
}

PyTicket::PyTicket(std::shared_ptr<Ticket> ticket, nb::object keep)
    : ticket_(std::move(ticket)), keep_(std::move(keep)) {}

PyTicket::~PyTicket() {
  if (!ticket_ || ticket_->done() || os::process_id() != ticket_->process_id) return;
  bool is_leaked = false;
  {
    const nb::gil_scoped_release unlocked;
    while (!ticket_->wait_for(kPollInterval) && !is_leaked)
      is_leaked = ticket_->stuck().has_value();
    if (is_leaked) ticket_->count_leak();
  }
  if (is_leaked) static_cast<void>(keep_.release());
}

void PyTicket::check_process(const char* op) const {
  if (os::process_id() != ticket_->process_id) throw_forked(op, ticket_->process_id);
}

bool PyTicket::wait(std::optional<double> timeout_s) const {
  const Deadline deadline(timeout_s);
  bool is_promoted = false;
  while (!ticket_->done()) {
    check_process("wait");
    if (deadline.passed()) return false;
    {
      const nb::gil_scoped_release unlocked;
      if (!std::exchange(is_promoted, true)) ticket_->promote();
      if (!ticket_->wait_for(deadline.poll_timeout())) {
        if (const std::optional<IoFailure> failure = ticket_->stuck()) throw IoFailure(*failure);
      }
    }
    check_signals();
  }
  if (ticket_->failure()) throw IoFailure(*ticket_->failure());
  return true;
}

PyTicket::Times PyTicket::times_ns() const {
  if (!ticket_->done()) return std::nullopt;
  const auto [submitted, started, finished] = ticket_->times_ns();
  return std::tuple(submitted, started, finished);
}

bool PyTicket::cancel() const {
  if (!ticket_->done()) check_process("cancel");
  return ticket_->cancel();
}

std::optional<std::string> PyTicket::error() const {
  if (!ticket_->done() || !ticket_->failure()) return std::nullopt;
  return ticket_->failure()->message;
}

void bind_ticket(nb::module_& module) {
  using namespace nb::literals;
  nb::class_<PyTicket>(module, "Ticket",
                       "Submitted request; remains valid after its engine is closed.")
      .def("wait", &PyTicket::wait, "timeout_s"_a = nb::none())
      .def("done", [](const PyTicket& self) { return self.get().done(); })
      .def("cancel", &PyTicket::cancel)
      .def_prop_ro("nbytes", [](const PyTicket& self) { return self.get().nbytes; })
      .def_prop_ro("error", &PyTicket::error)
      .def_prop_ro("times_ns", &PyTicket::times_ns);
}

}  // namespace infinity::aio
