#include "error.h"

#include <cerrno>
#include <system_error>
#include <utility>

namespace infinity::aio {

const char* const kEndOfFile = "unexpected end of file";

namespace {

struct ErrnoInfo {
  int error;
  const char* name;
  const char* cause;  // likely cause and diagnosis; empty if the text of errno suffices
};

constexpr ErrnoInfo kErrnos[] = {
    {EPERM, "EPERM", ""},
    {EIO, "EIO", "the device failed or was removed: see `dmesg` and `smartctl -a`"},
    {EBADF, "EBADF", "the file is closed, or its open mode does not permit this operation"},
    {EAGAIN, "EAGAIN", "the kernel lacks resources for this device"},
    {ENOMEM, "ENOMEM", "the kernel is out of memory, or RLIMIT_MEMLOCK is too small"},
    {EACCES, "EACCES", ""},
    {EFAULT, "EFAULT", "the memory is not mapped over the full length"},
    {EEXIST, "EEXIST", ""},
    {ENOENT, "ENOENT", ""},
    {EINVAL, "EINVAL",
     "offset, length or address violates the O_DIRECT alignment, or the file system does not "
     "support this operation"},
    {EMFILE, "EMFILE", "too many open files: see `ulimit -n`"},
    {EFBIG, "EFBIG", "the file would exceed the file system's limit or `ulimit -f`"},
    {ENOSPC, "ENOSPC", "the disk is full: free space, or choose another path"},
    {EROFS, "EROFS", ""},
    {ENOSYS, "ENOSYS", ""},
    {EDQUOT, "EDQUOT", "the disk quota is exceeded"},
    {ECANCELED, "ECANCELED", ""},
    {EOPNOTSUPP, "EOPNOTSUPP", ""},
    {ETIMEDOUT, "ETIMEDOUT", ""},
};

const ErrnoInfo* find_errno(int error) {
  for (const ErrnoInfo& info : kErrnos) {
    if (info.error == error) return &info;
  }
  return nullptr;
}

}  // namespace

std::string error_name(int error) {
  const ErrnoInfo* info = find_errno(error);
  return info != nullptr ? info->name : "errno " + std::to_string(error);
}

std::string describe_failure(const std::string& op, const std::string& path, uint64_t offset,
                             uint64_t length, int error, const std::string& reason) {
  std::string text = op.empty() ? std::string("request") : op;
  if (length > 0) {
    text += " of " + std::to_string(length) + " bytes at offset " + std::to_string(offset);
  }
  if (!path.empty()) text += " of '" + path + "'";
  text += " failed: " + reason;
  text += " (" + error_name(error) + ", errno " + std::to_string(error) + ")";
  if (reason == kEndOfFile) {
    text += "; likely cause: the file is shorter than the request: truncated, or not fully written";
  } else if (const ErrnoInfo* info = find_errno(error); info != nullptr && *info->cause != '\0') {
    text += std::string("; likely cause: ") + info->cause;
  }
  return text;
}

IoFailure::IoFailure(int error_number, std::string failed_op, std::string file_path,
                     uint64_t at_offset, uint64_t byte_length, std::string why)
    : error(error_number),
      op(std::move(failed_op)),
      path(std::move(file_path)),
      offset(at_offset),
      length(byte_length),
      reason(why.empty() ? std::generic_category().message(error_number) : std::move(why)),
      message(describe_failure(op, path, offset, length, error, reason)) {}

}  // namespace infinity::aio
