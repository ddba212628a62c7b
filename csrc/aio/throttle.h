// An artificially slow disk, for tests of overlap: finished blocks are delivered late.
//
// One virtual clock is shared by all blocks and directions. A block moves it forward by
// length / rate, starting no earlier than the block itself did, and is delivered when real time has
// caught up. Waiting is a timed sleep of one thread; no processor time is burnt.
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
  // `deliver` is called from the throttle's own thread, without its lock held.
  Throttle(uint64_t bytes_per_s, std::function<void(Block*)> deliver);
  ~Throttle();

  void add(Block* block);
  void release();  // from now on everything is delivered at once
  void stop();     // delivers what is left and joins the thread; one caller at a time

 private:
  struct Delayed {
    Block* block;
    int64_t due_ns;
  };

  void run();

  const uint64_t bytes_per_s_;
  const std::function<void(Block*)> deliver_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Delayed> delayed_;  // the clock never goes back, so this is ordered by due_ns
  int64_t clock_ns_ = 0;
  bool released_ = false;
  bool stopped_ = false;
  std::thread thread_;  // last: starts when the rest is ready
};

}  // namespace infinity::aio
