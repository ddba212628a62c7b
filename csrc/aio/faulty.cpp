// A back end that goes wrong on purpose: it stands between a lane and a real back end, passes
// blocks on to that and alters what passes. See faults.h for what and when.
#include <algorithm>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "backend.h"
#include "error.h"
#include "faults.h"
#include "os.h"

namespace infinity::aio {
namespace {

constexpr int64_t kMillisecond = 1'000'000;
constexpr uint64_t kMaxDelayMs = 20;
constexpr auto kPatience = std::chrono::seconds(1);  // for a sound device, when giving up

class FaultyBackend final : public Backend, private BlockSource {
 public:
  FaultyBackend(BlockSource& source, const Faults& faults, const MakeBackend& make)
      : source_(source), faults_(faults) {
    try {
      timer_ = std::thread([this] { run_timer(); });
    } catch (const std::system_error& error) {
      throw IoFailure(error.code().value(), "start", {}, 0, 0, "cannot start the fault thread");
    }
    try {
      inner_ = make(*this);
    } catch (...) {
      stop_timer();
      throw;
    }
  }
  ~FaultyBackend() override { stop(); }

  void wake(size_t num_blocks) override { inner_->wake(num_blocks); }

  void stop() override {
    stop_timer();
    inner_->stop();
  }

  bool abandon() override {
    std::vector<Block*> stuck;
    {
      std::unique_lock lock(mutex_);
      is_abandoned_ = true;  // what comes back for the rest must not stick again
      stuck.swap(stuck_);
    }
    for (Block* block : stuck) {
      block->reason = "it was stuck until the engine was closed";
      source_.finish(block, -ETIMEDOUT);
    }
    std::unique_lock lock(mutex_);
    const bool is_sound = changed_.wait_for(lock, kPatience, [this] { return num_inner_ == 0; });
    lock.unlock();
    return is_sound || inner_->abandon();
  }

  std::string description() const override {
    return inner_->description() + ", faults of seed " + std::to_string(faults_.seed);
  }

 private:
  struct Held {
    Block* block;
    int64_t result;
    int64_t due_ns;
    bool until_next;  // or until another block finishes
  };

  size_t take(Block** blocks, size_t max_blocks) override {
    size_t num_kept = 0;
    while (num_kept < max_blocks) {
      const size_t num_taken = source_.take(blocks + num_kept, max_blocks - num_kept);
      if (num_taken == 0) break;
      const size_t end = num_kept + num_taken;
      for (size_t i = num_kept; i < end; ++i) {
        if (admit(blocks[i])) blocks[num_kept++] = blocks[i];
      }
    }
    const std::lock_guard lock(mutex_);
    num_inner_ += num_kept;
    return num_kept;
  }

  // False: the real back end must not see this block.
  bool admit(Block* block) {
    const Fault fault = faults_.choose(*block);
    if (fault == Fault::eio || fault == Fault::enospc) {
      source_.finish(block, fault == Fault::eio ? -EIO : -ENOSPC);
      return false;
    }
    if (fault == Fault::stuck) {
      const std::lock_guard lock(mutex_);
      if (is_abandoned_) return true;
      stuck_.push_back(block);
      return false;
    }
    if (fault == Fault::cut_short) shorten(block);
    return true;
  }

  // Leaves at least one aligned step, as a device does.
  void shorten(Block* block) const {
    const uint64_t step =
        std::max(block->file->offset_alignment(), block->file->memory_alignment());
    const uint64_t num_steps = (block->end - block->done) / step;
    if (num_steps < 2) return;
    block->end = block->done + step * (1 + faults_.number(*block, 3, num_steps - 1));
  }

  void finish(Block* block, int64_t result) override {
    const Fault fault = faults_.choose(*block);
    if (fault == Fault::flip && result > 0) {
      const auto bit = faults_.number(*block, 4, static_cast<uint64_t>(result) * 8);
      auto* bytes = reinterpret_cast<uint8_t*>(block->address) + block->done;
      bytes[bit / 8] = static_cast<uint8_t>(bytes[bit / 8] ^ (1u << (bit % 8)));
    }
    std::vector<Held> overtaken;
    {
      const std::lock_guard lock(mutex_);
      --num_inner_;
      if (fault == Fault::delay || fault == Fault::reorder) {
        const uint64_t delay_ms = 1 + faults_.number(*block, 5, kMaxDelayMs);
        held_.push_back({block, result,
                         os::monotonic_ns() + static_cast<int64_t>(delay_ms) * kMillisecond,
                         fault == Fault::reorder});
        changed_.notify_all();
        return;
      }
      overtaken = take_held([](const Held& held) { return held.until_next; });
      if (num_inner_ == 0) changed_.notify_all();
    }
    source_.finish(block, result);
    for (const Held& held : overtaken) source_.finish(held.block, held.result);
  }

  // Pre: the mutex is held.
  std::vector<Held> take_held(const std::function<bool(const Held&)>& wanted) {
    std::vector<Held> found;
    std::erase_if(held_, [&](const Held& held) {
      if (!wanted(held)) return false;
      found.push_back(held);
      return true;
    });
    return found;
  }

  void run_timer() {
    os::prepare_native_thread("infinity-fault");
    std::unique_lock lock(mutex_);
    while (true) {
      const int64_t now_ns = os::monotonic_ns();
      const std::vector<Held> due =
          take_held([&](const Held& held) { return stopped_ || held.due_ns <= now_ns; });
      if (!due.empty()) {
        lock.unlock();
        for (const Held& held : due) source_.finish(held.block, held.result);
        inner_->wake(due.size());  // it may sleep: its own finish() came long ago
        lock.lock();
      } else if (stopped_) {
        return;
      } else if (held_.empty()) {
        changed_.wait(lock);
      } else {
        changed_.wait_for(lock, std::chrono::milliseconds(1));
      }
    }
  }

  void stop_timer() {
    {
      const std::lock_guard lock(mutex_);
      stopped_ = true;
      changed_.notify_all();
    }
    if (timer_.joinable()) timer_.join();
  }

  BlockSource& source_;
  const Faults faults_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Held> held_;  // finished, to be told later
  bool is_abandoned_ = false;
  std::vector<Block*> stuck_;  // never handed to the real back end
  size_t num_inner_ = 0;       // blocks the real back end has
  bool stopped_ = false;
  std::unique_ptr<Backend> inner_;
  std::thread timer_;
};

}  // namespace

std::unique_ptr<Backend> make_faulty_backend(BlockSource& source, const Faults& faults,
                                             const MakeBackend& make) {
  return std::make_unique<FaultyBackend>(source, faults, make);
}

}  // namespace infinity::aio
