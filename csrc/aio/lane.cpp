#include "lane.h"

#include <algorithm>
#include <cerrno>
#include <utility>

#include "os.h"

namespace infinity::aio {
namespace {

constexpr uint32_t kMaxIdleAttempts = 1000;  // attempts without progress before a block fails
constexpr uint32_t kSpinAttempts = 16;       // of these, before sleeping 1 ms between attempts

}  // namespace

// Setup and shutdown.

Lane::Lane(SharedState& shared, const EngineConfig& config)
    : shared_(shared), block_size_(config.block_size) {
  sweeper_ = std::make_unique<PageCacheSweeper>([this](Block* block) {
    throttle_or_complete(block);
    backend_->wake(1);  // a block is free again, and the back end may be asleep
  });
  if (config.slow_bytes_per_s > 0) {
    throttle_ = std::make_unique<Throttle>(config.slow_bytes_per_s, [this](Block* block) {
      complete(block);
      backend_->wake(1);
    });
  }
  if (config.backend == BackendKind::automatic) {
    try {
      start(BackendKind::uring, config, "selected by probing");
    } catch (const IoFailure& failure) {
      start(BackendKind::threads, config, "selected by probing; io_uring: " + failure.reason);
    }
  } else {
    start(config.backend, config, "set by config");
  }
}

void Lane::start(BackendKind kind, const EngineConfig& config, const std::string& reason) {
  const uint32_t depth = kind == BackendKind::threads
                             ? std::min(config.queue_depth, config.num_threads)
                             : config.queue_depth;
  blocks_.assign(depth, Block{});
  free_.clear();
  for (Block& block : blocks_) free_.push_back(&block);
  const MakeBackend make = [kind, depth](BlockSource& source) {
    return kind == BackendKind::threads ? make_threads_backend(source, depth)
                                        : make_uring_backend(source, depth);
  };
  backend_ = config.faults.enabled ? make_faulty_backend(*this, config.faults, make) : make(*this);
  backend_name_ = kind == BackendKind::threads ? "threads" : "io_uring";
  backend_reason_ = backend_name_ + ": " + reason + " (" + backend_->description() + ")";
}

void Lane::disable_throttle() {
  if (throttle_) throttle_->disable();
}

bool Lane::abandon() {
  if (backend_->abandon()) return true;
  sweeper_->detach();
  return false;
}

void Lane::stop() {
  if (throttle_) throttle_->stop();
  backend_->stop();
  sweeper_->stop();
}

// Queueing and splitting into blocks.

void Lane::enqueue(const std::shared_ptr<Ticket>& ticket, SubRequest* sub_request) {
  queue_.push({ticket, sub_request}, ticket->priority_);
}

size_t Lane::num_startable() const {
  return static_cast<size_t>(std::min<uint64_t>(queue_.num_blocks(), free_.size()));
}

// Requires a free block and a queue that is not empty.
Block* Lane::split_block() {
  const auto [ticket, sub_request] = queue_.front();
  while (sub_request->segments[sub_request->next_segment].length == sub_request->next_offset) {
    ++sub_request->next_segment;
    sub_request->next_offset = 0;
  }
  const Segment& segment = sub_request->segments[sub_request->next_segment];
  const uint64_t start = sub_request->next_offset;
  Block* block = free_.back();
  free_.pop_back();
  *block = Block{};
  block->op = ticket->op;
  block->file = segment.file;
  block->offset = segment.offset + start;
  block->length = std::min(block_size_, segment.length - start);
  block->address = segment.address + start;
  block->serial = next_serial_++;
  block->ticket = ticket;
  block->sub_request = sub_request;
  block->start_ns = os::monotonic_ns();
  if (ticket->started_ns_ == 0) ticket->started_ns_ = block->start_ns;
  sub_request->next_offset = start + block->length;
  --sub_request->num_queued;
  ++sub_request->num_in_flight;
  queue_.pop_block();
  counters_.queue_ns[static_cast<size_t>(block->op)] +=
      static_cast<uint64_t>(block->start_ns - ticket->submitted_ns_);
  if (counters_.in_flight_blocks++ == 0) busy_since_ns_ = block->start_ns;
  if (shared_.in_flight_blocks++ == 0) shared_.busy_since_ns = block->start_ns;
  return block;
}

size_t Lane::take(Block** blocks, size_t max_blocks) {
  size_t num_taken = 0;
  const std::lock_guard lock(shared_.mutex);
  while (num_taken < max_blocks && !retries_.empty()) {
    blocks[num_taken++] = retries_.front();
    retries_.pop_front();
  }
  while (num_taken < max_blocks && !free_.empty() && !queue_.empty()) {
    blocks[num_taken++] = split_block();
  }
  for (size_t i = 0; i < num_taken; ++i) {
    blocks[i]->end = blocks[i]->length;
    blocks[i]->in_kernel = true;
    ++blocks[i]->attempts;
  }
  return num_taken;
}

// Results of attempts, and completion.

// Updates a block with the result of an attempt. Returns true if the block is finished
// (block->error is set if it failed), false if it needs another attempt.
bool Lane::apply_result(Block* block, int64_t result) const {
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
    // A short O_DIRECT read usually stops at the end of the file. Another attempt would start at an
    // unaligned offset, so the file size decides.
    const int64_t size = os::file_size(block->file->fd());
    if (size >= 0 && block->offset + block->done >= static_cast<uint64_t>(size)) result = 0;
  }
  if (result == 0) {
    block->error = EIO;
    block->reason = block->op == Op::read ? kEndOfFile : "the device accepted no more bytes";
    return true;
  }
  if (block->file->direct()) {
    const uint64_t step =
        std::max(block->file->offset_alignment(), block->file->memory_alignment());
    block->done -= block->done % step;  // align the next attempt; repeats less than `step` bytes
  }
  if (block->done > before) {
    block->idle_attempts = 0;
  } else if (++block->idle_attempts > kMaxIdleAttempts) {
    block->error = EIO;
    block->reason = "transfers repeatedly ended short of the alignment";
    return true;
  }
  return false;
}

