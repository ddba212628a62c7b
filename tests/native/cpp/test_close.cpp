#include <sys/wait.h>

#include <atomic>
#include <thread>

#include "support.h"

using namespace infinity::aio;
using namespace infinity::aio::testing;

TEST(close_races_with_submitters_and_waiters) {
  with_each_backend([](BackendKind backend) {
    for (int turn = 0; turn < 15; ++turn) {
      const auto engine = Engine::start(small_config(backend));
      Scratch scratch(8 * kBlock);
      std::atomic<int> num_unexpected{0};
      std::vector<std::thread> threads;
      for (int i = 0; i < 3; ++i) {
        threads.emplace_back([&] {
          Buffer buffer(8 * kBlock);
          try {
            while (true) {
              const int error = outcome(
                  *engine->submit(Op::read, {{scratch.file, 0, 8 * kBlock, buffer.address()}}));
              if (error != 0 && error != ECANCELED) ++num_unexpected;
            }
          } catch (const IoFailure& failure) {
            if (failure.error != ECANCELED) ++num_unexpected;
          }
        });
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(turn % 5));
      std::thread other([&] { close(*engine); });
      close(*engine);
      other.join();
      for (std::thread& thread : threads) thread.join();
      CHECK(num_unexpected == 0);
    }
  });
}

TEST(close_is_prompt_on_a_slow_disk_and_leaks_nothing) {
  Scratch scratch(64 * kBlock);
  Buffer buffer(64 * kBlock);
  const Usage before;
  with_each_backend([&](BackendKind backend) {
    EngineConfig config = small_config(backend);
    config.slow_bytes_per_s = kBlock;  // 64 s
    std::vector<std::shared_ptr<Ticket>> tickets;
    const auto engine = Engine::start(config);
    for (int i = 0; i < 4; ++i) {
      tickets.push_back(
          engine->submit(Op::read, {{scratch.file, 0, 64 * kBlock, buffer.address()}}));
    }
    const auto start = std::chrono::steady_clock::now();
    close(*engine);
    CHECK(std::chrono::steady_clock::now() - start < std::chrono::seconds(5));
    for (const auto& ticket : tickets) CHECK(outcome(*ticket) == ECANCELED);
  });
  CHECK(usage_returns_to(before));
}

TEST(close_runs_when_the_engine_is_dropped) {
  with_each_backend([](BackendKind backend) {
    Scratch scratch(8 * kBlock);
    Buffer buffer(8 * kBlock);
    auto engine = Engine::start(small_config(backend));
    const auto ticket = engine->submit(Op::read, {{scratch.file, 0, 8 * kBlock, buffer.address()}});
    engine.reset();
    CHECK(ticket->done());
    ticket->promote();
    CHECK(ticket->cancel());
  });
}

TEST(close_can_be_interrupted) {
  EngineConfig config = small_config(BackendKind::threads);
  config.num_threads = 1;
  config.faults = Faults::parse("seed=1,kinds=stuck,rate=1");
  config.stuck_after_s = 0.3;
  const auto engine = Engine::start(config);
  Scratch scratch(kBlock);
  Buffer buffer(kBlock);
  const auto ticket = engine->submit(Op::read, {{scratch.file, 0, kBlock, buffer.address()}});
  while (engine->outstanding().empty()) std::this_thread::yield();
  CHECK_THROWS(std::runtime_error, engine->close([] { throw std::runtime_error("a signal"); }));
  CHECK(!ticket->done());
  CHECK_THROWS(IoFailure, close(*engine));
  CHECK(ticket->done());
}

TEST(close_in_a_forked_child_does_nothing) {
  with_each_backend([](BackendKind backend) {
    auto engine = Engine::start(small_config(backend));
    Scratch scratch(kBlock);
    Buffer buffer(kBlock);
    const std::vector<Segment> segments{{scratch.file, 0, kBlock, buffer.address()}};
    CHECK(outcome(*engine->submit(Op::read, segments)) == 0);
    const pid_t child = ::fork();
    if (child == 0) {
      int status = 1;
      try {
        engine->submit(Op::read, segments);
      } catch (const IoFailure& failure) {
        status = failure.error == EPERM ? 0 : 2;
      }
      engine.reset();  // must not join threads that do not exist in the child
      ::_exit(status);
    }
    int status = -1;
    CHECK(::waitpid(child, &status, 0) == child);
    CHECK_WITH(std::to_string(status), status == 0);
    CHECK(outcome(*engine->submit(Op::read, segments)) == 0);
    close(*engine);
  });
}
