// One failed transfer (or open, allocation, sync) with everything a reader of the message needs.
#pragma once

#include <cstdint>
#include <exception>
#include <string>

namespace infinity::aio {

// Thrown across the C++ side and turned into `AioError` by bind.cpp; also stored in a ticket.
class IoFailure : public std::exception {
 public:
  IoFailure(int error_number, std::string failed_op, std::string file_path = {},
            uint64_t at_offset = 0, uint64_t byte_length = 0, std::string why = {});

  const char* what() const noexcept override { return message.c_str(); }

  int error;         // errno
  std::string op;    // "read", "write", "open", "allocate", "sync", "start", "submit"
  std::string path;  // empty where no file is concerned
  uint64_t offset;
  uint64_t length;
  std::string reason;  // the text of errno, or a more exact one
  std::string message;
};

// Reason given when a read meets the end of the file before it has all its bytes.
extern const char* const kEndOfFile;

// "EPERM", "ENOSPC", ...; "errno 123" for one we have no name for.
std::string error_name(int error);

// The sentence of an error: shared by C++ and by exceptions built in Python.
std::string describe_failure(const std::string& op, const std::string& path, uint64_t offset,
                             uint64_t length, int error, const std::string& reason);

}  // namespace infinity::aio
