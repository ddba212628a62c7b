// The engine: tickets in, blocks out to a back end, every result judged once.
//
// Invariants: at most `queue_depth` blocks are lent out; a ticket is announced only when none of
// its blocks is lent out; tickets are cut into blocks first come, first served. One mutex guards
// all of it and is never held across a system call that may sleep. The engine knows nothing of
// Python, tensors or what the bytes mean.
//
// Seams for later: a priority is an order of `queue_`, a device is one more (queue, back end) pair,
// cancelling is cancel_rest(), a watchdog reads Block::start_ns.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "backend.h"
#include "throttle.h"
#include "ticket.h"

namespace infinity::aio {

enum class BackendKind { automatic, uring, threads };

struct EngineConfig {
  BackendKind backend = BackendKind::automatic;
  uint64_t block_size = 1 << 20;
  uint32_t queue_depth = 8;
  uint32_t num_threads = 4;
  uint64_t slow_bytes_per_s = 0;  // 0: as fast as the disk
};

struct Counters {
  uint64_t bytes[2];     // indexed by Op; only blocks that succeeded
  uint64_t requests[2];  // blocks finished, failed ones included
  uint64_t block_ns[2];  // sum over blocks, from the hand-over to the kernel to the end
  uint64_t tickets;
  uint64_t in_flight_blocks;
  uint64_t queued_blocks;
  int64_t busy_ns;  // wall time with at least one block in flight
};

class Engine final : private BlockSource {
 public:
  explicit Engine(const EngineConfig& config);  // throws IoFailure, std::invalid_argument
  ~Engine() override;                           // closes; blocks for what the kernel still holds
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Never blocks on the disk. Throws std::invalid_argument for a segment that cannot work.
  std::shared_ptr<Ticket> submit(Op op, std::vector<Segment> segments);
  Counters counters() const;

  // Closing in three steps, so that a caller can look at signals in the middle: refuse and cancel;
  // wait until nothing is in flight (false: not yet, call again); stop the threads.
  void begin_close();
  bool wait_drained(std::chrono::nanoseconds time);
  void finish_close();

  const std::string& backend_name() const { return backend_name_; }
  const std::string& backend_reason() const { return backend_reason_; }
  int process_id() const { return process_id_; }

 private:
  using TicketPointer = std::shared_ptr<Ticket>;
  // What must happen after the lock is gone: wake waiters, close files.
  struct Finished {
    std::vector<TicketPointer> tickets;
    std::vector<std::vector<Segment>> segments;
    void announce();
  };

  size_t take(Block** blocks, size_t max_blocks) override;
  void finish(Block* block, int64_t result) override;

  void choose_backend(const EngineConfig& config);
  void start_uring(const EngineConfig& config, const std::string& reason);
  void start_threads(const EngineConfig& config, const std::string& reason);
  void check_segment(const Segment& segment, size_t index) const;
  void check_process() const;
  bool judge(Block* block, int64_t result) const;
  void deliver(Block* block);

  // Lock held for all of these.
  void cut_block(const TicketPointer& ticket, Block* block);
  void account(const Block& block, int64_t now_ns);
  void cancel_rest(const TicketPointer& ticket);
  void complete_if_last(const TicketPointer& ticket, int64_t now_ns, Finished* finished);

  const int process_id_;
  const uint64_t block_size_;

  mutable std::mutex mutex_;
  std::condition_variable drained_;
  std::vector<Block> blocks_;  // all there will ever be: the depth
  std::vector<Block*> free_;
  std::deque<Block*> continued_;  // lent-out blocks that need another attempt
  std::deque<TicketPointer> queue_;
  Counters counters_{};
  int64_t busy_since_ns_ = 0;
  bool closing_ = false;

  std::mutex stop_mutex_;
  std::string backend_name_;
  std::string backend_reason_;
  std::unique_ptr<Throttle> throttle_;
  std::unique_ptr<Backend> backend_;
};

}  // namespace infinity::aio
