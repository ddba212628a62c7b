// Thread-pool back end: each worker thread runs one blocking pread or pwrite at a time. Used where
// io_uring is not permitted, as in most containers.
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "backend.h"
#include "error.h"
#include "os.h"

namespace infinity::aio {
namespace {

class ThreadsBackend final : public Backend {
 public:
  ThreadsBackend(BlockSource& source, uint32_t num_threads)
      : source_(source), num_threads_(num_threads) {
    try {
      for (uint32_t i = 0; i < num_threads; ++i) workers_.emplace_back([this] { run(); });
    } catch (const std::system_error& error) {
      stop();
      throw IoFailure(error.code().value(), "start", {}, 0, 0, "cannot start a worker thread");
    }
  }
  ~ThreadsBackend() override { stop(); }

  void wake(size_t num_blocks) override {
    {
      const std::lock_guard lock(mutex_);
      ++generation_;
    }
    if (num_blocks >= num_threads_) return changed_.notify_all();
    for (size_t i = 0; i < num_blocks; ++i) changed_.notify_one();
  }

  void stop() override {
    {
      const std::lock_guard lock(mutex_);
      stopped_ = true;
    }
    changed_.notify_all();
    for (std::thread& worker : workers_) worker.join();
    workers_.clear();
  }

  // Idle threads end immediately, the others when their system call returns.
  bool abandon() override {
    {
      const std::lock_guard lock(mutex_);
      stopped_ = true;
    }
    changed_.notify_all();
    for (std::thread& worker : workers_) worker.detach();
    workers_.clear();
    return false;
  }

  std::string description() const override {
    return std::to_string(num_threads_) + (num_threads_ == 1 ? " thread" : " threads");
  }

 private:
  static int64_t transfer(const Block& block) {
    auto* address = reinterpret_cast<char*>(block.address) + block.done;
    const size_t length = block.end - block.done;
    const uint64_t offset = block.offset + block.done;
    const int fd = block.file->fd();
    return block.op == Op::read ? os::read_at(fd, address, length, offset)
                                : os::write_at(fd, address, length, offset);
  }

  void run() {
    os::prepare_native_thread("infinity-aio");
    uint64_t seen = 0;
    while (true) {
      {
        const std::lock_guard lock(mutex_);
        seen = generation_;  // read before take(), so that a wake() after it ends the wait below
      }
      Block* block = nullptr;
      while (source_.take(&block, 1) > 0) source_.finish(block, transfer(*block));
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return stopped_ || generation_ != seen; });
      if (stopped_) return;
    }
  }

  BlockSource& source_;
  const uint32_t num_threads_;  // wake() cannot use workers_.size(), since stop() clears it
  std::mutex mutex_;
  std::condition_variable changed_;
  uint64_t generation_ = 0;  // incremented by wake()
  bool stopped_ = false;
  std::vector<std::thread> workers_;
};

}  // namespace

std::unique_ptr<Backend> make_threads_backend(BlockSource& source, uint32_t num_threads) {
  return std::make_unique<ThreadsBackend>(source, num_threads);
}

}  // namespace infinity::aio
