#include "throttle.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "os.h"

namespace infinity::aio {

Throttle::Throttle(uint64_t bytes_per_s, std::function<void(Block*)> complete)
    : bytes_per_s_(bytes_per_s), complete_(std::move(complete)), thread_([this] { run(); }) {}

Throttle::~Throttle() { stop(); }

void Throttle::stop() {
  if (!thread_.joinable()) return;
  {
    const std::lock_guard lock(mutex_);
    stopped_ = disabled_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void Throttle::add(Block* block) {
  const double seconds = static_cast<double>(block->length) / static_cast<double>(bytes_per_s_);
  {
    const std::lock_guard lock(mutex_);
    clock_ns_ = std::max(clock_ns_, block->start_ns) + static_cast<int64_t>(seconds * 1e9);
    delayed_.push_back({block, clock_ns_});
  }
  changed_.notify_all();
}

void Throttle::disable() {
  {
    const std::lock_guard lock(mutex_);
    disabled_ = true;
  }
  changed_.notify_all();
}

void Throttle::run() {
  os::prepare_native_thread("infinity-slow");
  std::unique_lock lock(mutex_);
  while (true) {
    if (delayed_.empty()) {
      if (stopped_) return;
      changed_.wait(lock);
      continue;
    }
    const int64_t remaining_ns = delayed_.front().due_ns - os::monotonic_ns();
    if (remaining_ns > 0 && !disabled_) {
      changed_.wait_for(lock, std::chrono::nanoseconds(remaining_ns));
      continue;
    }
    Block* block = delayed_.front().block;
    delayed_.pop_front();
    lock.unlock();
    complete_(block);
    lock.lock();
  }
}

}  // namespace infinity::aio
