#include "file.h"

#include <cerrno>
#include <utility>

#include "error.h"
#include "file_system.h"
#include "os.h"

namespace infinity::aio {
namespace {

constexpr uint32_t kAssumedAlignment = 4096;  // where the kernel cannot tell us; fits every drive
constexpr int kMaxOpenAttempts = 100;         // signals cannot interrupt an open for ever

int open_retrying(const char* path, os::OpenFlags flags) {
  int fd = -EINTR;
  for (int attempt = 0; fd == -EINTR && attempt < kMaxOpenAttempts; ++attempt) {
    fd = os::open_file(path, flags);
  }
  return fd;
}

// Some kernels create the file and then refuse O_DIRECT, so a second O_EXCL may meet our own file.
int open_buffered_after_refusal(const char* path, bool create, bool read_only) {
  const int fd = open_retrying(path, {create, read_only, false});
  if (fd != -EEXIST || !create) return fd;
  return open_retrying(path, {false, read_only, false});
}

}  // namespace

File::File(std::string path, int fd, bool direct)
    : path_(std::move(path)), fd_(fd), direct_(direct) {
  file_system_ = file_system_name(os::file_system_magic(fd_));
  os::file_device(fd_, &device_);
  // These keep their pages elsewhere than in the file that we hold.
  has_range_sync_ = file_system_ != "overlayfs" && file_system_ != "fuse" &&
                    file_system_ != "nfs" && file_system_ != "cifs" && file_system_ != "smb2" &&
                    file_system_ != "zfs" && file_system_ != "9p";
  if (!direct_) return;
  const os::DirectAlignment alignment = os::direct_alignment(fd_);
  memory_alignment_ = alignment.known ? alignment.memory : kAssumedAlignment;
  offset_alignment_ = alignment.known ? alignment.offset : kAssumedAlignment;
}

void File::become_buffered(std::string reason) {
  direct_ = false;
  direct_reason_ = std::move(reason);
  memory_alignment_ = offset_alignment_ = 1;
  // Blocks are large and many are in flight; pages read ahead would come back after their drop.
  os::forbid_read_ahead(fd_);
}

std::shared_ptr<File> File::open(const std::string& path, bool create, bool read_only,
                                 Direct direct) {
  const auto refuse = [&](const char* why) {
    if (create) os::unlink_file(path.c_str());
    throw IoFailure(EINVAL, "open", path, 0, 0, why);
  };
  bool is_direct = direct != Direct::off;
  int fd = open_retrying(path.c_str(), {create, read_only, is_direct});
  if (fd == -EINVAL && is_direct) {
    if (direct == Direct::on) refuse("the file system refuses O_DIRECT");
    is_direct = false;
    fd = open_buffered_after_refusal(path.c_str(), create, read_only);
  }
  if (fd < 0) throw IoFailure(-fd, "open", path);

  std::shared_ptr<File> file(new File(path, fd, is_direct));
  if (!is_direct) {
    file->become_buffered(direct == Direct::off ? "direct=off was asked for"
                                                : no_direct_reason(file->file_system()));
    return file;
  }
  if (file->memory_alignment_ > 0 && file->offset_alignment_ > 0) return file;
  // The open was accepted, but statx says that direct transfers of this file are not.
  if (direct == Direct::on) refuse("the file system has no direct I/O for this file");
  if (const int result = os::clear_direct(fd); result < 0) throw IoFailure(-result, "open", path);
  file->become_buffered(no_direct_reason(file->file_system()));
  return file;
}

File::~File() { os::close_fd(fd_); }

uint64_t File::size() const {
  const int64_t size = os::file_size(fd_);
  if (size < 0) throw IoFailure(static_cast<int>(-size), "size", path_);
  return static_cast<uint64_t>(size);
}

bool File::allocate(uint64_t size) const {
  const uint64_t current = this->size();
  if (size == 0) return true;
  int result = os::allocate(fd_, static_cast<int64_t>(size));
  if (result == -EOPNOTSUPP || result == -ENOSYS) {
    result = size > current ? os::truncate(fd_, static_cast<int64_t>(size)) : 0;
  }
  if (result == -EINTR) return false;
  if (result < 0) throw IoFailure(-result, "allocate", path_, 0, size);
  return true;
}

void File::note_write_back(int result) {
  if (result == 0 || result == -EINTR) return;
  int none = 0;
  write_back_error_.compare_exchange_strong(none, -result);
}

bool File::sync() const {
  int result = os::data_sync(fd_);
  if (result == -EINTR) return false;
  if (result == 0) result = -write_back_error();
  if (result < 0) throw IoFailure(-result, "sync", path_);
  return true;
}

}  // namespace infinity::aio
