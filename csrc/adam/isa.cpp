// Kernel table of one instruction set. Compiled once per set, with its machine flags; symbol and
// name of the table are defined by CMakeLists.txt.
#include "kernel.inl"
#include "passes.inl"

namespace infinity {

extern const Kernels INFINITY_ISA_TABLE = {
    INFINITY_ISA_NAME, update, accumulate, convert, square_blocks, split, join, encode, decode,
};

}  // namespace infinity
