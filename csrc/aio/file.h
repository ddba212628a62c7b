// An open file that knows what direct I/O wants and where it lies. Shared: requests in flight keep
// it open.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "os.h"

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
  const std::string& direct_reason() const { return direct_reason_; }  // "" when direct
  uint32_t memory_alignment() const { return memory_alignment_; }
  uint32_t offset_alignment() const { return offset_alignment_; }
  const std::string& file_system() const { return file_system_; }
  os::Device device() const { return device_; }
  // sync_file_range() reaches the pages of this file; elsewhere only fdatasync() does.
  bool has_range_sync() const { return has_range_sync_; }
  uint64_t size() const;

  // The device lost bytes that write() had accepted into the page cache. Sticky: every later
  // transfer and sync() of this file reports the first one. 0: none.
  int write_back_error() const { return write_back_error_.load(std::memory_order_relaxed); }
  void note_write_back(int result);  // 0 or a negated errno

  // One attempt each; false: interrupted by a signal, call again. Throw IoFailure.
  bool allocate(uint64_t size) const;
  bool sync() const;

 private:
  File(std::string path, int fd, bool direct);
  void become_buffered(std::string reason);

  const std::string path_;
  const int fd_;
  bool direct_;
  std::string direct_reason_;
  uint32_t memory_alignment_ = 1;
  uint32_t offset_alignment_ = 1;
  std::string file_system_;
  os::Device device_{0, 0};
  bool has_range_sync_ = true;
  std::atomic<int> write_back_error_{0};
};

}  // namespace infinity::aio
