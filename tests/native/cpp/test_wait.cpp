#include <thread>

#include "support.h"

using namespace infinity::aio;
using namespace infinity::aio::testing;

TEST(wait_for_any_rings_one_bell) {
  with_each_backend([](BackendKind backend) {
    const auto engine = Engine::start(small(backend));
    Scratch scratch(8 * kBlock);
    Buffer buffer(8 * kBlock);
    for (int turn = 0; turn < 30; ++turn) {
      std::vector<std::shared_ptr<Ticket>> tickets;
      for (uint64_t i = 0; i < 4; ++i) {
        tickets.push_back(engine->submit(
            Op::read, {{scratch.file, i * kBlock, kBlock, buffer.address(i * kBlock)}}));
      }
      Bell bell;
      for (const auto& ticket : tickets) ticket->hang(&bell);
      size_t num_done = 0;
      while (num_done < tickets.size()) {
        CHECK(bell.wait_for(std::chrono::seconds(20)));
        num_done = 0;
        for (const auto& ticket : tickets) num_done += ticket->done() ? 1 : 0;
      }
      for (const auto& ticket : tickets) ticket->take_off(&bell);
    }
    close(*engine);
  });
}

TEST(wait_bells_go_while_tickets_finish) {
  const auto engine = Engine::start(small(BackendKind::threads));
  Scratch scratch(kBlock);
  Buffer buffer(kBlock);
  for (int turn = 0; turn < 200; ++turn) {
    const auto ticket = engine->submit(Op::read, {{scratch.file, 0, kBlock, buffer.address()}});
    {
      Bell bell;
      ticket->hang(&bell);
      if (turn % 2 == 0) bell.wait_for(std::chrono::microseconds(turn));
      ticket->take_off(&bell);
    }
    CHECK(outcome(*ticket) == 0);
  }
  close(*engine);
}

TEST(wait_times_out) {
  EngineConfig config = small(BackendKind::threads);
  config.slow_bytes_per_s = 4 * kBlock;
  const auto engine = Engine::start(config);
  Scratch scratch(kBlock);
  Buffer buffer(kBlock);
  const auto ticket = engine->submit(Op::read, {{scratch.file, 0, kBlock, buffer.address()}});
  CHECK(!ticket->wait_for(std::chrono::milliseconds(20)));
  Bell bell;
  ticket->hang(&bell);
  CHECK(!bell.wait_for(std::chrono::milliseconds(20)));
  ticket->take_off(&bell);
  CHECK(ticket->latency_ns() == 0);
  CHECK(outcome(*ticket) == 0);
  CHECK(ticket->latency_ns() > 200'000'000);
  close(*engine);
}
