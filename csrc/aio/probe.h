// What this machine offers in one directory, found by doing it rather than by version numbers.
#pragma once

#include <functional>
#include <string>

namespace infinity::aio {

struct BackendProbe {
  bool ok;
  std::string reason;
};

struct ProbeResult {
  BackendProbe uring;
  BackendProbe threads;
};

// Writes and reads back one block with each back end, in a file that is unlinked at once. `pulse`
// is called at least every 50 ms while it waits, and may throw. Throws IoFailure when the directory
// takes no file at all.
ProbeResult probe_directory(const std::string& directory, const std::function<void()>& pulse);

}  // namespace infinity::aio
