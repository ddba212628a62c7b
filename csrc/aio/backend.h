// Interface between a lane (lane.h) and the back ends that transfer its blocks.
//
// A back end pulls: it takes blocks from a BlockSource, makes exactly one attempt to transfer each,
// and returns the raw result. Short transfers, retries, errors, accounting and cancellation are
// handled by the lane, so all back ends behave identically. The fault-injecting back end
// (faulty.cpp) is the BlockSource of a real back end and modifies blocks and results in between.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "file.h"

namespace infinity::aio {

enum class Op : int { read = 0, write = 1 };

inline const char* op_name(Op op) { return op == Op::read ? "read" : "write"; }

class Ticket;
struct Faults;
struct SubRequest;

// One contiguous transfer. Owned by a lane; accessed by the back end between take() and finish().
struct Block {
  Op op = Op::read;
  std::shared_ptr<File> file;
  uint64_t offset = 0;    // bytes, in the file
  uint64_t length = 0;    // bytes
  uint64_t address = 0;   // of the memory
  uint64_t done = 0;      // bytes transferred by earlier attempts; the next one starts here
  uint64_t end = 0;       // end of this attempt: `length`, or less if a fault shortens it
  uint64_t serial = 0;    // number of the block on its device, from 0
  uint32_t attempts = 0;  // number of times it was taken

  // Used by the lane only.
  std::shared_ptr<Ticket> ticket;  // set while the block is in flight, else null
  SubRequest* sub_request = nullptr;
  int64_t start_ns = 0;          // CLOCK_MONOTONIC
  bool in_kernel = false;        // for the watchdog; false while the throttle delays completion
  uint32_t idle_attempts = 0;    // consecutive attempts without progress
  int error = 0;                 // errno, 0 on success
  const char* reason = nullptr;  // static string, if more specific than errno
};

// Source of blocks for one back end. All methods are thread-safe.
class BlockSource {
 public:
  virtual ~BlockSource() = default;
  // Stores up to `max_blocks` blocks and returns their number. Does not wait for blocks: on 0, the
  // back end sleeps until wake().
  virtual size_t take(Block** blocks, size_t max_blocks) = 0;
  // Returns a block taken earlier. `result` is the number of bytes transferred by this attempt, in
  // [0, end - done], or a negated errno. The kernel must no longer reference the block's memory.
  // The caller calls take() again before it sleeps, since the block may need another attempt.
  virtual void finish(Block* block, int64_t result) = 0;
};

class Backend {
 public:
  virtual ~Backend() = default;  // calls stop()
  // Notifies the back end of up to `num_blocks` new blocks. Thread-safe; does not wait for I/O.
  virtual void wake(size_t num_blocks) = 0;
  // Finishes all blocks taken so far and joins all threads. Idempotent, not thread-safe.
  virtual void stop() = 0;
  // Stops waiting for blocks that do not complete. Called at most once, before stop().
  // Returns true if all blocks have been finished; stop() then does not block. Returns false if
  // blocks are still in the kernel: the threads that wait for them are detached and may access this
  // object, its BlockSource and the blocks' memory at any later time; none of them may be freed.
  virtual bool abandon() = 0;
  // Description of the setup, for `backend_reason`.
  virtual std::string description() const = 0;
};

// Both throw IoFailure, with the likely cause, if the system does not support the interface.
std::unique_ptr<Backend> make_uring_backend(BlockSource& source, uint32_t queue_depth);
std::unique_ptr<Backend> make_threads_backend(BlockSource& source, uint32_t num_threads);
// Inserts fault injection between `source` and the back end created by `make`.
using MakeBackend = std::function<std::unique_ptr<Backend>(BlockSource&)>;
std::unique_ptr<Backend> make_faulty_backend(BlockSource& source, const Faults& faults,
                                             const MakeBackend& make);

}  // namespace infinity::aio
