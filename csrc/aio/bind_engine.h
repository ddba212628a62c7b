// `Engine` in Python.
#pragma once

#include <nanobind/nanobind.h>

namespace infinity::aio {

// Pre: bind_file and bind_ticket ran.
void bind_engine(nanobind::module_& module);

}  // namespace infinity::aio
