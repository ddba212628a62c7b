#include "probe.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>

#include "engine.h"
#include "error.h"
#include "os.h"

namespace infinity::aio {
namespace {

constexpr auto kPollInterval = std::chrono::milliseconds(50);
constexpr double kTimeoutS = 30;  // of one transfer

class MappedMemory {
 public:
  explicit MappedMemory(size_t length) : length_(length) {
    if (const int result = os::map_private(length, &address_); result < 0) {
      throw IoFailure(-result, "probe");
    }
  }
  ~MappedMemory() { os::unmap(address_, length_); }
  MappedMemory(const MappedMemory&) = delete;
  MappedMemory& operator=(const MappedMemory&) = delete;
  uint8_t* bytes() const { return static_cast<uint8_t*>(address_); }

 private:
  void* address_ = nullptr;
  size_t length_;
};

std::shared_ptr<File> open_scratch(const std::string& directory) {
  static std::atomic<uint32_t> serial{0};
  const std::string path = directory + "/.infinity-probe-" + std::to_string(os::process_id()) +
                           "-" + std::to_string(os::monotonic_ns()) + "-" +
                           std::to_string(serial++);
  std::shared_ptr<File> file = File::open(path, true, false, Direct::automatic);
  os::unlink_file(path.c_str());
  return file;
}

void wait(const Ticket& ticket, const std::function<void()>& poll) {
  while (!ticket.wait_for(kPollInterval)) {
    poll();
    if (const std::optional<IoFailure> stuck = ticket.stuck()) throw *stuck;
  }
  if (ticket.failure()) throw *ticket.failure();
}

// Closes the engine before the memory is unmapped. Leaks memory that the kernel still references.
class EngineCloser {
 public:
  EngineCloser(std::shared_ptr<Engine> engine, std::unique_ptr<MappedMemory>* memory)
      : engine_(std::move(engine)), memory_(memory) {}
  ~EngineCloser() {
    try {
      engine_->close([] {});
    } catch (const IoFailure&) {
      static_cast<void>(memory_->release());
    }
  }
  EngineCloser(const EngineCloser&) = delete;
  EngineCloser& operator=(const EngineCloser&) = delete;

 private:
  const std::shared_ptr<Engine> engine_;
  std::unique_ptr<MappedMemory>* memory_;
};

BackendProbe try_backend(BackendKind kind, const std::shared_ptr<File>& file, uint8_t seed,
                         const std::function<void()>& poll) {
  const uint32_t length = std::max({4096u, file->memory_alignment(), file->offset_alignment()});
  auto memory = std::make_unique<MappedMemory>(2 * size_t{length});
  uint8_t* written = memory->bytes();
  uint8_t* read_back = written + length;
  for (uint32_t i = 0; i < length; ++i) written[i] = static_cast<uint8_t>(i * 31 + seed);
  try {
    EngineConfig config;
    config.backend = kind;
    config.block_size = length;
    config.queue_depth = 1;
    config.stuck_after_s = kTimeoutS;
    const std::shared_ptr<Engine> engine = Engine::start(config);
    const EngineCloser closer(engine, &memory);
    const auto address = [](uint8_t* bytes) { return reinterpret_cast<uint64_t>(bytes); };
    wait(*engine->submit(Op::write, {{file, 0, length, address(written)}}), poll);
    wait(*engine->submit(Op::read, {{file, 0, length, address(read_back)}}), poll);
    if (!std::equal(written, written + length, read_back)) {
      return {false, "the bytes read differ from the bytes written"};
    }
    return {true, "one block written and read back; " + engine->backend_reason()};
  } catch (const IoFailure& failure) {
    return {false, failure.message};
  }
}

}  // namespace

ProbeResult probe_directory(const std::string& directory, const std::function<void()>& poll) {
  const std::shared_ptr<File> file = open_scratch(directory);
  return {try_backend(BackendKind::uring, file, 1, poll),
          try_backend(BackendKind::threads, file, 2, poll)};
}

}  // namespace infinity::aio
