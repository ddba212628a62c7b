// Compiled once per instruction set; the build defines the table's symbol and name.
#include "kernel.inl"
#include "passes.inl"

namespace infinity {

extern const Kernels INFINITY_ISA_TABLE = {
    INFINITY_ISA_NAME, update, accumulate, convert, square_blocks, split, join, encode, decode,
};

}  // namespace infinity
