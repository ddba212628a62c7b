#include "page_cache.h"

#include <cerrno>
#include <system_error>
#include <utility>

#include "os.h"

namespace infinity::aio {
namespace {

// The kernel drops whole folios, and keeps those that extend beyond the range. Folios have up to
// 2 MiB, so drop() extends the range to multiples of that. Dirty pages within it are not affected.
constexpr uint64_t kFolioBytes = 2u << 20;

void drop(const File& file, uint64_t offset, uint64_t length) {
  const uint64_t begin = offset - offset % kFolioBytes;
  const uint64_t end = (offset + length + kFolioBytes - 1) / kFolioBytes * kFolioBytes;
  os::drop_pages(file.fd(), begin, end - begin);
}

}  // namespace

PageCacheSweeper::PageCacheSweeper(std::function<void(Block*)> on_swept)
    : on_swept_(std::move(on_swept)) {}

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
  items_.push_back({block, {block->file, block->offset, block->length}});
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
    if (!items_.empty()) {
      const Item item = std::move(items_.front());
      items_.pop_front();
      lock.unlock();
      sweep(item);
      lock.lock();
    } else if (!dirty_ranges_.empty()) {
      lock.unlock();
      flush_until(dirty_bytes_ - dirty_ranges_.front().length);  // one range: new items go first
      lock.lock();
    } else if (stopped_) {
      return;
    } else {
      changed_.wait(lock);
    }
  }
}

void PageCacheSweeper::sweep(const Item& item) {
  const auto& [file, offset, length] = item.range;
  if (item.block->op == Op::read) {
    drop(*file, offset, length);
  } else {
    if (file->has_range_sync()) {
      file->record_write_back(os::start_write_back(file->fd(), offset, length));
    }
    dirty_ranges_.push_back(item.range);
    dirty_bytes_ += length;
    if (dirty_bytes_ > kMaxDirtyBytes) flush_until(kMaxDirtyBytes / 2);
  }
  if (const int error = file->write_back_error(); error != 0 && item.block->error == 0) {
    item.block->error = error;
    item.block->reason = "an earlier write-back of this file failed";
  }
  on_swept_(item.block);
}

// Writes back and drops the oldest dirty ranges until at most `limit_bytes` remain. The kernel
// reports a write-back error only once per open file, and here it is consumed: record_write_back()
// stores it for later transfers and sync().
void PageCacheSweeper::flush_until(uint64_t limit_bytes) {
  const File* synced = nullptr;
  while (dirty_bytes_ > limit_bytes) {
    const Range range = std::move(dirty_ranges_.front());
    dirty_ranges_.pop_front();
    dirty_bytes_ -= range.length;
    const int fd = range.file->fd();
    if (range.file->has_range_sync()) {
      range.file->record_write_back(os::finish_write_back(fd, range.offset, range.length));
    } else if (synced != range.file.get()) {
      range.file->record_write_back(os::data_sync(fd));  // covers all ranges of this file
      synced = range.file.get();
    }
    drop(*range.file, range.offset, range.length);
  }
}

}  // namespace infinity::aio
