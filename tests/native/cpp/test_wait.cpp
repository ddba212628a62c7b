#include <chrono>

#include "support.h"

using namespace infinity::aio;
using namespace infinity::aio::testing;

TEST(wait_times_out) {
  EngineConfig config = small_config(BackendKind::threads);
  config.slow_bytes_per_s = 4 * kBlock;
  const auto engine = Engine::start(config);
  Scratch scratch(kBlock);
  Buffer buffer(kBlock);
  const auto ticket = engine->submit(Op::read, {{scratch.file, 0, kBlock, buffer.address()}});
  CHECK(!ticket->wait_for(std::chrono::milliseconds(20)));
  CHECK(outcome(*ticket) == 0);
  const auto times = ticket->times_ns();
  CHECK(times[2] - times[0] > 200'000'000);
  close(*engine);
}
