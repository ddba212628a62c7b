// IoFailure: a failed transfer, open, allocation or sync, with the text of its message.
#pragma once

#include <cstdint>
#include <exception>
#include <string>

namespace infinity::aio {

// Thrown by the C++ code and stored in tickets; bind_error.cpp translates it to `AioError`.
class IoFailure : public std::exception {
 public:
  // An empty `why` is replaced by the text of errno.
  IoFailure(int error_number, std::string failed_op, std::string file_path = {},
            uint64_t at_offset = 0, uint64_t byte_length = 0, std::string why = {});

  const char* what() const noexcept override { return message.c_str(); }

  int error;         // errno
  std::string op;    // see AioError.op in infinity/_aio.pyi
  std::string path;  // empty if the failure concerns no file
  uint64_t offset;
  uint64_t length;
  std::string reason;
  std::string message;
};

// Reason of a read that reaches the end of the file before it is complete.
extern const char* const kEndOfFile;

// Symbolic name of an errno ("EPERM", "ENOSPC", ...), or "errno 123" if it is not in the table.
std::string error_name(int error);

// Returns the message for a failure; used by IoFailure and by AioError.__str__.
std::string describe_failure(const std::string& op, const std::string& path, uint64_t offset,
                             uint64_t length, int error, const std::string& reason);

}  // namespace infinity::aio
