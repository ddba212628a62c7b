#include "bind_ticket.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include <cerrno>
#include <tuple>
#include <utility>

#include "bind_signals.h"
#include "os.h"

namespace nb = nanobind;

namespace infinity::aio {

void refuse_fork(const char* what, int owner) {
  throw IoFailure(
      EPERM, what, {}, 0, 0,
      "it belongs to process " + std::to_string(owner) + "; a forked child must create its own");
}

PyTicket::PyTicket(std::shared_ptr<Ticket> ticket, nb::object keep)
    : ticket_(std::move(ticket)), keep_(std::move(keep)) {}

PyTicket::~PyTicket() {
  if (!ticket_ || ticket_->done() || os::process_id() != ticket_->process_id) return;
  bool is_leaked = false;
  {
    const nb::gil_scoped_release unlocked;
    while (!ticket_->wait_for(kPulse) && !is_leaked) is_leaked = ticket_->stuck().has_value();
    if (is_leaked) ticket_->note_leak();
  }
  if (is_leaked) static_cast<void>(keep_.release());
}

void PyTicket::own(const char* what) const {
  if (os::process_id() != ticket_->process_id) refuse_fork(what, ticket_->process_id);
}

bool PyTicket::wait(std::optional<double> timeout_s) const {
  const Deadline deadline(timeout_s);
  bool is_promoted = false;
  while (!ticket_->done()) {
    own("wait");
    if (deadline.passed()) return false;
    {
      const nb::gil_scoped_release unlocked;
      if (!std::exchange(is_promoted, true)) ticket_->promote();
      if (!ticket_->wait_for(deadline.pulse())) {
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
  if (!ticket_->done()) own("cancel");
  return ticket_->cancel();
}

std::optional<std::string> PyTicket::error() const {
  if (!ticket_->done() || !ticket_->failure()) return std::nullopt;
  return ticket_->failure()->message;
}

void bind_ticket(nb::module_& module) {
  using namespace nb::literals;
  nb::class_<PyTicket>(module, "Ticket", "One request; valid also after its engine is gone.")
      .def("wait", &PyTicket::wait, "timeout_s"_a = nb::none())
      .def("done", [](const PyTicket& self) { return self.get().done(); })
      .def("cancel", &PyTicket::cancel)
      .def_prop_ro("nbytes", [](const PyTicket& self) { return self.get().nbytes; })
      .def_prop_ro("error", &PyTicket::error)
      .def_prop_ro("times_ns", &PyTicket::times_ns);
}

}  // namespace infinity::aio
