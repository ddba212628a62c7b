#include <atomic>
#include <thread>

#include "support.h"

using namespace infinity::aio;
using namespace infinity::aio::testing;

TEST(cancel_removes_queued_blocks) {
  with_each_backend([](BackendKind backend) {
    EngineConfig config = small_config(backend);
    config.queue_depth = 1;
    config.slow_bytes_per_s = 100 * kBlock;
    const auto engine = Engine::start(config);
    Scratch scratch(32 * kBlock);
    Buffer buffer(32 * kBlock);
    const auto submit = [&] {
      return engine->submit(Op::read, {{scratch.file, 0, 32 * kBlock, buffer.address()}});
    };
    const auto started = submit();
    const auto waiting = submit();
    CHECK(waiting->cancel());
    CHECK(waiting->done());
    CHECK(outcome(*waiting) == ECANCELED);
    while (engine->outstanding().empty()) std::this_thread::yield();
    CHECK(!started->cancel());  // one block is in flight
    CHECK(outcome(*started) == ECANCELED);
    CHECK(started->cancel());
    CHECK(engine->counters().total.requests[0] < 5);
    CHECK(engine->counters().total.queued_blocks == 0);
    close(*engine);
  });
}

TEST(cancel_races_with_promote_and_wait) {
  with_each_backend([](BackendKind backend) {
    const auto engine = Engine::start(small_config(backend));
    Scratch scratch(8 * kBlock);
    Buffer buffer(8 * kBlock);
    for (int turn = 0; turn < 60; ++turn) {
      const auto ticket =
          engine->submit(Op::read, {{scratch.file, 0, 8 * kBlock, buffer.address()}},
                         static_cast<Priority>(turn % 3));
      std::thread promoter([&] { ticket->promote(); });
      std::thread canceller([&] {
        if (turn % 2 == 1) std::this_thread::sleep_for(std::chrono::microseconds(10 * turn));
        if (ticket->cancel()) CHECK(ticket->done() || outcome(*ticket) >= 0);
      });
      const int error = outcome(*ticket);
      promoter.join();
      canceller.join();
      CHECK(error == 0 || error == ECANCELED);
    }
    CHECK(engine->counters().total.in_flight_blocks == 0);
    close(*engine);
  });
}
