// One device: its queue, its blocks, its back end, its counters.
//
// Invariants: at most `depth` blocks are lent out; a ticket is announced only when none of its
// blocks is lent out. The engine's one mutex guards all lanes and is never held across a system
// call that may sleep. A lane knows nothing of Python, tensors or what the bytes mean.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "backend.h"
#include "config.h"
#include "page_cache.h"
#include "queue.h"
#include "throttle.h"
#include "ticket.h"

namespace infinity::aio {

// Indexed by Op where there are two.
struct Counters {
  uint64_t bytes[2];      // only of blocks that succeeded
  uint64_t requests[2];   // blocks finished, failed ones included
  uint64_t queue_ns[2];   // sum over blocks, from the submission of the ticket to the hand-over
  uint64_t device_ns[2];  // sum over blocks, from the hand-over to the end
  uint64_t in_flight_blocks;
  uint64_t queued_blocks;
  int64_t busy_ns;  // wall time with at least one block in flight
};

// A block that is lent out.
struct Outstanding {
  const Ticket* ticket;  // to compare, not to follow
  Op op;
  std::string path;
  uint64_t offset;
  uint64_t length;
  int64_t age_ns;
};

// What all lanes of an engine share.
struct Hub {
  std::mutex mutex;
  std::condition_variable drained;  // a lane has nothing in flight any more
  uint64_t in_flight_blocks = 0;
  int64_t busy_since_ns = 0;
  int64_t busy_ns = 0;
};

// What must happen after the mutex is free: wake waiters, close files.
struct Finished {
  std::vector<std::shared_ptr<Ticket>> tickets;
  std::vector<std::vector<Part>> parts;
  void announce();
};

class Lane final : public BlockSource {
 public:
  Lane(Hub& hub, const EngineConfig& config);  // throws IoFailure

  // Mutex held for all of these.
  void enqueue(const std::shared_ptr<Ticket>& ticket, Part* part);
  size_t num_startable() const;  // blocks that could be handed over at once
  // Drops the queued rest of every part of a ticket. True: there was some.
  static bool cancel_rest(Ticket* ticket);
  // Pre: nothing else was done to the ticket since; announce `finished` when the mutex is free.
  static void complete_if_last(const std::shared_ptr<Ticket>& ticket, Finished* finished);
  std::vector<std::shared_ptr<Ticket>> queued_tickets() const { return queue_.tickets(); }
  bool is_idle() const { return counters_.in_flight_blocks == 0; }
  void promote(const Part* part) { queue_.promote(part); }
  Counters counters() const;
  std::vector<Outstanding> outstanding(int64_t now_ns) const;
  // True when a part of a ticket has a block that the kernel has held for `limit_ns`, or waits for
  // a device all of whose blocks are such.
  bool is_stuck(const Part& part, int64_t now_ns, int64_t limit_ns) const;

  // Mutex free.
  void wake(size_t num_blocks) { backend_->wake(num_blocks); }
  void release_throttle();
  bool abandon();  // see Backend::abandon
  void stop();
  const std::string& backend_name() const { return backend_name_; }
  const std::string& backend_reason() const { return backend_reason_; }

 private:
  size_t take(Block** blocks, size_t max_blocks) override;
  void finish(Block* block, int64_t result) override;

  void start(BackendKind kind, const EngineConfig& config, const std::string& reason);
  bool judge(Block* block, int64_t result) const;
  void leave_kernel(Block* block);
  void deliver(Block* block);

  // Mutex held.
  Block* cut_block();
  void account(const Block& block, int64_t now_ns);

  Hub& hub_;
  const uint64_t block_size_;
  std::vector<Block> blocks_;  // all there will ever be: the depth
  std::vector<Block*> free_;
  std::deque<Block*> continued_;  // lent-out blocks that need another attempt
  Queue queue_;
  uint64_t num_cut_ = 0;
  Counters counters_{};
  int64_t busy_since_ns_ = 0;

  std::string backend_name_;
  std::string backend_reason_;
  std::unique_ptr<Throttle> throttle_;
  std::unique_ptr<PageCacheSweeper> sweeper_;
  std::unique_ptr<Backend> backend_;  // last: its threads use the rest
};

}  // namespace infinity::aio
