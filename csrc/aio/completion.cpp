// What becomes of a result: the one place where transfers are continued, retried, failed, counted.
#include <algorithm>
#include <cerrno>
#include <utility>

#include "lane.h"
#include "os.h"

namespace infinity::aio {
namespace {

constexpr uint32_t kMaxIdleAttempts = 1000;  // EINTR and EAGAIN end some day
constexpr uint32_t kSpinAttempts = 16;       // before a millisecond of sleep between attempts

}  // namespace

void Finished::announce() {
  for (const std::shared_ptr<Ticket>& ticket : tickets) ticket->announce();
}

// True: the block is over, with block->error set if it failed. False: it needs another attempt.
bool Lane::judge(Block* block, int64_t result) const {
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

void Lane::finish(Block* block, int64_t result) {
  if (!judge(block, result)) {
    const std::lock_guard lock(hub_.mutex);
    continued_.push_back(block);
    return;
  }
  if (!block->file->direct() && sweeper_->add(block)) return;
  leave_kernel(block);
}

// The kernel is done with the block: it may only be held back from here on.
void Lane::leave_kernel(Block* block) {
  if (!throttle_) return deliver(block);
  {
    const std::lock_guard lock(hub_.mutex);
    block->in_kernel = false;
  }
  throttle_->add(block);
}

void Lane::deliver(Block* block) {
  Finished finished;
  std::shared_ptr<File> file;  // may be the last to hold it open: let go without the lock
  {
    const std::lock_guard lock(hub_.mutex);
    file = std::move(block->file);
    const std::shared_ptr<Ticket> ticket = std::move(block->ticket);
    account(*block, os::monotonic_ns());
    --block->part->num_in_flight;
    if (block->error != 0) {
      if (!ticket->failure_) {
        ticket->failure_.emplace(block->error, op_name(block->op), file->path(), block->offset,
                                 block->length, block->reason != nullptr ? block->reason : "");
      }
      cancel_rest(ticket.get());
    }
    free_.push_back(block);
    complete_if_last(ticket, &finished);
    if (is_idle()) hub_.drained.notify_all();
  }
  finished.announce();
}

void Lane::account(const Block& block, int64_t now_ns) {
  const auto direction = static_cast<size_t>(block.op);
  if (block.error == 0) counters_.bytes[direction] += block.length;
  ++counters_.requests[direction];
  counters_.device_ns[direction] += static_cast<uint64_t>(now_ns - block.start_ns);
  if (--counters_.in_flight_blocks == 0) counters_.busy_ns += now_ns - busy_since_ns_;
  if (--hub_.in_flight_blocks == 0) hub_.busy_ns += now_ns - hub_.busy_since_ns;
}

bool Lane::cancel_rest(Ticket* ticket) {
  bool found = false;
  for (Part& part : ticket->parts_) {
    if (part.num_queued == 0) continue;
    found |= part.lane->queue_.erase(&part);
    part.num_queued = 0;
  }
  return found;
}

void Lane::complete_if_last(const std::shared_ptr<Ticket>& ticket, Finished* finished) {
  for (const Part& part : ticket->parts_) {
    if (part.num_queued > 0 || part.num_in_flight > 0) return;
  }
  if (std::exchange(ticket->over_, true)) return;
  ticket->finished_ns_ = os::monotonic_ns();
  finished->parts.push_back(std::exchange(ticket->parts_, {}));
  finished->tickets.push_back(ticket);
}

}  // namespace infinity::aio
