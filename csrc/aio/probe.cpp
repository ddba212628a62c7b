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

constexpr auto kPulse = std::chrono::milliseconds(50);
constexpr double kPatienceS = 30;  // a disk slower than this is not for us

class Page {
 public:
  explicit Page(size_t length) : length_(length) {
    if (const int result = os::map_private(length, &address_); result < 0) {
      throw IoFailure(-result, "probe");
    }
  }
  ~Page() { os::unmap(address_, length_); }
  Page(const Page&) = delete;
  Page& operator=(const Page&) = delete;
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

void finish(const Ticket& ticket, const std::function<void()>& pulse) {
  while (!ticket.wait_for(kPulse)) {
    pulse();
    if (const std::optional<IoFailure> stuck = ticket.stuck()) throw *stuck;
  }
  if (ticket.failure()) throw *ticket.failure();
}

// Closes the engine before the page goes; leaves the page to a kernel that does not answer.
class Closing {
 public:
  Closing(std::shared_ptr<Engine> engine, std::unique_ptr<Page>* page)
      : engine_(std::move(engine)), page_(page) {}
  ~Closing() {
    try {
      engine_->close([] {});
    } catch (const IoFailure&) {
      static_cast<void>(page_->release());
    }
  }
  Closing(const Closing&) = delete;
  Closing& operator=(const Closing&) = delete;

 private:
  const std::shared_ptr<Engine> engine_;
  std::unique_ptr<Page>* page_;
};

BackendProbe try_backend(BackendKind kind, const std::shared_ptr<File>& file, uint8_t salt,
                         const std::function<void()>& pulse) {
  const uint32_t length = std::max({4096u, file->memory_alignment(), file->offset_alignment()});
  auto page = std::make_unique<Page>(2 * size_t{length});
  uint8_t* written = page->bytes();
  uint8_t* read_back = written + length;
  for (uint32_t i = 0; i < length; ++i) written[i] = static_cast<uint8_t>(i * 31 + salt);
  try {
    EngineConfig config;
    config.backend = kind;
    config.block_size = length;
    config.queue_depth = 1;
    config.stuck_after_s = kPatienceS;
    const std::shared_ptr<Engine> engine = Engine::start(config);
    const Closing closing(engine, &page);
    const auto address = [](uint8_t* bytes) { return reinterpret_cast<uint64_t>(bytes); };
    finish(*engine->submit(Op::write, {{file, 0, length, address(written)}}), pulse);
    finish(*engine->submit(Op::read, {{file, 0, length, address(read_back)}}), pulse);
    if (!std::equal(written, written + length, read_back)) {
      return {false, "read back other bytes than were written"};
    }
    return {true, "one block written and read back; " + engine->backend_reason()};
  } catch (const IoFailure& failure) {
    return {false, failure.message};
  }
}

}  // namespace

ProbeResult probe_directory(const std::string& directory, const std::function<void()>& pulse) {
  const std::shared_ptr<File> file = open_scratch(directory);
  return {try_backend(BackendKind::uring, file, 1, pulse),
          try_backend(BackendKind::threads, file, 2, pulse)};
}

}  // namespace infinity::aio
