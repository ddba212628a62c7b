// Reads pieces straight from Python tensors, by DLPack's table of C functions.
//
// Asking a tensor from Python for its type, size, strides and address costs half a microsecond, and
// a piece has five to seven tensors. Here that costs a tenth. This is the quick way only: what is
// not plainly good is left to the checks in infinity/optim/cpu.py, which have the words for it.
#pragma once

#include <nanobind/nanobind.h>

#include <optional>
#include <vector>

#include "piece.h"

namespace infinity {

// `pieces` are tuples as infinity.optim.cpu.Piece; `settings` has (rule, number of moments,
// scalars) for each; `formats` are Python's moment formats in the order of `Format`; `api` is
// the capsule `__dlpack_c_exchange_api__` of `tensor_type`. Nothing, and no Python error, if any
// piece is not plainly good.
std::optional<std::vector<Piece>> read_pieces(nanobind::list pieces, nanobind::list settings,
                                              nanobind::tuple formats, nanobind::handle tensor_type,
                                              nanobind::handle api);

}  // namespace infinity