void Lane::finish(Block* block, int64_t result) {
  if (!apply_result(block, result)) {
    const std::lock_guard lock(shared_.mutex);
    retries_.push_back(block);
    return;
  }
  if (!block->file->direct() && sweeper_->add(block)) return;
  throttle_or_complete(block);
}

// Completes a finished block, after the throttle's delay if there is one. The watchdog ignores the
// block from here on.
void Lane::throttle_or_complete(Block* block) {
  if (!throttle_) return complete(block);
  {
    const std::lock_guard lock(shared_.mutex);
    block->in_kernel = false;
  }
  throttle_->add(block);
}

void Lane::complete(Block* block) {
  CompletedTickets completed;
  std::shared_ptr<File> file;  // possibly the last reference: released after the mutex
  {
    const std::lock_guard lock(shared_.mutex);
    file = std::move(block->file);
    const std::shared_ptr<Ticket> ticket = std::move(block->ticket);
    count_completion(*block, os::monotonic_ns());
    --block->sub_request->num_in_flight;
    if (block->error != 0) {
      if (!ticket->failure_) {
        ticket->failure_.emplace(block->error, op_name(block->op), file->path(), block->offset,
                                 block->length, block->reason != nullptr ? block->reason : "");
      }
      cancel_queued(ticket.get());
    }
    free_.push_back(block);
    complete_if_last(ticket, &completed);
    if (is_idle()) shared_.drained.notify_all();
  }
  completed.notify();
}

void Lane::count_completion(const Block& block, int64_t now_ns) {
  const auto direction = static_cast<size_t>(block.op);
  if (block.error == 0) counters_.bytes[direction] += block.length;
  ++counters_.requests[direction];
  counters_.device_ns[direction] += static_cast<uint64_t>(now_ns - block.start_ns);
  if (--counters_.in_flight_blocks == 0) counters_.busy_ns += now_ns - busy_since_ns_;
  if (--shared_.in_flight_blocks == 0) shared_.busy_ns += now_ns - shared_.busy_since_ns;
}

bool Lane::cancel_queued(Ticket* ticket) {
  bool found = false;
  for (SubRequest& sub_request : ticket->sub_requests_) {
    if (sub_request.num_queued == 0) continue;
    found |= sub_request.lane->queue_.erase(&sub_request);
    sub_request.num_queued = 0;
  }
  return found;
}

void Lane::complete_if_last(const std::shared_ptr<Ticket>& ticket, CompletedTickets* completed) {
  for (const SubRequest& sub_request : ticket->sub_requests_) {
    if (sub_request.num_queued > 0 || sub_request.num_in_flight > 0) return;
  }
  if (std::exchange(ticket->completed_, true)) return;
  ticket->finished_ns_ = os::monotonic_ns();
  completed->sub_requests.push_back(std::exchange(ticket->sub_requests_, {}));
  completed->tickets.push_back(ticket);
}

void CompletedTickets::notify() {
  for (const std::shared_ptr<Ticket>& ticket : tickets) ticket->mark_done();
}

// Counters and the watchdog.

Counters Lane::counters() const {
  Counters snapshot = counters_;
  snapshot.queued_blocks = queue_.num_blocks();
  if (snapshot.in_flight_blocks > 0) snapshot.busy_ns += os::monotonic_ns() - busy_since_ns_;
  return snapshot;
}

std::vector<Outstanding> Lane::outstanding(int64_t now_ns) const {
  std::vector<Outstanding> list;
  for (const Block& block : blocks_) {
    if (block.ticket == nullptr) continue;
    list.push_back({block.ticket.get(), block.op, block.file->path(), block.offset, block.length,
                    now_ns - block.start_ns});
  }
  return list;
}

bool Lane::is_stuck(const SubRequest& sub_request, int64_t now_ns, int64_t limit_ns) const {
  size_t num_stuck = 0;
  for (const Block& block : blocks_) {
    if (block.ticket == nullptr || !block.in_kernel || now_ns - block.start_ns <= limit_ns) {
      continue;
    }
    if (block.sub_request == &sub_request) return true;
    ++num_stuck;
  }
  return sub_request.num_queued > 0 && num_stuck == blocks_.size();
}

}  // namespace infinity::aio
