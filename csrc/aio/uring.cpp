// io_uring back end. One thread creates the ring, submits blocks and reaps completions. Other
// threads wake it through an eventfd with a pending read in the ring, so io_uring_enter is its only
// blocking call.
//
// SQPOLL is not used, since it occupies a core that the optimizer needs; nor is IOPOLL, which needs
// nvme.poll_queues at module load and does not support the read of the eventfd.
#include <atomic>
#include <cerrno>
#include <exception>
#include <future>
#include <memory>
#include <system_error>
#include <thread>
#include <vector>

#include "backend.h"
#include "error.h"
#include "os.h"
#include "ring.h"

namespace infinity::aio {
namespace {

// Entries per io_uring_enter. The kernel holds back larger batches until their last request is
// built, which leaves the device idle.
constexpr size_t kSubmitBatch = 2;
constexpr uint64_t kWakeTag = 0;  // user_data of the eventfd read; for blocks it is their address

class UringBackend final : public Backend {
 public:
  UringBackend(BlockSource& source, uint32_t queue_depth)
      : source_(source), queue_depth_(queue_depth), batch_(queue_depth) {
    wake_fd_ = os::event_create();
    if (wake_fd_ < 0) throw IoFailure(-wake_fd_, "start", {}, 0, 0, "eventfd failed");
    try {
      // The ring must be created by its only user, the I/O thread, which reports the result.
      auto started = std::make_shared<std::promise<std::string>>();
      std::future<std::string> flags = started->get_future();
      thread_ = std::thread([this, started] { run(*started); });
      flags_ = flags.get();
    } catch (const std::system_error& error) {
      join_and_close();
      throw IoFailure(error.code().value(), "start", {}, 0, 0, "cannot start the I/O thread");
    } catch (...) {
      join_and_close();
      throw;
    }
  }
  ~UringBackend() override {
    stop();
    join_and_close();
  }

  void wake(size_t) override { os::event_signal(wake_fd_); }

  void stop() override {
    stopped_.store(true, std::memory_order_release);
    if (!thread_.joinable()) return;
    os::event_signal(wake_fd_);
    thread_.join();
  }

  // The detached thread ends when the kernel has completed all requests. Until then it uses the
  // ring, its memory and this object.
  bool abandon() override {
    stopped_.store(true, std::memory_order_release);
    os::event_signal(wake_fd_);
    thread_.detach();
    return false;
  }

  std::string description() const override { return flags_; }

 private:
  void join_and_close() {
    if (thread_.joinable()) thread_.join();
    os::close_fd(wake_fd_);
  }

  void run(std::promise<std::string>& started) {
    os::prepare_native_thread("infinity-aio");
    std::unique_ptr<uring::Ring> ring;
    try {
      ring = std::make_unique<uring::Ring>(queue_depth_ + 1);  // + 1 for the eventfd read
      started.set_value(ring->flag_names());
    } catch (...) {
      started.set_exception(std::current_exception());
      return;
    }
    run_loop(*ring);
  }

  void run_loop(uring::Ring& ring) {
    while (true) {
      const bool stopping = stopped_.load(std::memory_order_acquire);
      if (!wake_armed_ && !stopping) {
        ring.prepare(uring::kOpRead, wake_fd_, reinterpret_cast<uint64_t>(&wake_count_),
                     sizeof wake_count_, 0, kWakeTag);
        wake_armed_ = true;
      }
      submit_blocks(ring);
      // Wait for the eventfd read as well, since the kernel writes to wake_count_.
      if (stopping && num_in_flight_ == 0 && !wake_armed_) return;
      const int result = ring.enter(1);
      uring::Completion completion;
      while (ring.reap(&completion)) handle_completion(completion);
      if (result < 0 && result != -EINTR) handle_enter_error(ring, result);
    }
  }

  void submit_blocks(uring::Ring& ring) {
    const size_t num_taken = source_.take(batch_.data(), queue_depth_ - num_in_flight_);
    for (size_t i = 0; i < num_taken; ++i) {
      const Block& block = *batch_[i];
      ring.prepare(block.op == Op::read ? uring::kOpRead : uring::kOpWrite, block.file->fd(),
                   block.address + block.done, static_cast<uint32_t>(block.end - block.done),
                   block.offset + block.done, reinterpret_cast<uint64_t>(batch_[i]));
      // Errors are ignored here: the call in run_loop() returns them again.
      if (i % kSubmitBatch == kSubmitBatch - 1) ring.enter(0);
    }
    num_in_flight_ += num_taken;
  }

  void handle_completion(const uring::Completion& completion) {
    if (completion.user_data == kWakeTag) {
      wake_armed_ = false;
      if (completion.result < 0) os::sleep_ms(1);  // unexpected; avoids a busy loop
      return;
    }
    --num_in_flight_;
    source_.finish(reinterpret_cast<Block*>(completion.user_data), completion.result);
  }

  // Handles a failed io_uring_enter. Finishes the entries that the kernel did not consume with the
  // error (the lane retries EAGAIN a limited number of times); the others are still in flight.
  void handle_enter_error(uring::Ring& ring, int error) {
    const int reported = error == -EBUSY ? -EAGAIN : error;
    uint64_t user_data = 0;
    while (ring.pop_unsubmitted(&user_data)) handle_completion({user_data, reported, 0});
    os::sleep_ms(1);
  }

  BlockSource& source_;
  const uint32_t queue_depth_;
  std::vector<Block*> batch_;
  int wake_fd_ = -1;
  std::atomic<bool> stopped_{false};
  std::string flags_;

  // Accessed by the I/O thread only.
  uint64_t wake_count_ = 0;   // target of the eventfd read
  bool wake_armed_ = false;   // the eventfd read is pending
  size_t num_in_flight_ = 0;  // blocks

  std::thread thread_;
};

}  // namespace

std::unique_ptr<Backend> make_uring_backend(BlockSource& source, uint32_t queue_depth) {
  return std::make_unique<UringBackend>(source, queue_depth);
}

}  // namespace infinity::aio
