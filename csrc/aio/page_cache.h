// PageCacheSweeper: removes the pages of buffered transfers from the page cache, which would
// otherwise take memory that the host's budget does not account for.
//
// Each transferred block passes through the sweeper before it is completed. Pages that were read
// are dropped immediately. For pages that were written, write-back is started immediately; they can
// be dropped only when clean, so the range is appended to a list of dirty ranges. If the list
// exceeds kMaxDirtyBytes, the oldest ranges are written back synchronously and dropped. The page
// cache thus holds the dirty ranges and the blocks in flight only, and a writer faster than the
// device is throttled here, not by the kernel's dirty limits. An idle sweeper empties the list.
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
  static constexpr uint64_t kMaxDirtyBytes = 32u << 20;

  // `on_swept` is called by the sweeper's thread, without its mutex held.
  explicit PageCacheSweeper(std::function<void(Block*)> on_swept);
  ~PageCacheSweeper();

  // Queues a block transferred through the page cache. The first call starts the thread. Returns
  // false, without queueing the block, if no thread can be started or after detach().
  bool add(Block* block);
  // Sweeps the queued blocks, writes back and drops the dirty ranges, and joins the thread.
  // Idempotent, not thread-safe.
  void stop();
  // Detaches the thread, which ends after the same work. The object must not be destroyed then.
  void detach();

 private:
  struct Range {
    std::shared_ptr<File> file;
    uint64_t offset;
    uint64_t length;
  };
  struct Item {
    Block* block;
    Range range;
  };

  void run();
  void flush_until(uint64_t limit_bytes);
  void sweep(const Item& item);

  const std::function<void(Block*)> on_swept_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Item> items_;
  bool stopped_ = false;
  bool detached_ = false;

  // Accessed by the sweeper's thread only.
  std::deque<Range> dirty_ranges_;
  uint64_t dirty_bytes_ = 0;

  std::thread thread_;
};

}  // namespace infinity::aio
