#include "bind_ticket.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include <algorithm>
#include <cerrno>
#include <tuple>
#include <utility>
#include <vector>

#include "bind_signals.h"
#include "os.h"

namespace nb = nanobind;

namespace infinity::aio {
namespace {

using Tickets = std::vector<Ticket*>;

// The list that is waited for; holds the Python objects, so that none goes in the middle.
class Waited {
 public:
  Waited(const char* what, const nb::iterable& tickets) {
    for (nb::handle item : tickets) {
      const PyTicket* ticket = nullptr;
      if (!nb::try_cast(item, ticket) || ticket == nullptr) {
        throw nb::type_error("tickets must be an iterable of Ticket");
      }
      if (!ticket->get().done()) ticket->own(what);
      held_.append(item);
      tickets_.push_back(&ticket->get());
    }
    for (Ticket* ticket : tickets_) ticket->hang(&bell_);
  }
  ~Waited() {
    for (Ticket* ticket : tickets_) ticket->take_off(&bell_);
  }
  Waited(const Waited&) = delete;
  Waited& operator=(const Waited&) = delete;

  const Tickets& tickets() const { return tickets_; }
  // Until some ticket finishes, signals must be looked at, or the deadline has passed.
  void sleep(const Deadline& deadline) {
    {
      const nb::gil_scoped_release unlocked;
      bell_.wait_for(deadline.pulse());
    }
    check_signals();
  }

 private:
  nb::list held_;
  Tickets tickets_;
  Bell bell_;
};

std::optional<size_t> wait_any(const nb::iterable& list, std::optional<double> timeout_s) {
  const Deadline deadline(timeout_s);
  Waited waited("wait_any", list);
  const Tickets& tickets = waited.tickets();
  if (tickets.empty()) throw std::invalid_argument("wait_any needs at least one ticket");
  while (true) {
    const auto found = std::ranges::find_if(tickets, &Ticket::done);
    if (found != tickets.end()) return static_cast<size_t>(found - tickets.begin());
    if (deadline.passed()) return std::nullopt;
    std::optional<IoFailure> stuck;
    const bool all_stuck = std::ranges::all_of(tickets, [&](const Ticket* ticket) {
      std::optional<IoFailure> failure = ticket->stuck();
      if (!stuck) stuck = failure;
      return failure.has_value();
    });
    if (all_stuck) throw IoFailure(*stuck);
    waited.sleep(deadline);
  }
}

bool wait_all(const nb::iterable& list, std::optional<double> timeout_s) {
  const Deadline deadline(timeout_s);
  Waited waited("wait_all", list);
  if (!deadline.passed()) {
    for (Ticket* ticket : waited.tickets()) ticket->promote();
  }
  while (true) {
    bool all_done = true;
    for (const Ticket* ticket : waited.tickets()) all_done &= ticket->done();
    if (all_done) return true;
    if (deadline.passed()) return false;
    for (const Ticket* ticket : waited.tickets()) {
      if (const std::optional<IoFailure> failure = ticket->stuck()) throw IoFailure(*failure);
    }
    waited.sleep(deadline);
  }
}

}  // namespace

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

void PyTicket::promote() const {
  if (!ticket_->done()) own("promote");
  ticket_->promote();
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
      .def("promote", &PyTicket::promote)
      .def_prop_ro("nbytes", [](const PyTicket& self) { return self.get().nbytes; })
      .def_prop_ro("op", [](const PyTicket& self) { return static_cast<int>(self.get().op); })
      .def_prop_ro("error", &PyTicket::error)
      .def_prop_ro("times_ns", &PyTicket::times_ns)
      .def_prop_ro("latency_ns", [](const PyTicket& self) { return self.get().latency_ns(); });
  module.def("wait_any", &wait_any, "tickets"_a, "timeout_s"_a = nb::none());
  module.def("wait_all", &wait_all, "tickets"_a, "timeout_s"_a = nb::none());
}

}  // namespace infinity::aio
