// Engines, files and memory for the tests of csrc/aio.
#pragma once

#include <dirent.h>
#include <stdlib.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "check.h"
#include "engine.h"

namespace infinity::aio::testing {

constexpr uint64_t kBlock = 16384;

// Page-aligned memory.
class Buffer {
 public:
  explicit Buffer(size_t nbytes, uint8_t fill = 0)
      : bytes_(static_cast<uint8_t*>(::aligned_alloc(4096, (nbytes + 4095) / 4096 * 4096)),
               &::free),
        size_(nbytes) {
    std::memset(bytes_.get(), fill, nbytes);
  }
  uint8_t* data() const { return bytes_.get(); }
  size_t size() const { return size_; }
  uint64_t address(size_t offset = 0) const {
    return reinterpret_cast<uint64_t>(bytes_.get() + offset);
  }
  // Fills the buffer with a pattern of seed and index.
  void mark(uint64_t seed) {
    for (size_t i = 0; i < size_; ++i) bytes_.get()[i] = pattern(seed, i);
  }
  bool is_marked(uint64_t seed, size_t begin, size_t end) const {
    for (size_t i = begin; i < end; ++i) {
      if (bytes_.get()[i] != pattern(seed, i)) return false;
    }
    return true;
  }
  static uint8_t pattern(uint64_t seed, size_t index) {
    return static_cast<uint8_t>((index * 2654435761u + seed * 40503u) >> 7);
  }

 private:
  std::unique_ptr<uint8_t, void (*)(void*)> bytes_;
  size_t size_;
};

// Temporary file in the current directory, which is on a disk; removed by the destructor.
class Scratch {
 public:
  explicit Scratch(uint64_t nbytes, Direct direct = Direct::automatic)
      : path_("native-test-" + std::to_string(::getpid()) + "-" + std::to_string(counter()++)) {
    file = File::open(path_, true, false, direct);
    file->allocate(nbytes);
  }
  ~Scratch() { ::unlink(path_.c_str()); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  std::shared_ptr<File> file;

 private:
  static int& counter() {
    static int next = 0;
    return next;
  }
  const std::string path_;
};

inline EngineConfig small_config(BackendKind backend) {
  EngineConfig config;
  config.backend = backend;
  config.block_size = kBlock;
  config.queue_depth = 4;
  config.num_threads = 3;
  return config;
}

// Runs the body with every back end that this machine supports.
inline void with_each_backend(const std::function<void(BackendKind)>& body) {
  body(BackendKind::threads);
  try {
    Engine::start(small_config(BackendKind::uring));
  } catch (const IoFailure&) {
    return;  // io_uring is not permitted; the threads were tested
  }
  body(BackendKind::uring);
}

// Waits for the ticket and returns its error number, 0 on success.
inline int outcome(const Ticket& ticket) {
  while (!ticket.wait_for(std::chrono::seconds(1))) continue;
  return ticket.failure() ? ticket.failure()->error : 0;
}

inline void close(Engine& engine) {
  engine.close([] {});
}

inline size_t entries(const char* directory) {
  size_t count = 0;
  DIR* handle = ::opendir(directory);
  while (::readdir(handle) != nullptr) ++count;
  ::closedir(handle);
  return count;
}

// Number of threads and descriptors of this process.
struct Usage {
  size_t threads = entries("/proc/self/task");
  size_t descriptors = entries("/proc/self/fd");
  bool operator<=(const Usage& other) const {
    return threads <= other.threads && descriptors <= other.descriptors;
  }
};

// A joined thread may stay in /proc a moment longer.
inline bool usage_returns_to(const Usage& before) {
  for (int attempt = 0; attempt < 200; ++attempt) {
    if (Usage{} <= before) return true;
    ::usleep(10'000);
  }
  return false;
}

}  // namespace infinity::aio::testing
