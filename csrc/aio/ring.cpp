#include "ring.h"

#include <algorithm>
#include <atomic>
#include <cerrno>

#include "error.h"
#include "os.h"

namespace infinity::aio::uring {
namespace {

struct FlagName {
  uint32_t flag;
  const char* name;
};
constexpr FlagName kFlags[] = {
    {kSetupSingleIssuer, "SINGLE_ISSUER"},
    {kSetupDeferTaskrun, "DEFER_TASKRUN"},
    {kSetupCoopTaskrun, "COOP_TASKRUN"},
    {kSetupSubmitAll, "SUBMIT_ALL"},
    {kSetupClamp, "CLAMP"},
};

// In order of preference, with the kernel version that introduced each. A kernel that does not
// support a flag returns EINVAL. DEFER_TASKRUN requires SINGLE_ISSUER.
constexpr uint32_t kBase = kSetupClamp;
constexpr uint32_t kFlagSets[] = {
    kBase | kSetupSubmitAll | kSetupCoopTaskrun | kSetupSingleIssuer | kSetupDeferTaskrun,  // 6.1
    kBase | kSetupSubmitAll | kSetupCoopTaskrun | kSetupSingleIssuer,                       // 6.0
    kBase | kSetupSubmitAll | kSetupCoopTaskrun,                                            // 5.19
    kBase | kSetupSubmitAll,                                                                // 5.18
    kBase,
    0,
};

const char* setup_cause(int error) {
  switch (error) {
    case EPERM:
      return " (seccomp of a container, or sysctl kernel.io_uring_disabled)";
    case EACCES:
      return " (denied by a security module)";
    case ENOSYS:
      return " (kernel before 5.1, or io_uring is compiled out or blocked by a sandbox)";
    case ENOMEM:
      return " (RLIMIT_MEMLOCK: raise `ulimit -l`)";
    case EMFILE:
      return " (too many open files: raise `ulimit -n`)";
    default:
      return "";
  }
}

[[noreturn]] void fail(const char* call, int error) {
  throw IoFailure(error, "start", {}, 0, 0,
                  std::string(call) + " failed with " + error_name(error) + setup_cause(error));
}

uint32_t load_acquire(uint32_t* word) {
  return std::atomic_ref<uint32_t>(*word).load(std::memory_order_acquire);
}

void store_release(uint32_t* word, uint32_t value) {
  std::atomic_ref<uint32_t>(*word).store(value, std::memory_order_release);
}

}  // namespace

Ring::Ring(uint32_t num_entries) {
  try {
    set_up(num_entries);
    map();
    self_test();
  } catch (...) {
    unmap_all();
    throw;
  }
}

Ring::~Ring() { unmap_all(); }

void Ring::set_up(uint32_t num_entries) {
  for (const uint32_t flags : kFlagSets) {
    params_ = Params{};
    params_.flags = flags;
    fd_ = os::uring_setup(num_entries, &params_);
    if (fd_ != -EINVAL) break;
  }
  if (fd_ < 0) fail("io_uring_setup", -fd_);
  constexpr uint32_t kRequired = kFeatureSingleMmap | kFeatureNoDrop | kFeatureRwCurPos;
  if ((params_.features & kRequired) != kRequired) {
    throw IoFailure(ENOSYS, "start", {}, 0, 0, "this kernel's io_uring is older than Linux 5.6");
  }
}

void Ring::map() {
  const size_t sq_bytes = params_.sq_off.array + params_.sq_entries * sizeof(uint32_t);
  const size_t cq_bytes = params_.cq_off.cqes + params_.cq_entries * sizeof(Completion);
  ring_bytes_ = std::max(sq_bytes, cq_bytes);
  if (const int result = os::map_shared(fd_, ring_bytes_, kOffsetRing, &ring_); result < 0) {
    fail("mmap of the rings", -result);
  }
  submissions_bytes_ = params_.sq_entries * sizeof(Submission);
  if (const int result =
          os::map_shared(fd_, submissions_bytes_, kOffsetSubmissions, &submissions_map_);
      result < 0) {
    fail("mmap of the submission entries", -result);
  }
  const auto word = [this](uint32_t offset) {
    return reinterpret_cast<uint32_t*>(static_cast<char*>(ring_) + offset);
  };
  submissions_ = static_cast<Submission*>(submissions_map_);
  sq_head_ = word(params_.sq_off.head);
  sq_tail_ = word(params_.sq_off.tail);
  sq_mask_ = *word(params_.sq_off.ring_mask);
  cq_head_ = word(params_.cq_off.head);
  cq_tail_ = word(params_.cq_off.tail);
  cq_mask_ = *word(params_.cq_off.ring_mask);
  completions_ = reinterpret_cast<Completion*>(word(params_.cq_off.cqes));
  // Identity mapping: entries are submitted in the order of the submission queue.
  uint32_t* array = word(params_.sq_off.array);
  for (uint32_t i = 0; i < params_.sq_entries; ++i) array[i] = i;
}

// Submits a no-op and waits for it: a sandbox may permit io_uring_setup, but not io_uring_enter.
void Ring::self_test() {
  prepare(kOpNop, -1, 0, 0, 0, 0);
  Completion completion{};
  for (int attempt = 0; attempt < 1000; ++attempt) {
    const int result = enter(1);
    if (reap(&completion)) return;
    if (result < 0 && result != -EINTR && result != -EAGAIN) fail("io_uring_enter", -result);
  }
  fail("io_uring_enter", ETIMEDOUT);
}

void Ring::unmap_all() {
  if (submissions_map_ != nullptr) os::unmap(submissions_map_, submissions_bytes_);
  if (ring_ != nullptr) os::unmap(ring_, ring_bytes_);
  if (fd_ >= 0) os::close_fd(fd_);
}

// Number of entries that the kernel has not consumed. The acquire load pairs with the kernel's
// store of the head, after which it no longer reads the consumed entries.
uint32_t Ring::num_prepared() const { return *sq_tail_ - load_acquire(sq_head_); }

void Ring::prepare(uint8_t opcode, int fd, uint64_t address, uint32_t length, uint64_t offset,
                   uint64_t user_data) {
  const uint32_t tail = *sq_tail_;
  Submission& submission = submissions_[tail & sq_mask_];
  submission = Submission{};
  submission.opcode = opcode;
  submission.fd = fd;
  submission.address = address;
  submission.length = length;
  submission.offset = offset;
  submission.user_data = user_data;
  store_release(sq_tail_, tail + 1);  // publishes the entry to the kernel
}

int Ring::enter(uint32_t min_complete) {
  const int result = os::uring_enter(fd_, num_prepared(), min_complete, kEnterGetEvents);
  return std::min(result, 0);
}

bool Ring::reap(Completion* completion) {
  const uint32_t head = *cq_head_;
  if (head == load_acquire(cq_tail_)) return false;  // orders the read of the entry
  *completion = completions_[head & cq_mask_];
  store_release(cq_head_, head + 1);  // the kernel may overwrite the entry
  return true;
}

bool Ring::pop_unsubmitted(uint64_t* user_data) {
  if (num_prepared() == 0) return false;
  const uint32_t tail = *sq_tail_ - 1;
  *user_data = submissions_[tail & sq_mask_].user_data;
  store_release(sq_tail_, tail);
  return true;
}

std::string Ring::flag_names() const {
  std::string names;
  for (const FlagName& entry : kFlags) {
    if ((params_.flags & entry.flag) == 0) continue;
    names += (names.empty() ? "" : " ") + std::string(entry.name);
  }
  return names.empty() ? "no flags" : names;
}

}  // namespace infinity::aio::uring
