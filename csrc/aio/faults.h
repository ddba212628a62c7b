// Faults: selection of the faults to inject. A pure function of the seed and of the serial number
// and attempt of a block on its device. Equal submissions, split in the same order, get equal
// faults, independent of the timing of the device.
#pragma once

#include <cstdint>
#include <string>

#include "backend.h"

namespace infinity::aio {

enum class Fault : uint32_t {
  none = 0,
  eio = 1u << 0,      // the attempt fails with EIO and transfers nothing
  enospc = 1u << 1,   // a write fails with ENOSPC
  partial = 1u << 2,  // "short": a short transfer, which needs another attempt
  delay = 1u << 3,    // the result is delayed by some milliseconds
  reorder = 1u << 4,  // the result is returned after that of a later block
  flip = 1u << 5,     // one bit of the data read is inverted
  stuck = 1u << 6,    // the attempt does not complete
};

struct Faults {
  bool enabled = false;
  uint64_t seed = 0;
  uint32_t kinds = 0;  // bits of Fault
  double rate = 0;     // fraction of attempts with a fault, in [0, 1]

  // Parses "" (no faults) or
  // "seed=1[,kinds=eio+enospc+short+delay+reorder+flip+stuck][,rate=0.01]". The defaults are all
  // kinds and a rate of 0.01. Throws std::invalid_argument.
  static Faults parse(const std::string& text);

  bool has(Fault kind) const { return (kinds & static_cast<uint32_t>(kind)) != 0; }
  // Returns the fault of the current attempt of a block.
  Fault choose(const Block& block) const;
  // Returns a pseudorandom number in [0, bound) that depends on the seed, the block's serial
  // number, its current attempt and `salt` only.
  uint64_t random_below(const Block& block, uint64_t salt, uint64_t bound) const;
};

}  // namespace infinity::aio
