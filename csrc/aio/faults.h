// Which blocks of a faulty engine go wrong, and how: a pure function of the seed and of the block's
// number and attempt on its device. So the same submissions, cut in the same order, meet the same
// faults, whatever the timing of the device.
#pragma once

#include <cstdint>
#include <string>

#include "backend.h"

namespace infinity::aio {

enum class Fault : uint32_t {
  none = 0,
  eio = 1u << 0,        // the attempt fails with EIO, nothing is moved
  enospc = 1u << 1,     // a write fails with ENOSPC
  cut_short = 1u << 2,  // "short": only a part is moved; the rest needs another attempt
  delay = 1u << 3,      // the result comes some milliseconds late
  reorder = 1u << 4,    // the result comes after that of a later block
  flip = 1u << 5,       // one bit of what was read is wrong
  stuck = 1u << 6,      // the result never comes
};

struct Faults {
  bool enabled = false;
  uint64_t seed = 0;
  uint32_t kinds = 0;  // bits of Fault
  double rate = 0;     // share of attempts that go wrong

  // "", or "seed=1[,kinds=eio+enospc+short+delay+reorder+flip+stuck][,rate=0.01]"; all kinds and
  // one in a hundred if not said. Throws std::invalid_argument with what is wrong.
  static Faults parse(const std::string& text);

  bool has(Fault kind) const { return (kinds & static_cast<uint32_t>(kind)) != 0; }
  // What happens to this attempt at a block.
  Fault choose(const Block& block) const;
  // A number below `bound` for this attempt, the same every time; `salt` tells questions apart.
  uint64_t number(const Block& block, uint64_t salt, uint64_t bound) const;
};

}  // namespace infinity::aio
