// Back end of io_uring: one thread makes, feeds and empties the ring. Other threads wake it through
// an eventfd that the ring itself reads, so that it sleeps in a single place.
//
// No SQPOLL (it burns a core that the optimizer needs), no IOPOLL (needs nvme.poll_queues at module
// load and forbids the wake-up read).
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

// The kernel holds a longer batch back until its last request is built, while the device idles.
constexpr size_t kSubmitBatch = 2;
constexpr uint64_t kWakeTag = 0;  // user_data of the eventfd read; a block's is its address

class UringBackend final : public Backend {
 public:
  UringBackend(BlockSource& source, uint32_t queue_depth)
      : source_(source), queue_depth_(queue_depth), batch_(queue_depth) {
    wake_fd_ = os::event_create();
    if (wake_fd_ < 0) throw IoFailure(-wake_fd_, "start", {}, 0, 0, "eventfd failed");
    try {
      // The ring belongs to the thread that makes it, so the thread reports how that went.
      auto started = std::make_shared<std::promise<std::string>>();
      std::future<std::string> flags = started->get_future();
      thread_ = std::thread([this, started] { run(*started); });
      flags_ = flags.get();
    } catch (const std::system_error& error) {
      close_all();
      throw IoFailure(error.code().value(), "start", {}, 0, 0, "cannot start the I/O thread");
    } catch (...) {
      close_all();
      throw;
    }
  }
  ~UringBackend() override {
    stop();
    close_all();
  }

  void wake(size_t) override { os::event_signal(wake_fd_); }

  void stop() override {
    stopped_.store(true, std::memory_order_release);
    if (!thread_.joinable()) return;
    os::event_signal(wake_fd_);
    thread_.join();
  }

  // The thread ends by itself when the kernel lets go. Until then the ring, its memory and this
  // object are its own.
  bool abandon() override {
    stopped_.store(true, std::memory_order_release);
    os::event_signal(wake_fd_);
    thread_.detach();
    return false;
  }

  std::string description() const override { return flags_; }

 private:
  void close_all() {
    if (thread_.joinable()) thread_.join();
    os::close_fd(wake_fd_);
  }

  void run(std::promise<std::string>& started) {
    os::prepare_native_thread("infinity-aio");
    std::unique_ptr<uring::Ring> ring;
    try {
      ring = std::make_unique<uring::Ring>(queue_depth_ + 1);  // and one for the wake-up read
      started.set_value(ring->flag_names());
    } catch (...) {
      started.set_exception(std::current_exception());
      return;
    }
    serve(*ring);
  }

  void serve(uring::Ring& ring) {
    while (true) {
      const bool stopping = stopped_.load(std::memory_order_acquire);
      if (!armed_ && !stopping) {
        ring.prepare(uring::kOpRead, wake_fd_, reinterpret_cast<uint64_t>(&wake_count_),
                     sizeof wake_count_, 0, kWakeTag);
        armed_ = true;
      }
      feed(ring);
      // The wake-up read is waited for too: the kernel must not write into a dead object.
      if (stopping && num_lent_ == 0 && !armed_) return;
      const int result = ring.enter(1);
      uring::Completion completion;
      while (ring.reap(&completion)) complete(completion);
      if (result < 0 && result != -EINTR) recover(ring, result);
    }
  }

  void feed(uring::Ring& ring) {
    const size_t num_taken = source_.take(batch_.data(), queue_depth_ - num_lent_);
    for (size_t i = 0; i < num_taken; ++i) {
      const Block& block = *batch_[i];
      ring.prepare(block.op == Op::read ? uring::kOpRead : uring::kOpWrite, block.file->fd(),
                   block.address + block.done, static_cast<uint32_t>(block.end - block.done),
                   block.offset + block.done, reinterpret_cast<uint64_t>(batch_[i]));
      // An error shows again at the next enter, which handles it.
      if (i % kSubmitBatch == kSubmitBatch - 1) ring.enter(0);
    }
    num_lent_ += num_taken;
  }

  void complete(const uring::Completion& completion) {
    if (completion.user_data == kWakeTag) {
      armed_ = false;
      if (completion.result < 0) os::sleep_ms(1);  // never seen; must not become a busy loop
      return;
    }
    --num_lent_;
    source_.finish(reinterpret_cast<Block*>(completion.user_data), completion.result);
  }

  // The system call itself failed. What the kernel did not take is handed back with the error (the
  // engine retries EAGAIN and gives up in the end); what it did take can only be waited for.
  void recover(uring::Ring& ring, int error) {
    const int reported = error == -EBUSY ? -EAGAIN : error;
    uint64_t user_data = 0;
    while (ring.take_back(&user_data)) complete({user_data, reported, 0});
    os::sleep_ms(1);
  }

  BlockSource& source_;
  const uint32_t queue_depth_;
  std::vector<Block*> batch_;
  int wake_fd_ = -1;
  std::atomic<bool> stopped_{false};
  std::string flags_;

  // The I/O thread's own.
  uint64_t wake_count_ = 0;
  bool armed_ = false;
  size_t num_lent_ = 0;

  std::thread thread_;
};

}  // namespace

std::unique_ptr<Backend> make_uring_backend(BlockSource& source, uint32_t queue_depth) {
  return std::make_unique<UringBackend>(source, queue_depth);
}

}  // namespace infinity::aio
