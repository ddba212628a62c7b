#include "os.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <ctime>

namespace infinity::aio::os {
namespace {

// Equal on all architectures; not defined by headers older than Linux 5.1.
constexpr long kSysUringSetup = 425;
constexpr long kSysUringEnter = 426;

// struct statx of Linux 6.1. The definition of the C library may lack the dio fields.
struct StatxAbi {
  uint32_t mask;
  uint32_t unused_a[37];
  uint32_t dio_memory_alignment;
  uint32_t dio_offset_alignment;
  uint64_t unused_b[12];
};
static_assert(sizeof(StatxAbi) == 256);
static_assert(offsetof(StatxAbi, dio_memory_alignment) == 152);
constexpr uint32_t kStatxDioAlign = 0x2000;

template <typename T>
T or_errno(T result) {
  return result < 0 ? static_cast<T>(-errno) : result;
}

}  // namespace

int open_file(const char* path, OpenFlags flags) {
  int bits = O_CLOEXEC | (flags.read_only ? O_RDONLY : O_RDWR);
  bits |= flags.create ? O_CREAT | O_EXCL : 0;
  bits |= flags.direct ? O_DIRECT : 0;
  return or_errno(::open(path, bits, 0600));
}

int close_fd(int fd) { return or_errno(::close(fd)); }

int unlink_file(const char* path) { return or_errno(::unlink(path)); }

int64_t file_size(int fd) {
  struct stat status;
  if (::fstat(fd, &status) < 0) return -errno;
  if (S_ISREG(status.st_mode)) return status.st_size;
  return or_errno<int64_t>(::lseek(fd, 0, SEEK_END));  // st_size of a block device is 0
}

int clear_direct(int fd) {
  const int flags = ::fcntl(fd, F_GETFL);
  if (flags < 0) return -errno;
  return or_errno(::fcntl(fd, F_SETFL, flags & ~O_DIRECT));
}

DirectAlignment direct_alignment(int fd) {
  StatxAbi status{};
  const long result = ::syscall(SYS_statx, fd, "", AT_EMPTY_PATH, kStatxDioAlign, &status);
  if (result < 0 || (status.mask & kStatxDioAlign) == 0) return {false, 0, 0};
  return {true, status.dio_memory_alignment, status.dio_offset_alignment};
}

int allocate(int fd, int64_t size) { return or_errno(::fallocate(fd, 0, 0, size)); }

int truncate(int fd, int64_t size) { return or_errno(::ftruncate(fd, size)); }

int data_sync(int fd) { return or_errno(::fdatasync(fd)); }

int64_t file_system_magic(int fd) {
  struct statfs status;
  if (::fstatfs(fd, &status) < 0) return -errno;
  return static_cast<uint32_t>(status.f_type);  // avoids sign extension of 32-bit magics
}

int file_device(int fd, Device* device) {
  struct stat status;
  if (::fstat(fd, &status) < 0) return -errno;
  *device = {major(status.st_dev), minor(status.st_dev)};
  return 0;
}

int start_write_back(int fd, uint64_t offset, uint64_t length) {
  return or_errno(::sync_file_range(fd, static_cast<off_t>(offset), static_cast<off_t>(length),
                                    SYNC_FILE_RANGE_WRITE));
}

int finish_write_back(int fd, uint64_t offset, uint64_t length) {
  constexpr unsigned kAll =
      SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER;
  return or_errno(
      ::sync_file_range(fd, static_cast<off_t>(offset), static_cast<off_t>(length), kAll));
}

int disable_read_ahead(int fd) { return -::posix_fadvise(fd, 0, 0, POSIX_FADV_RANDOM); }

int drop_pages(int fd, uint64_t offset, uint64_t length) {
  return -::posix_fadvise(fd, static_cast<off_t>(offset), static_cast<off_t>(length),
                          POSIX_FADV_DONTNEED);
}

int64_t read_at(int fd, void* address, size_t length, uint64_t offset) {
  return or_errno<int64_t>(::pread(fd, address, length, static_cast<off_t>(offset)));
}

int64_t write_at(int fd, const void* address, size_t length, uint64_t offset) {
  return or_errno<int64_t>(::pwrite(fd, address, length, static_cast<off_t>(offset)));
}

int uring_setup(uint32_t num_entries, void* params) {
  return static_cast<int>(or_errno(::syscall(kSysUringSetup, num_entries, params)));
}

int uring_enter(int ring_fd, uint32_t to_submit, uint32_t min_complete, uint32_t flags) {
  return static_cast<int>(
      or_errno(::syscall(kSysUringEnter, ring_fd, to_submit, min_complete, flags, nullptr, 0)));
}

int map_shared(int fd, size_t length, uint64_t offset, void** address) {
  void* mapped = ::mmap(nullptr, length, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd,
                        static_cast<off_t>(offset));
  if (mapped == MAP_FAILED) return -errno;
  *address = mapped;
  return 0;
}

void unmap(void* address, size_t length) { ::munmap(address, length); }

int map_private(size_t length, void** address) {
  void* mapped =
      ::mmap(nullptr, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) return -errno;
  *address = mapped;
  return 0;
}

int event_create() { return or_errno(::eventfd(0, EFD_CLOEXEC)); }

int event_signal(int event_fd) {
  const uint64_t one = 1;
  return ::write(event_fd, &one, sizeof one) < 0 ? -errno : 0;
}

int64_t monotonic_ns() {
  timespec now;
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  return int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

int process_id() { return ::getpid(); }

void sleep_ms(uint32_t milliseconds) {
  const timespec length{milliseconds / 1000, int64_t{milliseconds % 1000} * 1'000'000};
  ::nanosleep(&length, nullptr);
}

void prepare_native_thread(const char* name) {
  sigset_t all;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_BLOCK, &all, nullptr);
  ::pthread_setname_np(::pthread_self(), name);
}

}  // namespace infinity::aio::os
