// File: an open file with its O_DIRECT alignment, file system and device. Reference counted: blocks
// in flight hold references, so the descriptor stays open until they complete.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "os.h"

namespace infinity::aio {

enum class Direct { automatic, on, off };

// Thread-safe.
class File {
 public:
  // Throws IoFailure. Without O_DIRECT support, `Direct::on` fails and `automatic` uses the page
  // cache. With `create` the file must not exist.
  static std::shared_ptr<File> open(const std::string& path, bool create, bool read_only,
                                    Direct direct);
  ~File();  // closes the descriptor
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  const std::string& path() const { return path_; }
  int fd() const { return fd_; }
  bool direct() const { return direct_; }
  const std::string& direct_reason() const { return direct_reason_; }  // "" if direct
  // Required alignment in bytes of addresses, and of offsets and lengths; 1 if buffered.
  uint32_t memory_alignment() const { return memory_alignment_; }
  uint32_t offset_alignment() const { return offset_alignment_; }
  const std::string& file_system() const { return file_system_; }
  os::Device device() const { return device_; }
  // True if sync_file_range() writes the pages of this file; otherwise only fdatasync() does.
  bool has_range_sync() const { return has_range_sync_; }
  uint64_t size() const;  // bytes; throws IoFailure

  // First errno of a failed write-back of this file, 0 if none. Never reset: all later transfers
  // and sync() calls of this file fail with it. Relaxed order: it guards no other data.
  int write_back_error() const { return write_back_error_.load(std::memory_order_relaxed); }
  void record_write_back(int result);  // 0 or a negated errno

  // Return false if interrupted by a signal; the caller repeats the call. Throw IoFailure.
  bool allocate(uint64_t size) const;
  bool sync() const;

 private:
  File(std::string path, int fd, bool direct);
  void set_buffered(std::string reason);

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
