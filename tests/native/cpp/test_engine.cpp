// Tests of transfers: sizes, back ends, concurrent submitters, devices, kernel errors.
#include <atomic>
#include <thread>

#include "support.h"

using namespace infinity::aio;
using namespace infinity::aio::testing;

TEST(engine_round_trips_of_many_sizes) {
  with_each_backend([](BackendKind backend) {
    for (const Direct direct : {Direct::off, Direct::automatic}) {
      const auto engine = Engine::start(small_config(backend));
      Scratch scratch(16 * kBlock, direct);
      const uint64_t step = scratch.file->direct() ? 4096 : 1;
      for (const uint64_t length : {step, 3 * step, kBlock, kBlock + step, 3 * kBlock + step}) {
        for (const uint64_t offset : {uint64_t{0}, step, kBlock - step, 5 * kBlock}) {
          Buffer out(length);
          Buffer in(length);
          out.mark(length + offset);
          CHECK(outcome(*engine->submit(Op::write,
                                        {{scratch.file, offset, length, out.address()}})) == 0);
          CHECK(outcome(*engine->submit(Op::read,
                                        {{scratch.file, offset, length, in.address()}})) == 0);
          CHECK(in.is_marked(length + offset, 0, length));
        }
      }
      close(*engine);
    }
  });
}

TEST(engine_accepts_concurrent_submitters) {
  with_each_backend([](BackendKind backend) {
    const auto engine = Engine::start(small_config(backend));
    constexpr uint64_t kRange = 3 * kBlock;
    Scratch scratch(4 * kRange);
    std::atomic<int> num_wrong{0};
    std::vector<std::thread> threads;
    for (uint64_t i = 0; i < 4; ++i) {
      threads.emplace_back([&, i] {
        Buffer out(kRange);
        Buffer in(kRange);
        for (uint64_t turn = 0; turn < 20; ++turn) {
          out.mark(100 * i + turn);
          const auto priority = static_cast<Priority>(turn % 3);
          const std::vector<Segment> write{{scratch.file, i * kRange, kRange, out.address()}};
          const std::vector<Segment> read{{scratch.file, i * kRange, kRange, in.address()}};
          num_wrong += outcome(*engine->submit(Op::write, write, priority)) != 0;
          num_wrong += outcome(*engine->submit(Op::read, read, priority)) != 0;
          num_wrong += !in.is_marked(100 * i + turn, 0, kRange);
          static_cast<void>(engine->counters());
          static_cast<void>(engine->device_counters());
          static_cast<void>(engine->outstanding());
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    CHECK(num_wrong == 0);
    const EngineCounters now = engine->counters();
    CHECK(now.total.bytes[0] == 4 * 20 * kRange);
    CHECK(now.total.bytes[1] == 4 * 20 * kRange);
    CHECK(now.total.in_flight_blocks == 0);
    CHECK(now.total.queued_blocks == 0);
    CHECK(engine->device_counters().size() == 1);
    close(*engine);
  });
}

TEST(engine_spreads_a_ticket_over_devices) {
  // /dev/shm is another file system than the current directory, so it is another device.
  const std::string path = "/dev/shm/native-test-" + std::to_string(::getpid());
  std::shared_ptr<File> memory;
  try {
    memory = File::open(path, true, false, Direct::off);
  } catch (const IoFailure&) {
    return;  // no /dev/shm
  }
  ::unlink(path.c_str());
  memory->allocate(4 * kBlock);
  with_each_backend([&](BackendKind backend) {
    const auto engine = Engine::start(small_config(backend));
    Scratch scratch(4 * kBlock);
    Buffer out(8 * kBlock);
    Buffer in(8 * kBlock);
    out.mark(5);
    const auto both = [&](const Buffer& buffer) {
      return std::vector<Segment>{{memory, 0, 4 * kBlock, buffer.address()},
                                  {scratch.file, 0, 4 * kBlock, buffer.address(4 * kBlock)}};
    };
    CHECK(outcome(*engine->submit(Op::write, both(out))) == 0);
    CHECK(outcome(*engine->submit(Op::read, both(in))) == 0);
    CHECK(in.is_marked(5, 0, in.size()));
    const auto devices = engine->device_counters();
    CHECK(devices.size() == 2);
    for (const DeviceCounters& device : devices) {
      CHECK(device.counters.bytes[0] == 4 * kBlock);
      CHECK(device.counters.requests[1] == 4);
    }
    close(*engine);
  });
}

TEST(engine_raises_kernel_errors) {
  with_each_backend([](BackendKind backend) {
    const auto engine = Engine::start(small_config(backend));
    Scratch scratch(4 * kBlock, Direct::off);
    Buffer buffer(8 * kBlock);
    CHECK(outcome(*engine->submit(Op::read, {{scratch.file, 0, 8 * kBlock, buffer.address()}})) ==
          EIO);
    CHECK(outcome(*engine->submit(Op::read, {{scratch.file, 0, kBlock, 4096}})) == EFAULT);
    const auto full = File::open("/dev/full", false, false, Direct::off);
    CHECK(outcome(*engine->submit(Op::write, {{full, 0, kBlock, buffer.address()}})) == ENOSPC);
    CHECK_THROWS(std::invalid_argument, engine->submit(Op::read, {{scratch.file, 0, kBlock, 0}}));
    close(*engine);
    CHECK_THROWS(IoFailure, engine->submit(Op::read, {}));
  });
}
