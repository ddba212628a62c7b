// Ring: an io_uring instance, accessed by raw system calls. All calls must come from the thread
// that created it (IORING_SETUP_SINGLE_ISSUER).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "uring_abi.h"

namespace infinity::aio::uring {

class Ring {
 public:
  // Throws IoFailure, with the likely cause, if io_uring is not available.
  explicit Ring(uint32_t num_entries);
  ~Ring();
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;

  // Adds an entry to the submission queue. Requires fewer than num_entries entries that the kernel
  // has not consumed.
  void prepare(uint8_t opcode, int fd, uint64_t address, uint32_t length, uint64_t offset,
               uint64_t user_data);
  // Submits the prepared entries and waits for `min_complete` completions. Returns 0 or a negated
  // errno. Entries that the kernel did not consume stay in the submission queue.
  int enter(uint32_t min_complete);
  // Removes the next entry of the completion queue. Returns false if it is empty.
  bool reap(Completion* completion);
  // Removes the last entry of the submission queue that the kernel has not consumed and stores its
  // user_data. Returns false if there is none.
  bool pop_unsubmitted(uint64_t* user_data);

  std::string flag_names() const;  // of the setup flags in use

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
  uint32_t* sq_head_ = nullptr;  // written by the kernel
  uint32_t* sq_tail_ = nullptr;  // written by this class
  uint32_t sq_mask_ = 0;
  uint32_t* cq_head_ = nullptr;  // written by this class
  uint32_t* cq_tail_ = nullptr;  // written by the kernel
  uint32_t cq_mask_ = 0;
  Completion* completions_ = nullptr;
};

}  // namespace infinity::aio::uring
