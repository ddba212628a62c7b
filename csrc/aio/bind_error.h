// AioError, and the way from IoFailure to it.
#pragma once

#include <nanobind/nanobind.h>

#include "error.h"

namespace infinity::aio {

// Defines `AioError` in the module and registers the translation of IoFailure.
void bind_error(nanobind::module_& module);

}  // namespace infinity::aio
