// Throttle: simulates a slow disk by delaying the completion of transferred blocks. For tests.
//
// One virtual clock is shared by all blocks and both directions. Each block advances it by
// length / rate, starting no earlier than the start of the block, and is completed when real time
// reaches it. One thread waits by timed sleeps.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

#include "backend.h"

namespace infinity::aio {

class Throttle {
 public:
  // `complete` is called by the throttle's thread, without its mutex held.
  Throttle(uint64_t bytes_per_s, std::function<void(Block*)> complete);
  ~Throttle();

  void add(Block* block);
  void disable();  // completes delayed and later blocks without delay
  void stop();     // disables, completes delayed blocks and joins the thread; not thread-safe

 private:
  struct Delayed {
    Block* block;
    int64_t due_ns;
  };

  void run();

  const uint64_t bytes_per_s_;
  const std::function<void(Block*)> complete_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Delayed> delayed_;  // sorted by due_ns, since the clock is monotonic
  int64_t clock_ns_ = 0;
  bool disabled_ = false;
  bool stopped_ = false;
  std::thread thread_;  // last: uses the other members
};

}  // namespace infinity::aio
