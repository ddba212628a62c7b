// Conversion of tuples of tensors to pieces, through DLPack's C exchange API.
//
// Reading dtype, size, strides and address of a tensor through its Python methods takes about
// 0.5 us, and a piece has five to seven tensors; the C functions take a tenth of that. This is a
// fast path without error messages: input that it does not accept is checked, and reported, by
// infinity/optim/cpu.py.
#pragma once

#include <nanobind/nanobind.h>

#include <optional>
#include <vector>

#include "piece.h"

namespace infinity {

// Converts `pieces`, tuples with the fields of infinity.optim.cpu.Piece. `settings` has (rule,
// number of moments, scalars) of each; `formats` has the Python moment formats in the order of
// `Format`; `api` is the capsule `__dlpack_c_exchange_api__` of `tensor_type`. Returns nullopt,
// without a Python error set, if a piece is invalid or has a tensor of another type, device or
// layout. Requires the GIL.
std::optional<std::vector<Piece>> read_pieces(nanobind::list pieces, nanobind::list settings,
                                              nanobind::tuple formats, nanobind::handle tensor_type,
                                              nanobind::handle api);

}  // namespace infinity
