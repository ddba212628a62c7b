// `AioError` in Python, and its translation from IoFailure.
#include <nanobind/stl/string.h>

#include <cerrno>
#include <string>

#include "bind.h"
#include "error.h"

namespace infinity::aio {
namespace {

namespace nb = nanobind;

// The constructor of OSError sets errno, strerror and filename.
nb::object make_error(nb::handle type, const IoFailure& failure) {
  nb::object path = failure.path.empty() ? nb::none() : nb::object(nb::str(failure.path.c_str()));
  nb::object error = type(failure.error, failure.reason, path);
  error.attr("op") = failure.op;
  error.attr("offset") = failure.offset;
  error.attr("length") = failure.length;
  return error;
}

// AioError.__str__. Reads the attributes, which Python code may have set.
nb::object error_text(nb::handle self) {
  const nb::object error = self.attr("errno");
  if (error.is_none()) return nb::str(self.attr("args"));
  const nb::object path = self.attr("filename");
  return nb::cast(describe_failure(
      nb::cast<std::string>(self.attr("op")),
      path.is_none() ? std::string() : nb::cast<std::string>(nb::str(path)),
      nb::cast<uint64_t>(self.attr("offset")), nb::cast<uint64_t>(self.attr("length")),
      nb::cast<int>(error), nb::cast<std::string>(nb::str(self.attr("strerror")))));
}

void translate(const std::exception_ptr& pointer, void* type) {
  try {
    std::rethrow_exception(pointer);
  } catch (const IoFailure& failure) {
    const nb::handle error_type(static_cast<PyObject*>(type));
    PyErr_SetObject(error_type.ptr(), make_error(error_type, failure).ptr());
  }
}

}  // namespace

void bind_error(nb::module_& module) {
  PyObject* raw = PyErr_NewExceptionWithDoc(
      "infinity._aio.AioError",
      "Failed I/O operation: an OSError with the attributes op, offset and "
      "length.",
      PyExc_OSError, nullptr);
  if (raw == nullptr) throw nb::python_error();
  nb::object type = nb::steal(raw);
  type.attr("op") = "";
  type.attr("offset") = 0;
  type.attr("length") = 0;
  type.attr("__str__") =
      nb::cpp_function(&error_text, nb::name("__str__"), nb::scope(type), nb::is_method());
  module.attr("AioError") = type;
  nb::register_exception_translator(&translate, type.ptr());  // the module references the type
}

}  // namespace infinity::aio
