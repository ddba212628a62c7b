#include "engine.h"

#include <algorithm>
#include <cerrno>
#include <stdexcept>
#include <utility>

#include "os.h"

namespace infinity::aio {
namespace {

constexpr uint64_t kMaxBlockBytes = 1u << 30;  // one attempt of the kernel moves < 2 GiB
constexpr uint32_t kMaxDepth = 4096;

uint64_t num_blocks(uint64_t length, uint64_t block_size) {
  return length / block_size + (length % block_size != 0 ? 1 : 0);
}

void check_config(const EngineConfig& config) {
  if (config.block_size == 0 || config.block_size > kMaxBlockBytes) {
    throw std::invalid_argument("block_size must be between 1 and 1073741824 bytes");
  }
  if (config.queue_depth == 0 || config.queue_depth > kMaxDepth) {
    throw std::invalid_argument("queue_depth must be between 1 and 4096");
  }
  if (config.num_threads == 0 || config.num_threads > kMaxDepth) {
    throw std::invalid_argument("num_threads must be between 1 and 4096");
  }
}

}  // namespace

// --- life ----------------------------------------------------------------------------------------

Engine::Engine(const EngineConfig& config)
    : process_id_(os::process_id()), block_size_(config.block_size) {
  check_config(config);
  if (config.slow_bytes_per_s > 0) {
    throttle_ = std::make_unique<Throttle>(config.slow_bytes_per_s, [this](Block* block) {
      deliver(block);
      backend_->wake(1);  // the back end may sleep: its own finish() came long ago
    });
  }
  choose_backend(config);
}

Engine::~Engine() {
  begin_close();
  while (!wait_drained(std::chrono::seconds(1))) continue;
  finish_close();
}

void Engine::choose_backend(const EngineConfig& config) {
  if (config.backend == BackendKind::threads) return start_threads(config, "forced by config");
  if (config.backend == BackendKind::uring) return start_uring(config, "forced by config");
  try {
    start_uring(config, "chosen by probing");
  } catch (const IoFailure& failure) {
    start_threads(config, "chosen by probing; io_uring: " + failure.reason);
  }
}

void Engine::start_uring(const EngineConfig& config, const std::string& reason) {
  blocks_.resize(config.queue_depth);
  for (Block& block : blocks_) free_.push_back(&block);
  try {
    backend_ = make_uring_backend(*this, config.queue_depth);
  } catch (...) {
    free_.clear();
    throw;
  }
  backend_name_ = "io_uring";
  backend_reason_ = "io_uring: " + reason + " (" + backend_->description() + ")";
}

void Engine::start_threads(const EngineConfig& config, const std::string& reason) {
  const uint32_t num_threads = std::min(config.queue_depth, config.num_threads);
  blocks_.resize(num_threads);
  for (Block& block : blocks_) free_.push_back(&block);
  backend_ = make_threads_backend(*this, num_threads);
  backend_name_ = "threads";
  backend_reason_ = "threads: " + reason + " (" + backend_->description() + ")";
}

void Engine::check_process() const {
  if (os::process_id() == process_id_) return;
  throw IoFailure(EPERM, "submit", {}, 0, 0,
                  "this engine belongs to process " + std::to_string(process_id_) +
                      "; a forked child must create its own");
}

void Engine::begin_close() {
  Finished finished;
  {
    const std::lock_guard lock(mutex_);
    closing_ = true;
    const std::deque<TicketPointer> cancelled = std::exchange(queue_, {});
    for (const TicketPointer& ticket : cancelled) {
      const Segment& next = ticket->segments_[ticket->next_segment_];
      ticket->failure_.emplace(ECANCELED, op_name(ticket->op), next.file->path(),
                               next.offset + ticket->next_offset_,
                               next.length - ticket->next_offset_, "the engine was closed");
      cancel_rest(ticket);
      complete_if_last(ticket, os::monotonic_ns(), &finished);
    }
  }
  finished.announce();
  if (throttle_) throttle_->release();
}

bool Engine::wait_drained(std::chrono::nanoseconds time) {
  std::unique_lock lock(mutex_);
  return drained_.wait_for(lock, time, [this] { return counters_.in_flight_blocks == 0; });
}

void Engine::finish_close() {
  const std::lock_guard lock(stop_mutex_);
  if (throttle_) throttle_->stop();
  if (backend_) backend_->stop();
}

// --- submitting ----------------------------------------------------------------------------------

void Engine::check_segment(const Segment& segment, size_t index) const {
  if (segment.length == 0) return;
  const File& file = *segment.file;
  const auto refuse = [&](const std::string& why) {
    throw std::invalid_argument(
        "segment " + std::to_string(index) + " (offset " + std::to_string(segment.offset) +
        ", length " + std::to_string(segment.length) + ", address " +
        std::to_string(segment.address) + ") of '" + file.path() + "': " + why);
  };
  if (segment.address == 0) refuse("the address is null");
  if (segment.offset > INT64_MAX || segment.length > INT64_MAX - segment.offset) {
    refuse("offset + length is beyond 2**63 - 1");
  }
  if (!file.direct()) return;
  const auto require = [&](const char* what, uint64_t value, uint64_t alignment) {
    if (value % alignment == 0) return;
    refuse(std::string(what) + " must be a multiple of " + std::to_string(alignment) +
           ", because the file is open for direct I/O");
  };
  require("the offset", segment.offset, file.offset_alignment());
  require("the length", segment.length, file.offset_alignment());
  require("the address", segment.address, file.memory_alignment());
  require("the engine's block_size", block_size_, file.offset_alignment());
  require("the engine's block_size", block_size_, file.memory_alignment());
}

std::shared_ptr<Ticket> Engine::submit(Op op, std::vector<Segment> segments) {
  check_process();
  uint64_t queued = 0;
  for (size_t index = 0; index < segments.size(); ++index) {
    check_segment(segments[index], index);
    queued += num_blocks(segments[index].length, block_size_);
  }
  auto ticket = std::make_shared<Ticket>(op, std::move(segments), process_id_);
  ticket->submitted_ns_ = os::monotonic_ns();
  ticket->num_queued_ = queued;
  Finished finished;
  size_t num_startable = 0;
  {
    const std::lock_guard lock(mutex_);
    if (closing_) throw IoFailure(ECANCELED, "submit", {}, 0, 0, "the engine is closed");
    ++counters_.tickets;
    if (queued > 0) {
      queue_.push_back(ticket);
      counters_.queued_blocks += queued;
      num_startable = std::min<uint64_t>(queued, free_.size());
    } else {
      complete_if_last(ticket, os::monotonic_ns(), &finished);
    }
  }
  finished.announce();
  if (num_startable > 0) backend_->wake(num_startable);
  return ticket;
}

void Engine::cut_block(const TicketPointer& ticket, Block* block) {
  while (ticket->segments_[ticket->next_segment_].length == ticket->next_offset_) {
    ++ticket->next_segment_;  // finished, or of length 0
    ticket->next_offset_ = 0;
  }
  const Segment& segment = ticket->segments_[ticket->next_segment_];
  const uint64_t start = ticket->next_offset_;
  *block = Block{};
  block->op = ticket->op;
  block->file = segment.file.get();
  block->offset = segment.offset + start;
  block->length = std::min(block_size_, segment.length - start);
  block->address = segment.address + start;
  block->ticket = ticket;
  block->start_ns = os::monotonic_ns();
  ticket->next_offset_ = start + block->length;
  --ticket->num_queued_;
  ++ticket->num_in_flight_;
}

size_t Engine::take(Block** blocks, size_t max_blocks) {
  size_t num_taken = 0;
  const std::lock_guard lock(mutex_);
  while (num_taken < max_blocks && !continued_.empty()) {
    blocks[num_taken++] = continued_.front();
    continued_.pop_front();
  }
  while (num_taken < max_blocks && !free_.empty() && !queue_.empty()) {
    Block* block = free_.back();
    free_.pop_back();
    cut_block(queue_.front(), block);
    if (queue_.front()->num_queued_ == 0) queue_.pop_front();
    if (counters_.in_flight_blocks++ == 0) busy_since_ns_ = block->start_ns;
    --counters_.queued_blocks;
    blocks[num_taken++] = block;
  }
  return num_taken;
}

Counters Engine::counters() const {
  const std::lock_guard lock(mutex_);
  Counters snapshot = counters_;
  if (snapshot.in_flight_blocks > 0) snapshot.busy_ns += os::monotonic_ns() - busy_since_ns_;
  return snapshot;
}

}  // namespace infinity::aio
