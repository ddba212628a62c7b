// What an engine is told.
#pragma once

#include <cstdint>
#include <string>

#include "faults.h"

namespace infinity::aio {

enum class BackendKind { automatic, uring, threads };

struct EngineConfig {
  BackendKind backend = BackendKind::automatic;
  uint64_t block_size = 1 << 20;
  uint32_t queue_depth = 8;       // per device
  uint32_t num_threads = 4;       // per device
  uint64_t slow_bytes_per_s = 0;  // per device; 0: as fast as the disk
  double stuck_after_s = 0;       // 0: no watchdog
  Faults faults{};                // none unless asked for

  int64_t stuck_after_ns() const { return static_cast<int64_t>(stuck_after_s * 1e9); }
};

}  // namespace infinity::aio
