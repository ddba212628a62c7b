// Lane: queue, blocks, back end and counters of one device. Also the engine's configuration and the
// state that its lanes share.
//
// Invariants: at most `depth` blocks are in flight; a ticket is marked done only when none of its
// blocks is in flight. One mutex per engine guards all lanes. It is never held across a system call
// that may sleep.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "backend.h"
#include "faults.h"
#include "page_cache.h"
#include "queue.h"
#include "throttle.h"
#include "ticket.h"

namespace infinity::aio {

enum class BackendKind { automatic, uring, threads };

struct EngineConfig {
  BackendKind backend = BackendKind::automatic;
  uint64_t block_size = 1 << 20;  // bytes
  uint32_t queue_depth = 8;       // per device
  uint32_t num_threads = 4;       // per device
  uint64_t slow_bytes_per_s = 0;  // per device, see Throttle; 0: not throttled
  double stuck_after_s = 0;       // watchdog limit; 0: no watchdog
  Faults faults{};                // none by default

  int64_t stuck_after_ns() const { return static_cast<int64_t>(stuck_after_s * 1e9); }
};

// Arrays are indexed by Op.
struct Counters {
  uint64_t bytes[2];      // of successful blocks
  uint64_t requests[2];   // completed blocks, including failed ones
  uint64_t queue_ns[2];   // sum over blocks: from submission of the ticket to start of the block
  uint64_t device_ns[2];  // sum over blocks: from start to completion
  uint64_t in_flight_blocks;
  uint64_t queued_blocks;
  int64_t busy_ns;  // wall time with at least one block in flight
};

// Description of a block in flight.
struct Outstanding {
  const Ticket* ticket;  // for comparison only; may dangle
  Op op;
  std::string path;
  uint64_t offset;
  uint64_t length;
  int64_t age_ns;
};

// State shared by all lanes of an engine.
struct SharedState {
  std::mutex mutex;                 // "the engine's mutex"; guards the rest of this struct
  std::condition_variable drained;  // notified when a lane has no block in flight any more
  uint64_t in_flight_blocks = 0;
  int64_t busy_since_ns = 0;
  int64_t busy_ns = 0;
};

// Tickets completed under the engine's mutex. After the mutex is released, notify() marks them done
// and the destructor drops the file references (closing a file may sleep).
struct CompletedTickets {
  std::vector<std::shared_ptr<Ticket>> tickets;
  std::vector<std::vector<SubRequest>> sub_requests;
  void notify();
};

class Lane final : public BlockSource {
 public:
  Lane(SharedState& shared, const EngineConfig& config);  // throws IoFailure

  // The following require the engine's mutex.
  void enqueue(const std::shared_ptr<Ticket>& ticket, SubRequest* sub_request);
  size_t num_startable() const;  // queued blocks for which a free block exists
  // Cancels the queued blocks of a ticket on all lanes. Returns true if there were any.
  static bool cancel_queued(Ticket* ticket);
  // Completes the ticket if none of its blocks is queued or in flight, and appends it to
  // `completed`. At most once per ticket.
  static void complete_if_last(const std::shared_ptr<Ticket>& ticket, CompletedTickets* completed);
  std::vector<std::shared_ptr<Ticket>> queued_tickets() const { return queue_.tickets(); }
  bool is_idle() const { return counters_.in_flight_blocks == 0; }
  void promote(const SubRequest* sub_request) { queue_.promote(sub_request); }
  Counters counters() const;
  std::vector<Outstanding> outstanding(int64_t now_ns) const;
  // Returns true if a block of `sub_request` has been in the kernel for more than `limit_ns`, or if
  // it has queued blocks and all blocks of the lane have been.
  bool is_stuck(const SubRequest& sub_request, int64_t now_ns, int64_t limit_ns) const;

  // The following are called without the engine's mutex.
  void wake(size_t num_blocks) { backend_->wake(num_blocks); }
  void disable_throttle();
  bool abandon();  // see Backend::abandon
  void stop();
  const std::string& backend_name() const { return backend_name_; }
  const std::string& backend_reason() const { return backend_reason_; }

 private:
  size_t take(Block** blocks, size_t max_blocks) override;
  void finish(Block* block, int64_t result) override;

  void start(BackendKind kind, const EngineConfig& config, const std::string& reason);
  bool apply_result(Block* block, int64_t result) const;
  void throttle_or_complete(Block* block);
  void complete(Block* block);

  // Require the engine's mutex.
  Block* split_block();
  void count_completion(const Block& block, int64_t now_ns);

  SharedState& shared_;
  const uint64_t block_size_;
  std::vector<Block> blocks_;  // all blocks of the lane; the size is the depth
  std::vector<Block*> free_;
  std::deque<Block*> retries_;  // blocks in flight that need another attempt
  Queue queue_;
  uint64_t next_serial_ = 0;
  Counters counters_{};
  int64_t busy_since_ns_ = 0;

  std::string backend_name_;
  std::string backend_reason_;
  std::unique_ptr<Throttle> throttle_;
  std::unique_ptr<PageCacheSweeper> sweeper_;
  std::unique_ptr<Backend> backend_;  // last: its threads use the other members
};

}  // namespace infinity::aio
