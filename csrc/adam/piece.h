// Validated arguments of the update of one contiguous range of a parameter.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "kernels.h"

namespace infinity {

using Address = std::uintptr_t;

// Names of the rules of update.inl; the index is the RuleCode.
std::vector<std::string> rule_names();

// Bytes per element.
std::size_t size_of(Dtype dtype);
std::size_t moment_size(Format format);

// Convert a code; throw std::invalid_argument if it is unknown.
Dtype checked_dtype(int code);
Format checked_format(int code);

// Returns `address` as a pointer; throws std::invalid_argument if it is null while `n` is not 0, or
// not a multiple of `alignment`. `name` is used in the message.
void* checked_address(const char* name, Address address, std::size_t n, std::size_t alignment);

// Memory [begin, end) that an update reads or writes.
struct Range {
  const char* name;
  Address begin;
  Address end;
  bool is_written;
};

// Immutable. Holds addresses only: the caller keeps the memory allocated.
class Piece {
 public:
  // Throws std::invalid_argument for unknown codes, a wrong number of scalars, null or misaligned
  // addresses, overlapping ranges, and 8-bit moments if `first` is not a multiple of the moment
  // block. Addresses that rule, layout and format do not use are ignored.
  Piece(std::size_t n, int rule, int layout, int format, int gradient_dtype, std::uint64_t key,
        std::uint64_t first, Address weight, Address master_state, Address moment1, Address scales1,
        Address moment2, Address scales2, Address gradient, const std::vector<double>& scalars);

  const UpdateArguments& arguments() const { return arguments_; }

  // Returns all non-empty ranges that the update reads or writes.
  std::vector<Range> ranges() const;

 private:
  UpdateArguments arguments_{};
};

// Throws std::invalid_argument if a written range overlaps another range.
void check_apart(std::vector<Range> ranges);

}  // namespace infinity
