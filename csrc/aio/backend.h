// The contract between the engine and whatever moves the bytes.
//
// A back end *pulls*: it takes blocks from the source, makes ONE attempt at each, and hands the raw
// result back. Everything that needs judgement (short transfers, retries, errors, accounting,
// cancelling) happens once, in the engine, so that all back ends behave alike. A back end that
// injects faults can wrap a source and alter what passes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "file.h"

namespace infinity::aio {

enum class Op : int { read = 0, write = 1 };

inline const char* op_name(Op op) { return op == Op::read ? "read" : "write"; }

class Ticket;

// One contiguous transfer. Owned by the engine, lent to a back end between take() and finish().
struct Block {
  Op op = Op::read;
  const File* file = nullptr;  // kept open by the block's ticket
  uint64_t offset = 0;
  uint64_t length = 0;
  uint64_t address = 0;
  uint64_t done = 0;  // bytes moved by earlier attempts; a back end continues from here

  // The engine's own notes.
  std::shared_ptr<Ticket> ticket;
  int64_t start_ns = 0;
  uint32_t idle_attempts = 0;  // attempts in a row that moved nothing
  int error = 0;
  const char* reason = nullptr;  // static text, where it says more than errno
};

class BlockSource {
 public:
  virtual ~BlockSource() = default;
  // Never blocks. Fills at most `max_blocks` and returns how many; 0 means "sleep until wake()".
  virtual size_t take(Block** blocks, size_t max_blocks) = 0;
  // `result`: bytes moved by this attempt (any number from 0 to length - done), or a negated errno.
  // The kernel must hold no reference to the block's memory any more. Call take() again before
  // sleeping: the block may have come back for the rest.
  virtual void finish(Block* block, int64_t result) = 0;
};

class Backend {
 public:
  virtual ~Backend() = default;  // implies stop()
  // There may be up to `num_blocks` new blocks to take. Any thread; never blocks.
  virtual void wake(size_t num_blocks) = 0;
  // Finishes every block already taken and joins all threads. Idempotent; one caller at a time.
  virtual void stop() = 0;
  // How it was set up, for people.
  virtual std::string description() const = 0;
};

// Both throw IoFailure, with the likely cause, when the machine does not offer the interface.
std::unique_ptr<Backend> make_uring_backend(BlockSource& source, uint32_t queue_depth);
std::unique_ptr<Backend> make_threads_backend(BlockSource& source, uint32_t num_threads);

}  // namespace infinity::aio
