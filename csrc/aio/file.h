// An open file that knows what direct I/O wants. Shared: requests in flight keep it open.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

namespace infinity::aio {

enum class Direct { automatic, on, off };

class File {
 public:
  // Throws IoFailure. `Direct::on` refuses a file system without direct I/O; `automatic` falls back
  // to the page cache.
  static std::shared_ptr<File> open(const std::string& path, bool create, bool read_only,
                                    Direct direct);
  ~File();  // closes the descriptor; runs when the last request has let go of the file
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  const std::string& path() const { return path_; }
  int fd() const { return fd_; }
  bool direct() const { return direct_; }
  uint32_t memory_alignment() const { return memory_alignment_; }
  uint32_t offset_alignment() const { return offset_alignment_; }
  uint64_t size() const;

  // One attempt each; false: interrupted by a signal, call again. Throw IoFailure.
  bool allocate(uint64_t size) const;
  bool sync() const;

 private:
  File(std::string path, int fd, bool direct);

  const std::string path_;
  const int fd_;
  bool direct_;
  uint32_t memory_alignment_ = 1;
  uint32_t offset_alignment_ = 1;
};

}  // namespace infinity::aio
