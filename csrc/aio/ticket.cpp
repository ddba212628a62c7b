#include "ticket.h"

#include <cerrno>
#include <utility>

#include "engine.h"

namespace infinity::aio {

Ticket::Ticket(Op ticket_op, Priority priority, int creator_pid, std::weak_ptr<Engine> engine)
    : op(ticket_op), process_id(creator_pid), engine_(std::move(engine)), priority_(priority) {}

bool Ticket::wait_for(std::chrono::nanoseconds time) const {
  if (done()) return true;
  std::unique_lock lock(mutex_);
  return done_changed_.wait_for(lock, time, [this] { return done(); });
}

std::array<int64_t, 3> Ticket::times_ns() const {
  return {submitted_ns_, started_ns_ != 0 ? started_ns_ : finished_ns_, finished_ns_};
}

void Ticket::mark_done() {
  const std::lock_guard lock(mutex_);
  done_.store(true, std::memory_order_release);
  done_changed_.notify_all();
}

void Ticket::promote() {
  if (done()) return;
  if (const std::shared_ptr<Engine> engine = engine_.lock()) engine->promote(this);
}

bool Ticket::cancel() {
  if (done()) return true;
  const std::shared_ptr<Engine> engine = engine_.lock();
  return engine != nullptr && engine->cancel(this);
}

std::optional<IoFailure> Ticket::stuck() const {
  if (done()) return std::nullopt;
  if (const std::shared_ptr<Engine> engine = engine_.lock()) return engine->stuck(*this);
  return IoFailure(ETIMEDOUT, op_name(op), {}, 0, nbytes,
                   "the engine was closed while the request was in flight; its memory must not be "
                   "reused");
}

void Ticket::count_leak() {
  if (const std::shared_ptr<Engine> engine = engine_.lock()) engine->count_leak(*this);
}

}  // namespace infinity::aio
