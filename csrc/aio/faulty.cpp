// Fault-injecting back end. It forwards blocks between a lane and a real back end and modifies
// blocks and results according to Faults.
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
// Time for the real back end to finish its blocks in abandon().
constexpr auto kAbandonTimeout = std::chrono::seconds(1);

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
      is_abandoned_ = true;  // later attempts do not become stuck
      stuck.swap(stuck_);
    }
    for (Block* block : stuck) {
      block->reason = "an injected fault held the block until the engine was closed";
      source_.finish(block, -ETIMEDOUT);
    }
    std::unique_lock lock(mutex_);
    const bool is_drained =
        changed_.wait_for(lock, kAbandonTimeout, [this] { return num_inner_ == 0; });
    lock.unlock();
    return is_drained || inner_->abandon();
  }

  std::string description() const override {
    return inner_->description() + ", faults of seed " + std::to_string(faults_.seed);
  }

 private:
  struct Delayed {
    Block* block;
    int64_t result;
    int64_t due_ns;
    bool is_reordered;  // return the result when another block finishes, if that is before due_ns
  };

  size_t take(Block** blocks, size_t max_blocks) override {
    size_t num_forwarded = 0;
    while (num_forwarded < max_blocks) {
      const size_t num_taken = source_.take(blocks + num_forwarded, max_blocks - num_forwarded);
      if (num_taken == 0) break;
      const size_t end = num_forwarded + num_taken;
      for (size_t i = num_forwarded; i < end; ++i) {
        if (inject_before(blocks[i])) blocks[num_forwarded++] = blocks[i];
      }
    }
    const std::lock_guard lock(mutex_);
    num_inner_ += num_forwarded;
    return num_forwarded;
  }

  // Applies the faults that precede a transfer. Returns false if the block must not be forwarded to
  // the real back end.
  bool inject_before(Block* block) {
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
    if (fault == Fault::partial) shorten(block);
    return true;
  }

  // Shortens the attempt to a nonzero multiple of the alignment, like a real short transfer.
  void shorten(Block* block) const {
    const uint64_t step =
        std::max(block->file->offset_alignment(), block->file->memory_alignment());
    const uint64_t num_steps = (block->end - block->done) / step;
    if (num_steps < 2) return;
    block->end = block->done + step * (1 + faults_.random_below(*block, 3, num_steps - 1));
  }

  void finish(Block* block, int64_t result) override {
    const Fault fault = faults_.choose(*block);
    if (fault == Fault::flip && result > 0) {
      const auto bit = faults_.random_below(*block, 4, static_cast<uint64_t>(result) * 8);
      auto* bytes = reinterpret_cast<uint8_t*>(block->address) + block->done;
      bytes[bit / 8] = static_cast<uint8_t>(bytes[bit / 8] ^ (1u << (bit % 8)));
    }
    std::vector<Delayed> reordered;
    {
      const std::lock_guard lock(mutex_);
      --num_inner_;
      if (fault == Fault::delay || fault == Fault::reorder) {
        const uint64_t delay_ms = 1 + faults_.random_below(*block, 5, kMaxDelayMs);
        delayed_.push_back({block, result,
                            os::monotonic_ns() + static_cast<int64_t>(delay_ms) * kMillisecond,
                            fault == Fault::reorder});
        changed_.notify_all();
        return;
      }
      reordered = extract_delayed([](const Delayed& delayed) { return delayed.is_reordered; });
      if (num_inner_ == 0) changed_.notify_all();
    }
    source_.finish(block, result);
    for (const Delayed& delayed : reordered) source_.finish(delayed.block, delayed.result);
  }

  // Removes and returns the delayed results for which `is_selected` is true. Requires mutex_.
  std::vector<Delayed> extract_delayed(const std::function<bool(const Delayed&)>& is_selected) {
    std::vector<Delayed> found;
    std::erase_if(delayed_, [&](const Delayed& delayed) {
      if (!is_selected(delayed)) return false;
      found.push_back(delayed);
      return true;
    });
    return found;
  }

  void run_timer() {
    os::prepare_native_thread("infinity-fault");
    std::unique_lock lock(mutex_);
    while (true) {
      const int64_t now_ns = os::monotonic_ns();
      const std::vector<Delayed> due = extract_delayed(
          [&](const Delayed& delayed) { return stopped_ || delayed.due_ns <= now_ns; });
      if (!due.empty()) {
        lock.unlock();
        for (const Delayed& delayed : due) source_.finish(delayed.block, delayed.result);
        inner_->wake(due.size());  // it may be asleep; see BlockSource::finish
        lock.lock();
      } else if (stopped_) {
        return;
      } else if (delayed_.empty()) {
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
  std::vector<Delayed> delayed_;  // results not yet returned to the lane
  bool is_abandoned_ = false;
  std::vector<Block*> stuck_;  // not forwarded to the real back end
  size_t num_inner_ = 0;       // blocks held by the real back end
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
