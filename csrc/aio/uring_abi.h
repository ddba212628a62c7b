// Subset of the io_uring ABI, from io_uring_setup(2) and io_uring_enter(2).
//
// Defined here because the kernel headers of wheel build images are older than the kernels at run
// time. Sizes and offsets are part of the stable kernel ABI.
#pragma once

#include <cstdint>

namespace infinity::aio::uring {

struct SubmissionOffsets {
  uint32_t head, tail, ring_mask, ring_entries, flags, dropped, array, resv1;
  uint64_t user_addr;
};
static_assert(sizeof(SubmissionOffsets) == 40);

struct CompletionOffsets {
  uint32_t head, tail, ring_mask, ring_entries, overflow, cqes, flags, resv1;
  uint64_t user_addr;
};
static_assert(sizeof(CompletionOffsets) == 40);

struct Params {
  uint32_t sq_entries, cq_entries, flags, sq_thread_cpu, sq_thread_idle, features, wq_fd;
  uint32_t resv[3];
  SubmissionOffsets sq_off;
  CompletionOffsets cq_off;
};
static_assert(sizeof(Params) == 120);

struct Submission {
  uint8_t opcode, flags;
  uint16_t ioprio;
  int32_t fd;
  uint64_t offset, address;
  uint32_t length, rw_flags;
  uint64_t user_data;
  uint64_t unused[3];
};
static_assert(sizeof(Submission) == 64);

struct Completion {
  uint64_t user_data;
  int32_t result;
  uint32_t flags;
};
static_assert(sizeof(Completion) == 16);

constexpr uint8_t kOpNop = 0;
constexpr uint8_t kOpRead = 22;
constexpr uint8_t kOpWrite = 23;

constexpr uint32_t kSetupClamp = 1u << 4;
constexpr uint32_t kSetupSubmitAll = 1u << 7;
constexpr uint32_t kSetupCoopTaskrun = 1u << 8;
constexpr uint32_t kSetupSingleIssuer = 1u << 12;
constexpr uint32_t kSetupDeferTaskrun = 1u << 13;

constexpr uint32_t kFeatureSingleMmap = 1u << 0;
constexpr uint32_t kFeatureNoDrop = 1u << 1;
constexpr uint32_t kFeatureRwCurPos = 1u << 3;  // Linux 5.6, as are kOpRead and kOpWrite

constexpr uint32_t kEnterGetEvents = 1u << 0;

constexpr uint64_t kOffsetRing = 0;
constexpr uint64_t kOffsetSubmissions = 0x10000000;

}  // namespace infinity::aio::uring
