#include "page_cache.h"

#include <cerrno>
#include <system_error>
#include <utility>

#include "os.h"

namespace infinity::aio {
namespace {

// Pages are dropped by whole folios, and a folio that sticks out of the range stays. The largest
// are of 2 MiB, so the range is widened to that; what is dirty there stays for its own turn.
constexpr uint64_t kFolioBytes = 2u << 20;

void drop(const File& file, uint64_t offset, uint64_t length) {
  const uint64_t begin = offset - offset % kFolioBytes;
  const uint64_t end = (offset + length + kFolioBytes - 1) / kFolioBytes * kFolioBytes;
  os::drop_pages(file.fd(), begin, end - begin);
}

}  // namespace

PageCacheSweeper::PageCacheSweeper(std::function<void(Block*)> pass_on)
    : pass_on_(std::move(pass_on)) {}

PageCacheSweeper::~PageCacheSweeper() { stop(); }

bool PageCacheSweeper::add(Block* block) {
  const std::lock_guard lock(mutex_);
  if (detached_) return false;
  if (!thread_.joinable()) {
    try {
      thread_ = std::thread([this] { run(); });
    } catch (const std::system_error&) {
      return false;
    }
  }
  arrivals_.push_back({block, {block->file, block->offset, block->length}});
  changed_.notify_one();
  return true;
}

void PageCacheSweeper::stop() {
  {
    const std::lock_guard lock(mutex_);
    stopped_ = true;
    changed_.notify_one();
  }
  if (thread_.joinable()) thread_.join();
}

void PageCacheSweeper::detach() {
  const std::lock_guard lock(mutex_);
  stopped_ = detached_ = true;
  changed_.notify_one();
  if (thread_.joinable()) thread_.detach();
}

void PageCacheSweeper::run() {
  os::prepare_native_thread("infinity-pages");
  std::unique_lock lock(mutex_);
  while (true) {
    if (!arrivals_.empty()) {
      const Arrival arrival = std::move(arrivals_.front());
      arrivals_.pop_front();
      lock.unlock();
      sweep(arrival);
      lock.lock();
    } else if (!trail_.empty()) {
      lock.unlock();
      shorten_trail(trail_bytes_ - trail_.front().length);  // one range, then look again
      lock.lock();
    } else if (stopped_) {
      return;
    } else {
      changed_.wait(lock);
    }
  }
}

void PageCacheSweeper::sweep(const Arrival& arrival) {
  const auto& [file, offset, length] = arrival.range;
  if (arrival.block->op == Op::read) {
    drop(*file, offset, length);
  } else {
    if (file->has_range_sync()) {
      file->note_write_back(os::start_write_back(file->fd(), offset, length));
    }
    trail_.push_back(arrival.range);
    trail_bytes_ += length;
    if (trail_bytes_ > kTrailBytes) shorten_trail(kTrailBytes / 2);
  }
  if (const int error = file->write_back_error(); error != 0 && arrival.block->error == 0) {
    arrival.block->error = error;
    arrival.block->reason = "the device lost earlier bytes of this file";
  }
  pass_on_(arrival.block);
}

// The kernel tells an error of write-back once, to whoever waits first: that is us, so the file
// keeps it for the transfers and the sync() to come.
void PageCacheSweeper::shorten_trail(uint64_t limit_bytes) {
  const File* synced = nullptr;
  while (trail_bytes_ > limit_bytes) {
    const Range range = std::move(trail_.front());
    trail_.pop_front();
    trail_bytes_ -= range.length;
    const int fd = range.file->fd();
    if (range.file->has_range_sync()) {
      range.file->note_write_back(os::finish_write_back(fd, range.offset, range.length));
    } else if (synced != range.file.get()) {
      range.file->note_write_back(os::data_sync(fd));  // writes all the ranges of this file
      synced = range.file.get();
    }
    drop(*range.file, range.offset, range.length);
  }
}

}  // namespace infinity::aio
