#include "lane.h"

#include <algorithm>
#include <cerrno>
#include <utility>

#include "os.h"

namespace infinity::aio {

// --- life ----------------------------------------------------------------------------------------

Lane::Lane(Hub& hub, const EngineConfig& config) : hub_(hub), block_size_(config.block_size) {
  sweeper_ = std::make_unique<PageCacheSweeper>([this](Block* block) {
    leave_kernel(block);
    backend_->wake(1);  // the back end may sleep: its own finish() came long ago
  });
  if (config.slow_bytes_per_s > 0) {
    throttle_ = std::make_unique<Throttle>(config.slow_bytes_per_s, [this](Block* block) {
      deliver(block);
      backend_->wake(1);
    });
  }
  if (config.backend == BackendKind::automatic) {
    try {
      start(BackendKind::uring, config, "chosen by probing");
    } catch (const IoFailure& failure) {
      start(BackendKind::threads, config, "chosen by probing; io_uring: " + failure.reason);
    }
  } else {
    start(config.backend, config, "forced by config");
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

void Lane::release_throttle() {
  if (throttle_) throttle_->release();
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

// --- queue ---------------------------------------------------------------------------------------

void Lane::enqueue(const std::shared_ptr<Ticket>& ticket, Part* part) {
  queue_.push({ticket, part}, ticket->priority_);
}

size_t Lane::num_startable() const {
  return static_cast<size_t>(std::min<uint64_t>(queue_.num_blocks(), free_.size()));
}

Block* Lane::cut_block() {
  const auto [ticket, part] = queue_.front();
  while (part->segments[part->next_segment].length == part->next_offset) {
    ++part->next_segment;  // finished, or of length 0
    part->next_offset = 0;
  }
  const Segment& segment = part->segments[part->next_segment];
  const uint64_t start = part->next_offset;
  Block* block = free_.back();
  free_.pop_back();
  *block = Block{};
  block->op = ticket->op;
  block->file = segment.file;
  block->offset = segment.offset + start;
  block->length = std::min(block_size_, segment.length - start);
  block->address = segment.address + start;
  block->serial = num_cut_++;
  block->ticket = ticket;
  block->part = part;
  block->start_ns = os::monotonic_ns();
  if (ticket->started_ns_ == 0) ticket->started_ns_ = block->start_ns;
  part->next_offset = start + block->length;
  --part->num_queued;
  ++part->num_in_flight;
  queue_.cut();
  counters_.queue_ns[static_cast<size_t>(block->op)] +=
      static_cast<uint64_t>(block->start_ns - ticket->submitted_ns_);
  if (counters_.in_flight_blocks++ == 0) busy_since_ns_ = block->start_ns;
  if (hub_.in_flight_blocks++ == 0) hub_.busy_since_ns = block->start_ns;
  return block;
}

size_t Lane::take(Block** blocks, size_t max_blocks) {
  size_t num_taken = 0;
  const std::lock_guard lock(hub_.mutex);
  while (num_taken < max_blocks && !continued_.empty()) {
    blocks[num_taken++] = continued_.front();
    continued_.pop_front();
  }
  while (num_taken < max_blocks && !free_.empty() && !queue_.empty()) {
    blocks[num_taken++] = cut_block();
  }
  for (size_t i = 0; i < num_taken; ++i) {
    blocks[i]->end = blocks[i]->length;
    blocks[i]->in_kernel = true;
    ++blocks[i]->attempts;
  }
  return num_taken;
}

// --- looking -------------------------------------------------------------------------------------

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

bool Lane::is_stuck(const Part& part, int64_t now_ns, int64_t limit_ns) const {
  size_t num_stuck = 0;
  for (const Block& block : blocks_) {
    if (block.ticket == nullptr || !block.in_kernel || now_ns - block.start_ns <= limit_ns) {
      continue;
    }
    if (block.part == &part) return true;
    ++num_stuck;
  }
  return part.num_queued > 0 && num_stuck == blocks_.size();
}

}  // namespace infinity::aio
