// Which kernels this CPU can run, and the few serial pieces around them.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "kernels.h"

namespace infinity {

// Best last; never empty.
std::vector<const Kernels*> available_kernels();

// "auto" means the best; throws std::invalid_argument naming the available ones.
const Kernels* find_kernels(const std::string& isa);

// Step 4 of the square sum's tree (kernel.inl); consumes `sums`.
double fold_blocks(std::vector<double>& sums);

// memcpy past the caches, for ranges that will not be read again soon.
void stream_copy(void* target, const void* source, std::size_t nbytes);

// While alive, this thread computes with round-to-nearest and with denormals, whatever
// torch.set_flush_denormal or another library chose for it.
class StandardFloats {
 public:
  StandardFloats();
  ~StandardFloats();
  StandardFloats(const StandardFloats&) = delete;
  StandardFloats& operator=(const StandardFloats&) = delete;

 private:
  unsigned long long saved_;
};

}  // namespace infinity
