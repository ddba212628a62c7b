// Tests of the order of completion on a slow disk that does one block at a time.
#include "support.h"

using namespace infinity::aio;
using namespace infinity::aio::testing;

namespace {

struct SlowDisk {
  explicit SlowDisk(BackendKind backend) : scratch(64 * kBlock), buffer(64 * kBlock) {
    EngineConfig config = small_config(backend);
    config.queue_depth = 1;
    config.slow_bytes_per_s = 500 * kBlock;
    engine = Engine::start(config);
  }
  std::shared_ptr<Ticket> submit(Priority priority, uint64_t num_blocks) {
    return engine->submit(Op::read, {{scratch.file, 0, num_blocks * kBlock, buffer.address()}},
                          priority);
  }

  Scratch scratch;
  Buffer buffer;
  std::shared_ptr<Engine> engine;
};

}  // namespace

TEST(priority_decides_completion_order) {
  with_each_backend([](BackendKind backend) {
    SlowDisk slow(backend);
    const auto background = slow.submit(Priority::background, 10);
    const auto normal = slow.submit(Priority::normal, 10);
    const auto urgent = slow.submit(Priority::urgent, 10);
    CHECK(outcome(*urgent) == 0);
    CHECK(!normal->done());
    CHECK(outcome(*normal) == 0);
    CHECK(!background->done());
    CHECK(outcome(*background) == 0);
    CHECK(urgent->times_ns()[2] < normal->times_ns()[2]);
    close(*slow.engine);
  });
}

TEST(priority_can_be_raised) {
  with_each_backend([](BackendKind backend) {
    SlowDisk slow(backend);
    const auto first = slow.submit(Priority::normal, 10);
    const auto second = slow.submit(Priority::background, 10);
    second->promote();
    CHECK(outcome(*second) == 0);
    CHECK(!first->done());
    CHECK(outcome(*first) == 0);
    second->promote();  // no effect after completion
    close(*slow.engine);
  });
}
