// Ticket: one submitted request, a list of segments on one or more devices.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "backend.h"
#include "error.h"

namespace infinity::aio {

class Engine;
class Lane;
struct CompletedTickets;

// Scheduling class; FIFO within a class, see queue.h.
enum class Priority : int { urgent = 0, normal = 1, background = 2 };
constexpr size_t kNumPriorities = 3;

struct Segment {
  std::shared_ptr<File> file;
  uint64_t offset;
  uint64_t length;
  uint64_t address;
};

// The segments of a ticket on one device. Guarded by the engine's mutex.
struct SubRequest {
  Lane* lane = nullptr;
  std::vector<Segment> segments;
  size_t next_segment = 0;   // segment of the first byte not yet split into blocks
  uint64_t next_offset = 0;  // offset of that byte within the segment
  uint64_t num_queued = 0;   // blocks not yet split off
  uint64_t num_in_flight = 0;
};

// A ticket is done when no block of it is queued or in flight. Thread-safe; may outlive its engine.
class Ticket : public std::enable_shared_from_this<Ticket> {
 public:
  Ticket(Op ticket_op, Priority priority, int creator_pid, std::weak_ptr<Engine> engine);

  // The acquire load pairs with the release store in mark_done(): if it returns true, failure() and
  // times_ns() may be read without a lock.
  bool done() const { return done_.load(std::memory_order_acquire); }
  // Waits up to `time` and returns done().
  bool wait_for(std::chrono::nanoseconds time) const;
  // Moves the queued blocks to the end of the urgent class.
  void promote();
  // Cancels the queued blocks; if there were any, the ticket fails with ECANCELED. Returns true if
  // no block is in flight.
  bool cancel();
  // Returns the watchdog's error if waiting for this ticket may not end. See Engine::stuck.
  std::optional<IoFailure> stuck() const;
  // Counts this ticket as leaked: it is dropped while the kernel references its memory.
  void count_leak();

  // Error of the first failed block, if any. Requires done().
  const std::optional<IoFailure>& failure() const { return failure_; }
  // CLOCK_MONOTONIC times of submission, of the start of the first block and of completion. Without
  // a started block, the second equals the third. Requires done().
  std::array<int64_t, 3> times_ns() const;

  const Op op;
  const int process_id;  // of the creator; a forked child never observes completion
  uint64_t nbytes = 0;

 private:
  friend class Engine;
  friend class Lane;
  friend struct CompletedTickets;

  void mark_done();

  const std::weak_ptr<Engine> engine_;

  // Guarded by the engine's mutex. failure_ and the times are constant once done_ is set.
  std::vector<SubRequest> sub_requests_;  // not resized while queues and blocks point into it
  Priority priority_;
  std::optional<IoFailure> failure_;
  bool completed_ = false;  // mark_done() has been scheduled, see CompletedTickets
  int64_t submitted_ns_ = 0;
  int64_t started_ns_ = 0;  // 0 if no block has started
  int64_t finished_ns_ = 0;

  mutable std::mutex mutex_;  // of done_changed_ only
  mutable std::condition_variable done_changed_;
  std::atomic<bool> done_{false};
};

}  // namespace infinity::aio
