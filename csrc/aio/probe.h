// Test of each back end by a transfer in a given directory.
#pragma once

#include <functional>
#include <string>

namespace infinity::aio {

struct BackendProbe {
  bool ok;
  std::string reason;  // setup of the back end, or the error
};

struct ProbeResult {
  BackendProbe uring;
  BackendProbe threads;
};

// Writes and reads back one block with each back end, in a file that is unlinked after it is
// opened. Calls `poll`, which may throw, every 50 ms while it waits. Throws IoFailure if no file
// can be created in the directory.
ProbeResult probe_directory(const std::string& directory, const std::function<void()>& poll);

}  // namespace infinity::aio
