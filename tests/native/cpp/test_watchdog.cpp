// Tests of the watchdog for requests that never complete.
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>

#include <thread>

#include "support.h"

using namespace infinity::aio;
using namespace infinity::aio::testing;

namespace {

EngineConfig watched_config(BackendKind backend, const char* faults) {
  EngineConfig config = small_config(backend);
  config.stuck_after_s = 0.1;
  config.faults = Faults::parse(faults);
  return config;
}

std::optional<IoFailure> becomes_stuck(const Ticket& ticket) {
  for (int attempt = 0; attempt < 500; ++attempt) {
    if (auto failure = ticket.stuck()) return failure;
    if (ticket.wait_for(std::chrono::milliseconds(10))) return std::nullopt;
  }
  return std::nullopt;
}

}  // namespace

TEST(watchdog_names_outstanding_blocks_and_close_returns) {
  with_each_backend([](BackendKind backend) {
    Scratch scratch(8 * kBlock);
    Buffer buffer(8 * kBlock);
    const Usage before;
    {
      const auto engine = Engine::start(watched_config(backend, "seed=3,kinds=stuck,rate=1"));
      const auto first =
          engine->submit(Op::write, {{scratch.file, kBlock, 7 * kBlock, buffer.address()}});
      const auto second = engine->submit(Op::read, {{scratch.file, 0, kBlock, buffer.address()}});
      const auto failure = becomes_stuck(*first);
      CHECK(failure.has_value());
      CHECK(failure->error == ETIMEDOUT);
      CHECK(failure->offset == kBlock);
      CHECK_WITH(failure->message, failure->message.find("write of 16384 bytes at offset 16384") !=
                                       std::string::npos);
      CHECK_WITH(failure->message, failure->message.find("others") != std::string::npos ||
                                       backend == BackendKind::threads);
      CHECK(!first->done());
      // None of its blocks is in flight, but the device is full of stuck ones.
      CHECK(becomes_stuck(*second).has_value());
      const auto list = engine->outstanding();
      CHECK(!list.empty());
      CHECK(list.front().age_ns >= list.back().age_ns);
      try {
        close(*engine);
        CHECK(false);
      } catch (const IoFailure& late) {
        CHECK(late.error == ETIMEDOUT);
        CHECK_WITH(late.message, late.message.find(scratch.file->path()) != std::string::npos);
      }
      CHECK(first->done());
      CHECK(second->done());
      close(*engine);
    }
    CHECK(usage_returns_to(before));
  });
}

TEST(watchdog_ignores_a_slow_disk) {
  EngineConfig config = watched_config(BackendKind::threads, "");
  config.slow_bytes_per_s = 4 * kBlock;
  const auto engine = Engine::start(config);
  Scratch scratch(2 * kBlock);
  Buffer buffer(2 * kBlock);
  const auto ticket = engine->submit(Op::read, {{scratch.file, 0, 2 * kBlock, buffer.address()}});
  CHECK(!becomes_stuck(*ticket).has_value());
  CHECK(outcome(*ticket) == 0);
  close(*engine);
}

// Reading a pipe without a writer blocks io_uring forever, like a dead device.
TEST(watchdog_abandons_a_stuck_kernel_request) {
  const std::string path = "native-test-fifo-" + std::to_string(::getpid());
  CHECK(::mkfifo(path.c_str(), 0600) == 0);
  const auto pipe = File::open(path, false, false, Direct::off);
  ::unlink(path.c_str());
  Buffer buffer(kBlock);
  std::shared_ptr<Engine> engine;
  try {
    engine = Engine::start(watched_config(BackendKind::uring, ""));
  } catch (const IoFailure&) {
    return;  // io_uring is not permitted
  }
  const Usage before;
  const auto ticket = engine->submit(Op::read, {{pipe, 0, kBlock, buffer.address()}});
  CHECK(becomes_stuck(*ticket).has_value());
  CHECK_THROWS(IoFailure, close(*engine));
  CHECK(!ticket->done());
  CHECK(ticket->stuck().has_value());
  close(*engine);  // raises only once
  engine.reset();  // leaves the ring to the kernel
  CHECK(ticket->stuck().has_value());
  CHECK(!ticket->done());
  // The kernel completes the read later: memory, ticket and thread must still exist.
  const std::vector<uint8_t> bytes(kBlock, 42);
  CHECK(::write(pipe->fd(), bytes.data(), bytes.size()) == static_cast<ssize_t>(kBlock));
  CHECK(outcome(*ticket) == 0);
  CHECK(buffer.data()[kBlock - 1] == 42);
  CHECK(usage_returns_to(before));
}

// userfaultfd memory blocks the read of a thread until its pages are provided. Needs root.
TEST(watchdog_abandons_a_thread_stuck_in_the_kernel) {
  const int faults = static_cast<int>(::syscall(SYS_userfaultfd, O_CLOEXEC));
  if (faults < 0) return;
  void* memory =
      ::mmap(nullptr, kBlock, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  uffdio_api api{UFFD_API, 0, 0};
  uffdio_register range{
      {reinterpret_cast<uint64_t>(memory), kBlock}, UFFDIO_REGISTER_MODE_MISSING, 0};
  CHECK(::ioctl(faults, UFFDIO_API, &api) == 0);
  CHECK(::ioctl(faults, UFFDIO_REGISTER, &range) == 0);
  Scratch scratch(kBlock, Direct::off);
  Buffer source(kBlock);
  source.mark(8);
  const Usage before;
  auto engine = Engine::start(watched_config(BackendKind::threads, ""));
  CHECK(outcome(*engine->submit(Op::write, {{scratch.file, 0, kBlock, source.address()}})) == 0);
  const auto ticket =
      engine->submit(Op::read, {{scratch.file, 0, kBlock, reinterpret_cast<uint64_t>(memory)}});
  CHECK(becomes_stuck(*ticket).has_value());
  CHECK_THROWS(IoFailure, close(*engine));
  engine.reset();
  CHECK(!ticket->done());
  uffdio_zeropage zero{{reinterpret_cast<uint64_t>(memory), kBlock}, 0, 0};
  CHECK(::ioctl(faults, UFFDIO_ZEROPAGE, &zero) == 0);
  CHECK(outcome(*ticket) == 0);
  CHECK(std::memcmp(memory, source.data(), kBlock) == 0);
  CHECK(usage_returns_to(before));
  ::munmap(memory, kBlock);
  ::close(faults);
}
