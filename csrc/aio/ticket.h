// One logical request: a scatter list that is done when its last block is.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "backend.h"
#include "error.h"

namespace infinity::aio {

struct Segment {
  std::shared_ptr<File> file;
  uint64_t offset;
  uint64_t length;
  uint64_t address;
};

class Ticket {
 public:
  Ticket(Op ticket_op, std::vector<Segment> list, int creator);

  // Any thread, any time; a ticket outlives its engine.
  bool done() const { return done_.load(std::memory_order_acquire); }
  bool wait_for(std::chrono::nanoseconds time) const;
  // Pre: done(). The error of the first failed block, if any.
  const std::optional<IoFailure>& failure() const { return failure_; }
  int64_t latency_ns() const { return done() ? finished_ns_ - submitted_ns_ : 0; }

  const Op op;
  const int process_id;  // only the process that made it can ever see it finish
  uint64_t nbytes = 0;

 private:
  friend class Engine;

  void announce();

  // Guarded by the engine's mutex until done; constant from then on.
  std::vector<Segment> segments_;
  size_t next_segment_ = 0;   // cursor of the first byte not yet cut into a block
  uint64_t next_offset_ = 0;  // within that segment
  uint64_t num_queued_ = 0;   // blocks not yet cut
  uint64_t num_in_flight_ = 0;
  std::optional<IoFailure> failure_;
  int64_t submitted_ns_ = 0;
  int64_t finished_ns_ = 0;

  mutable std::mutex mutex_;
  mutable std::condition_variable finished_;
  std::atomic<bool> done_{false};
};

}  // namespace infinity::aio
