// One logical request: a scatter list, over one or more devices, that is done when its last block
// is.
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
struct Finished;

// Order of service. Within a class first come, first served; see queue.h.
enum class Priority : int { urgent = 0, normal = 1, background = 2 };
constexpr size_t kNumPriorities = 3;

struct Segment {
  std::shared_ptr<File> file;
  uint64_t offset;
  uint64_t length;
  uint64_t address;
};

// What of a ticket lies on one device. Guarded by the engine's mutex.
struct Part {
  Lane* lane = nullptr;
  std::vector<Segment> segments;
  size_t next_segment = 0;   // cursor of the first byte not yet cut into a block
  uint64_t next_offset = 0;  // within that segment
  uint64_t num_queued = 0;   // blocks not yet cut
  uint64_t num_in_flight = 0;
};

class Ticket : public std::enable_shared_from_this<Ticket> {
 public:
  Ticket(Op ticket_op, Priority priority, int creator, std::weak_ptr<Engine> engine);

  // Any thread, any time; a ticket outlives its engine.
  bool done() const { return done_.load(std::memory_order_acquire); }
  bool wait_for(std::chrono::nanoseconds time) const;
  // Moves the blocks not yet cut to the end of the urgent queue.
  void promote();
  // Cancels the blocks not yet cut; the ticket fails with ECANCELED. True: nothing moves any more.
  bool cancel();
  // The watchdog: why waiting for this ticket is vain, if it is. See Engine::stuck.
  std::optional<IoFailure> stuck() const;
  // Nobody will wait for it, and the kernel may write to its memory at any time: counts the leak.
  void note_leak();

  // The error of the first failed block, if any. Pre: done().
  const std::optional<IoFailure>& failure() const { return failure_; }
  // Pre: done(). CLOCK_MONOTONIC: queued, first block begun (or over, where none ever was), over.
  std::array<int64_t, 3> times_ns() const;

  const Op op;
  const int process_id;  // only the process that made it can ever see it finish
  uint64_t nbytes = 0;

 private:
  friend class Engine;
  friend class Lane;
  friend struct Finished;

  void announce();

  const std::weak_ptr<Engine> engine_;

  // Guarded by the engine's mutex until done; constant from then on.
  std::vector<Part> parts_;  // fixed once submitted: queues and blocks point into it
  Priority priority_;
  std::optional<IoFailure> failure_;
  bool over_ = false;  // about to be announced
  int64_t submitted_ns_ = 0;
  int64_t started_ns_ = 0;  // 0: no block of it was ever cut
  int64_t finished_ns_ = 0;

  mutable std::mutex mutex_;
  mutable std::condition_variable finished_;
  std::atomic<bool> done_{false};
};

}  // namespace infinity::aio
