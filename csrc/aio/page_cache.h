// Keeps buffered transfers out of the page cache, which would eat the host's memory budget.
//
// A finished block passes through here before it is delivered. What was read is dropped at once.
// Of what was written, the write-back is started at once; pages can only be dropped once they are
// clean, so written ranges join a trail, and when the trail is longer than kTrailBytes the oldest
// ones are waited for and dropped. So the cache holds the trail and what is in flight, no more, and
// a writer faster than the device waits here and not in the kernel's own throttle. With nothing
// else to do the trail is worked off to its end.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include "backend.h"

namespace infinity::aio {

class PageCacheSweeper {
 public:
  static constexpr uint64_t kTrailBytes = 32u << 20;

  // `pass_on` is called from the sweeper's own thread, without its lock held.
  explicit PageCacheSweeper(std::function<void(Block*)> pass_on);
  ~PageCacheSweeper();

  // The block was moved through the page cache. Starts the thread when there is none; false: the
  // machine gives none, pass the block on yourself.
  bool add(Block* block);
  void stop();    // passes on what is left, works off the trail, joins; one caller at a time
  void detach();  // lets the thread go on alone; this object must then live for ever

 private:
  struct Range {
    std::shared_ptr<File> file;
    uint64_t offset;
    uint64_t length;
  };
  struct Arrival {
    Block* block;
    Range range;
  };

  void run();
  void shorten_trail(uint64_t limit_bytes);
  void sweep(const Arrival& arrival);

  const std::function<void(Block*)> pass_on_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Arrival> arrivals_;
  bool stopped_ = false;
  bool detached_ = false;

  // The thread's own.
  std::deque<Range> trail_;
  uint64_t trail_bytes_ = 0;

  std::thread thread_;
};

}  // namespace infinity::aio
