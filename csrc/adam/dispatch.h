// Selection of the kernels for this CPU, and serial functions that need no dispatch.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "kernels.h"

namespace infinity {

// Returns the kernel tables that this CPU supports, the widest instruction set last; never empty.
std::vector<const Kernels*> available_kernels();

// Returns the table named `isa`; "auto" selects the last of `available_kernels()`. Throws
// std::invalid_argument, with the available names, if there is none.
const Kernels* find_kernels(const std::string& isa);

// Combines block sums pairwise: step 4 of the square sum (passes.inl). Overwrites `sums`. Returns 0
// for an empty vector and the canonical NaN for any NaN.
double fold_blocks(std::vector<double>& sums);

// memcpy with non-temporal stores on x86-64, for data that is not read again soon. The ranges must
// not overlap.
void stream_copy(void* target, const void* source, std::size_t nbytes);

}  // namespace infinity
