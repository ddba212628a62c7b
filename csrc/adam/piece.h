// One contiguous piece of one parameter, checked once: what a thread may walk without thinking.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "kernels.h"

namespace infinity {

using Address = std::uintptr_t;

// The structs of update.inl that are rules, in the order of their codes.
std::vector<std::string> rule_names();

std::size_t size_of(Dtype dtype);
std::size_t moment_size(Format format);
Dtype checked_dtype(int code);
Format checked_format(int code);

// `address` as a pointer; throws std::invalid_argument if it is null (and n is not 0) or not
// aligned to `alignment`.
void* checked_address(const char* name, Address address, std::size_t n, std::size_t alignment);

struct Range {
  const char* name;
  Address begin;
  Address end;
  bool is_written;
};

class Piece {
 public:
  // Throws std::invalid_argument: unknown codes, null or misaligned addresses, ranges that overlap,
  // an 8-bit piece that does not begin at a block. What the rule does not use must be 0.
  Piece(std::size_t n, int rule, int layout, int format, int gradient_dtype, std::uint64_t key,
        std::uint64_t first, Address weight, Address rest, Address moment1, Address scales1,
        Address moment2, Address scales2, Address gradient, const std::vector<double>& scalars);

  const UpdateArguments& arguments() const { return arguments_; }

  // Everything it touches; empty ranges are left out.
  std::vector<Range> ranges() const;

 private:
  UpdateArguments arguments_{};
};

// Throws std::invalid_argument if something that is written overlaps anything else.
void check_apart(std::vector<Range> ranges);

}  // namespace infinity
