// One io_uring: two mapped queues and one system call. Used by a single thread, which must be the
// one that made it (SINGLE_ISSUER). Knows nothing of blocks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "uring_abi.h"

namespace infinity::aio::uring {

class Ring {
 public:
  explicit Ring(uint32_t num_entries);  // throws IoFailure with the likely cause
  ~Ring();
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;

  // Pre: fewer than num_entries submissions are prepared and not yet entered.
  void prepare(uint8_t opcode, int fd, uint64_t address, uint32_t length, uint64_t offset,
               uint64_t user_data);
  // Submits what is prepared and waits for `min_complete` completions. 0 or a negated errno; what
  // the kernel did not take stays prepared.
  int enter(uint32_t min_complete);
  // The next completion, if there is one.
  bool reap(Completion* completion);
  // Takes back the submission the kernel has not consumed that was prepared last.
  bool take_back(uint64_t* user_data);

  std::string flag_names() const;

 private:
  void set_up(uint32_t num_entries);
  void map();
  void self_test();
  void unmap_all();
  uint32_t num_prepared() const;

  int fd_ = -1;
  Params params_{};
  void* ring_ = nullptr;
  size_t ring_bytes_ = 0;
  void* submissions_map_ = nullptr;
  size_t submissions_bytes_ = 0;

  Submission* submissions_ = nullptr;
  uint32_t* sq_head_ = nullptr;  // the kernel moves it
  uint32_t* sq_tail_ = nullptr;  // we move it
  uint32_t sq_mask_ = 0;
  uint32_t* cq_head_ = nullptr;  // we move it
  uint32_t* cq_tail_ = nullptr;  // the kernel moves it
  uint32_t cq_mask_ = 0;
  Completion* completions_ = nullptr;
};

}  // namespace infinity::aio::uring
