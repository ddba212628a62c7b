// What becomes of a result: the one place where transfers are continued, retried, failed, counted.
#include <algorithm>
#include <cerrno>
#include <utility>

#include "engine.h"
#include "os.h"

namespace infinity::aio {
namespace {

constexpr uint32_t kMaxIdleAttempts = 1000;  // EINTR and EAGAIN end some day
constexpr uint32_t kSpinAttempts = 16;       // before a millisecond of sleep between attempts

}  // namespace

Ticket::Ticket(Op ticket_op, std::vector<Segment> list, int creator)
    : op(ticket_op), process_id(creator), segments_(std::move(list)) {
  for (const Segment& segment : segments_) nbytes += segment.length;
}

bool Ticket::wait_for(std::chrono::nanoseconds time) const {
  if (done()) return true;
  std::unique_lock lock(mutex_);
  return finished_.wait_for(lock, time, [this] { return done(); });
}

void Ticket::announce() {
  const std::lock_guard lock(mutex_);
  done_.store(true, std::memory_order_release);
  finished_.notify_all();
}

void Engine::Finished::announce() {
  for (const TicketPointer& ticket : tickets) ticket->announce();
}

// True: the block is over, with block->error set if it failed. False: it needs another attempt.
bool Engine::judge(Block* block, int64_t result) const {
  if (result == -EINTR || result == -EAGAIN) {
    if (++block->idle_attempts > kMaxIdleAttempts) {
      block->error = static_cast<int>(-result);
      return true;
    }
    if (block->idle_attempts > kSpinAttempts) os::sleep_ms(1);
    return false;
  }
  if (result < 0) {
    block->error = static_cast<int>(-result);
    return true;
  }
  const uint64_t before = block->done;
  block->done += static_cast<uint64_t>(result);
  if (block->done >= block->length) return true;
  if (block->op == Op::read && result > 0 && block->file->direct()) {
    // A short direct read usually ends at the end of the file, where no aligned read can go on.
    const int64_t size = os::file_size(block->file->fd());
    if (size >= 0 && block->offset + block->done >= static_cast<uint64_t>(size)) result = 0;
  }
  if (result == 0) {
    block->error = EIO;
    block->reason = block->op == Op::read ? kEndOfFile : "the device took no more bytes";
    return true;
  }
  if (block->file->direct()) {
    const uint64_t step =
        std::max(block->file->offset_alignment(), block->file->memory_alignment());
    block->done -= block->done % step;  // moves a few bytes twice, but stays aligned
  }
  if (block->done > before) {
    block->idle_attempts = 0;
  } else if (++block->idle_attempts > kMaxIdleAttempts) {
    block->error = EIO;
    block->reason = "transfers stay shorter than the alignment";
    return true;
  }
  return false;
}

void Engine::finish(Block* block, int64_t result) {
  if (!judge(block, result)) {
    const std::lock_guard lock(mutex_);
    continued_.push_back(block);
    return;
  }
  if (throttle_) {
    throttle_->add(block);
  } else {
    deliver(block);
  }
}

void Engine::deliver(Block* block) {
  Finished finished;
  {
    const std::lock_guard lock(mutex_);
    const int64_t now_ns = os::monotonic_ns();
    const TicketPointer ticket = std::move(block->ticket);
    account(*block, now_ns);
    --ticket->num_in_flight_;
    if (block->error != 0) {
      if (!ticket->failure_) {
        ticket->failure_.emplace(block->error, op_name(block->op), block->file->path(),
                                 block->offset, block->length,
                                 block->reason != nullptr ? block->reason : "");
      }
      cancel_rest(ticket);
    }
    free_.push_back(block);
    complete_if_last(ticket, now_ns, &finished);
    if (counters_.in_flight_blocks == 0) drained_.notify_all();
  }
  finished.announce();
}

void Engine::account(const Block& block, int64_t now_ns) {
  const auto direction = static_cast<size_t>(block.op);
  if (block.error == 0) counters_.bytes[direction] += block.length;
  ++counters_.requests[direction];
  counters_.block_ns[direction] += static_cast<uint64_t>(now_ns - block.start_ns);
  if (--counters_.in_flight_blocks == 0) counters_.busy_ns += now_ns - busy_since_ns_;
}

void Engine::cancel_rest(const TicketPointer& ticket) {
  if (ticket->num_queued_ == 0) return;
  counters_.queued_blocks -= ticket->num_queued_;
  ticket->num_queued_ = 0;
  std::erase(queue_, ticket);
}

void Engine::complete_if_last(const TicketPointer& ticket, int64_t now_ns, Finished* finished) {
  if (ticket->num_queued_ > 0 || ticket->num_in_flight_ > 0) return;
  ticket->finished_ns_ = now_ns;
  finished->segments.push_back(std::exchange(ticket->segments_, {}));
  finished->tickets.push_back(ticket);
}

}  // namespace infinity::aio
