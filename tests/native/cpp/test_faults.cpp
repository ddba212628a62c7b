// Tests of injected faults, by kind and for many seeds: correct data or an error, and no leak.
#include <algorithm>
#include <bit>
#include <thread>

#include "support.h"

using namespace infinity::aio;
using namespace infinity::aio::testing;

namespace {

constexpr uint64_t kNumBlocks = 64;

// Writes, then reads every block with a separate ticket, and collects their errors.
struct Run {
  Run(BackendKind backend, const std::string& faults, Direct direct = Direct::automatic)
      : scratch(kNumBlocks * kBlock, direct), out(kNumBlocks * kBlock), in(kNumBlocks * kBlock) {
    EngineConfig config = small_config(backend);
    config.stuck_after_s = 0.2;
    config.faults = Faults::parse(faults);
    engine = Engine::start(config);
    out.mark(9);
    move(Op::write, out, &written);
    move(Op::read, in, &read);
  }
  void move(Op op, const Buffer& buffer, std::vector<int>* errors) {
    std::vector<std::shared_ptr<Ticket>> tickets;
    for (uint64_t i = 0; i < kNumBlocks; ++i) {
      tickets.push_back(
          engine->submit(op, {{scratch.file, i * kBlock, kBlock, buffer.address(i * kBlock)}}));
    }
    for (const auto& ticket : tickets) errors->push_back(outcome(*ticket));
  }
  bool is_right(uint64_t block) const {
    return in.is_marked(9, block * kBlock, (block + 1) * kBlock);
  }
  size_t count(const std::vector<int>& errors, int error) const {
    return static_cast<size_t>(std::ranges::count(errors, error));
  }

  Scratch scratch;
  Buffer out;
  Buffer in;
  std::shared_ptr<Engine> engine;
  std::vector<int> written;
  std::vector<int> read;
};

}  // namespace

TEST(faults_parse_validates_text) {
  CHECK(!Faults::parse("").enabled);
  const Faults all = Faults::parse("seed=7");
  CHECK(all.enabled && all.seed == 7 && all.kinds == 127 && all.rate == 0.01);
  const Faults some = Faults::parse("seed=18446744073709551615,rate=0.5,kinds=eio+flip");
  CHECK(some.has(Fault::eio) && some.has(Fault::flip) && !some.has(Fault::stuck));
  for (const char* wrong : {"kinds=eio", "seed=", "seed=x", "seed=1,kinds=fire", "seed=1,rate=2",
                            "seed=1,rate=", "seed=1,speed=2", "seed=1,"}) {
    CHECK_THROWS(std::invalid_argument, Faults::parse(wrong));
  }
  EngineConfig config = small_config(BackendKind::threads);
  config.faults = all;
  CHECK_THROWS(std::invalid_argument, Engine::start(config));  // "stuck" needs a watchdog
}

TEST(faults_are_determined_by_seed) {
  const Faults faults = Faults::parse("seed=5,rate=0.3");
  const Faults others = Faults::parse("seed=6,rate=0.3");
  size_t num_bad = 0;
  size_t num_equal = 0;
  for (uint64_t serial = 0; serial < 1000; ++serial) {
    Block block;
    block.serial = serial;
    block.attempts = 1;
    const Fault fault = faults.choose(block);
    CHECK(fault == faults.choose(block));
    num_bad += fault != Fault::none ? 1 : 0;
    num_equal += fault == others.choose(block) ? 1 : 0;
  }
  CHECK(num_bad > 230 && num_bad < 370);
  CHECK(num_equal < 900);
}

TEST(faults_of_each_kind_have_their_effect) {
  with_each_backend([](BackendKind backend) {
    {
      const Run run(backend, "seed=1,kinds=eio,rate=0.3");
      CHECK(run.count(run.written, EIO) > 5);
      CHECK(run.count(run.read, EIO) > 5);
      CHECK(run.count(run.read, EIO) + run.count(run.read, 0) == kNumBlocks);
      for (uint64_t i = 0; i < kNumBlocks; ++i) {
        if (run.written[i] == 0 && run.read[i] == 0) CHECK(run.is_right(i));
      }
    }
    {
      const Run run(backend, "seed=2,kinds=enospc,rate=0.3");
      CHECK(run.count(run.written, ENOSPC) > 5);
      CHECK(run.count(run.read, 0) == kNumBlocks);
    }
    for (const char* harmless : {"seed=3,kinds=short,rate=0.5", "seed=4,kinds=delay,rate=0.3",
                                 "seed=5,kinds=reorder,rate=0.5", "seed=6,kinds=reorder,rate=1"}) {
      for (const Direct direct : {Direct::automatic, Direct::off}) {
        const Run run(backend, harmless, direct);
        CHECK(run.count(run.written, 0) == kNumBlocks);
        CHECK(run.count(run.read, 0) == kNumBlocks);
        for (uint64_t i = 0; i < kNumBlocks; ++i) CHECK(run.is_right(i));
      }
    }
    {
      const Run run(backend, "seed=7,kinds=flip,rate=0.3");
      CHECK(run.count(run.read, 0) == kNumBlocks);
      size_t num_wrong = 0;
      for (uint64_t i = 0; i < kNumBlocks; ++i) num_wrong += run.is_right(i) ? 0 : 1;
      CHECK(num_wrong > 5 && num_wrong < 40);
      size_t num_bits = 0;
      for (size_t i = 0; i < run.in.size(); ++i) {
        num_bits += static_cast<size_t>(
            std::popcount(static_cast<unsigned>(run.in.data()[i] ^ run.out.data()[i])));
      }
      CHECK(num_bits == num_wrong);  // one bit in each block
    }
  });
}

TEST(faults_of_many_seeds_give_data_or_error) {
  Scratch scratch(kNumBlocks * kBlock);
  Buffer out(kNumBlocks * kBlock);
  Buffer in(kNumBlocks * kBlock);
  out.mark(1);
  const Usage before;
  with_each_backend([&](BackendKind backend) {
    for (int seed = 0; seed < 25; ++seed) {
      EngineConfig config = small_config(backend);
      config.stuck_after_s = 0.05;
      config.faults = Faults::parse("seed=" + std::to_string(seed) + ",rate=0.05");
      const auto engine = Engine::start(config);
      std::vector<std::shared_ptr<Ticket>> tickets;
      for (uint64_t i = 0; i < 16; ++i) {
        const bool is_read = i % 2 == 1;
        const uint64_t at = i / 2 * 4 * kBlock;
        tickets.push_back(
            engine->submit(is_read ? Op::read : Op::write,
                           {{scratch.file, at, 4 * kBlock, (is_read ? in : out).address(at)}},
                           static_cast<Priority>(i % 3)));
      }
      for (const auto& ticket : tickets) {
        while (!ticket->wait_for(std::chrono::milliseconds(20)) && !ticket->stuck()) continue;
      }
      try {
        close(*engine);
      } catch (const IoFailure& failure) {
        CHECK(failure.error == ETIMEDOUT);
      }
      for (const auto& ticket : tickets) {
        CHECK(ticket->done());
        const int error = outcome(*ticket);
        CHECK_WITH(std::to_string(error), error == 0 || error == EIO || error == ENOSPC ||
                                              error == ETIMEDOUT || error == ECANCELED);
      }
    }
  });
  CHECK(usage_returns_to(before));
}
