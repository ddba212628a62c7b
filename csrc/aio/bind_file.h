// `File` in Python.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>
#include <string>

#include "file.h"

namespace infinity::aio {

class PyFile {
 public:
  PyFile(const std::string& path, bool create, bool read_only, const std::string& direct);

  const std::string& path() const { return path_; }
  int fd() const { return file_ ? file_->fd() : -1; }
  const std::shared_ptr<File>& get() const;  // throws when closed
  std::string device() const;
  void allocate(int64_t size) const;
  void sync() const;
  void close();

 private:
  const std::string path_;
  std::shared_ptr<File> file_;
};

void bind_file(nanobind::module_& module);

}  // namespace infinity::aio
