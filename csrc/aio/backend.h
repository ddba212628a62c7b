// The contract between a lane of the engine and whatever moves the bytes.
//
// A back end *pulls*: it takes blocks from the source, makes ONE attempt at each, and hands the raw
// result back. Everything that needs judgement (short transfers, retries, errors, accounting,
// cancelling) happens once, in the lane, so that all back ends behave alike. The back end that
// injects faults (faulty.cpp) is a source to a real one and alters what passes.
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
struct Part;

// One contiguous transfer. Owned by a lane, lent to a back end between take() and finish().
struct Block {
  Op op = Op::read;
  std::shared_ptr<File> file;
  uint64_t offset = 0;
  uint64_t length = 0;
  uint64_t address = 0;
  uint64_t done = 0;      // bytes moved by earlier attempts; a back end continues from here
  uint64_t end = 0;       // where this attempt ends: `length`, or less when a fault cuts it short
  uint64_t serial = 0;    // the how manyeth block of its device
  uint32_t attempts = 0;  // times it was taken

  // The lane's own notes.
  std::shared_ptr<Ticket> ticket;  // set while the block is lent out
  Part* part = nullptr;
  int64_t start_ns = 0;
  bool in_kernel = false;      // false from the moment the bytes are moved, or were refused
  uint32_t idle_attempts = 0;  // attempts in a row that moved nothing
  int error = 0;
  const char* reason = nullptr;  // static text, where it says more than errno
};

class BlockSource {
 public:
  virtual ~BlockSource() = default;
  // Never blocks. Fills at most `max_blocks` and returns how many; 0 means "sleep until wake()".
  virtual size_t take(Block** blocks, size_t max_blocks) = 0;
  // `result`: bytes moved by this attempt (any number from 0 to end - done), or a negated errno.
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
  // Gives up on blocks that do not come back; called instead of waiting for ever, before stop().
  // Post, true: all blocks were finished after all (they were only held back), and stop() will not
  // hang. False: the kernel has some; the threads that wait for them are detached and will use this
  // object, its source and the blocks' memory at any time from now on, so none may ever be freed.
  virtual bool abandon() = 0;
  // How it was set up, for people.
  virtual std::string description() const = 0;
};

// Each throws IoFailure, with the likely cause, when the machine does not offer the interface.
std::unique_ptr<Backend> make_uring_backend(BlockSource& source, uint32_t queue_depth);
std::unique_ptr<Backend> make_threads_backend(BlockSource& source, uint32_t num_threads);
// Puts faults between `source` and the back end that `make` makes.
using MakeBackend = std::function<std::unique_ptr<Backend>(BlockSource&)>;
std::unique_ptr<Backend> make_faulty_backend(BlockSource& source, const Faults& faults,
                                             const MakeBackend& make);

}  // namespace infinity::aio
