#include "probe.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <memory>

#include "engine.h"
#include "error.h"
#include "os.h"

namespace infinity::aio {
namespace {

constexpr auto kPulse = std::chrono::milliseconds(50);
constexpr int64_t kPatienceNs = 30'000'000'000;  // a disk slower than this is not for us

struct Magic {
  uint32_t number;
  const char* name;
};
constexpr Magic kMagics[] = {
    {0xEF53, "ext4"},         {0x58465342, "xfs"},     {0x9123683E, "btrfs"},
    {0x01021994, "tmpfs"},    {0x794C7630, "overlay"}, {0x6969, "nfs"},
    {0x65735546, "fuse"},     {0x2FC12FC1, "zfs"},     {0xF2F52010, "f2fs"},
    {0xCA451A4E, "bcachefs"}, {0x858458F6, "ramfs"},   {0xFF534D42, "cifs"},
    {0xFE534D42, "smb2"},     {0x01021997, "9p"},      {0x0BD00BD0, "lustre"},
};

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
  const int64_t deadline_ns = os::monotonic_ns() + kPatienceNs;
  while (!ticket.wait_for(kPulse)) {
    pulse();
    if (os::monotonic_ns() > deadline_ns) {
      throw IoFailure(ETIMEDOUT, op_name(ticket.op), {}, 0, ticket.nbytes,
                      "no answer from the disk within 30 s");
    }
  }
  if (ticket.failure()) throw *ticket.failure();
}

BackendProbe try_backend(BackendKind kind, const std::shared_ptr<File>& file, uint8_t salt,
                         const std::function<void()>& pulse) {
  const uint32_t length = std::max({4096u, file->memory_alignment(), file->offset_alignment()});
  const Page page(2 * size_t{length});  // before the engine: must outlive what is in flight
  uint8_t* written = page.bytes();
  uint8_t* read_back = written + length;
  for (uint32_t i = 0; i < length; ++i) written[i] = static_cast<uint8_t>(i * 31 + salt);
  try {
    EngineConfig config;
    config.backend = kind;
    config.block_size = length;
    config.queue_depth = 1;
    Engine engine(config);
    const auto address = [](uint8_t* bytes) { return reinterpret_cast<uint64_t>(bytes); };
    finish(*engine.submit(Op::write, {{file, 0, length, address(written)}}), pulse);
    finish(*engine.submit(Op::read, {{file, 0, length, address(read_back)}}), pulse);
    if (!std::equal(written, written + length, read_back)) {
      return {false, "read back other bytes than were written"};
    }
    return {true, "one block written and read back; " + engine.backend_reason()};
  } catch (const IoFailure& failure) {
    return {false, failure.message};
  }
}

}  // namespace

std::string file_system_name(const std::string& path) {
  const int64_t number = os::file_system_magic(path.c_str());
  if (number < 0) throw IoFailure(static_cast<int>(-number), "probe", path);
  for (const Magic& magic : kMagics) {
    if (magic.number == number) return magic.name;
  }
  char text[16];
  std::snprintf(text, sizeof text, "0x%x", static_cast<unsigned>(number));
  return text;
}

ProbeResult probe_directory(const std::string& directory, const std::function<void()>& pulse) {
  const std::string name = file_system_name(directory);
  const std::shared_ptr<File> file = open_scratch(directory);
  return {
      try_backend(BackendKind::uring, file, 1, pulse),
      try_backend(BackendKind::threads, file, 2, pulse),
      file->direct(),
      file->memory_alignment(),
      file->offset_alignment(),
      name,
  };
}

}  // namespace infinity::aio
