#include "error.h"

#include <cerrno>
#include <system_error>
#include <utility>

namespace infinity::aio {

const char* const kEndOfFile = "unexpected end of file";

namespace {

struct Known {
  int error;
  const char* name;
  const char* cause;  // the likely one, and what to look at; empty where errno says it all
};

constexpr Known kKnown[] = {
    {EPERM, "EPERM", ""},
    {EIO, "EIO", "the device failed or is gone: see `dmesg` and `smartctl -a`"},
    {EBADF, "EBADF", "the file is closed, or open in a mode that forbids this operation"},
    {EAGAIN, "EAGAIN", "the kernel is short of resources for this device"},
    {ENOMEM, "ENOMEM", "the kernel is out of memory, or RLIMIT_MEMLOCK is too small"},
    {EACCES, "EACCES", ""},
    {EFAULT, "EFAULT", "the address is not mapped for the whole length"},
    {EEXIST, "EEXIST", ""},
    {ENOENT, "ENOENT", ""},
    {EINVAL, "EINVAL",
     "offset, length or address is not aligned as O_DIRECT wants it, or the file system does not "
     "take this operation"},
    {EMFILE, "EMFILE", "too many open files: see `ulimit -n`"},
    {EFBIG, "EFBIG", "the file would exceed the file system's limit or `ulimit -f`"},
    {ENOSPC, "ENOSPC", "the disk is full: free space, or choose another path"},
    {EROFS, "EROFS", ""},
    {ENOSYS, "ENOSYS", ""},
    {EDQUOT, "EDQUOT", "the disk quota is used up"},
    {ECANCELED, "ECANCELED", ""},
    {EOPNOTSUPP, "EOPNOTSUPP", ""},
    {ETIMEDOUT, "ETIMEDOUT", ""},
};

const Known* find_known(int error) {
  for (const Known& known : kKnown) {
    if (known.error == error) return &known;
  }
  return nullptr;
}

}  // namespace

std::string error_name(int error) {
  const Known* known = find_known(error);
  return known != nullptr ? known->name : "errno " + std::to_string(error);
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
    text += "; likely cause: the file is shorter than the request, was it cut or never written?";
  } else if (const Known* known = find_known(error); known != nullptr && *known->cause != '\0') {
    text += std::string("; likely cause: ") + known->cause;
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
