// Wrappers of all system calls of the I/O engine, except those made by C++ threads and locks.
//
// Functions return a value >= 0 or a negated errno. They do not throw, allocate memory or retry:
// EINTR is returned, because only the caller knows whether Python signal handlers must run.
#pragma once

#include <cstddef>
#include <cstdint>

namespace infinity::aio::os {

// O_DIRECT alignment in bytes, from statx(STATX_DIOALIGN). `known` is false on kernels before 6.1
// and on file systems that do not report it. If `known`, 0 means no O_DIRECT for this file.
struct DirectAlignment {
  bool known;
  uint32_t memory;
  uint32_t offset;
};

// Files.

struct OpenFlags {
  bool create;  // O_CREAT | O_EXCL, mode 0600
  bool read_only;
  bool direct;  // O_DIRECT
};
// Opens `path` with O_CLOEXEC. Returns a descriptor owned by the caller.
int open_file(const char* path, OpenFlags flags);
// Requires that no other thread uses `fd`. The descriptor is released even if an error is returned.
int close_fd(int fd);
int unlink_file(const char* path);
// Size in bytes of a regular file or block device.
int64_t file_size(int fd);
// Clears O_DIRECT on an open file. Later transfers use the page cache.
int clear_direct(int fd);
DirectAlignment direct_alignment(int fd);
// Allocates disk space for [0, size). Returns -EOPNOTSUPP if the file system does not support it.
int allocate(int fd, int64_t size);
int truncate(int fd, int64_t size);
// Writes data and file size to stable storage (fdatasync).
int data_sync(int fd);
// Magic number of the file system of an open file, see statfs(2).
int64_t file_system_magic(int fd);
// Device of an open file (st_dev). Anonymous devices have major 0.
struct Device {
  uint32_t major;
  uint32_t minor;
};
int file_device(int fd, Device* device);

// Page cache.

// Starts write-back of the dirty pages of a range. Blocks only if the device's queue is full.
int start_write_back(int fd, uint64_t offset, uint64_t length);
// Writes the dirty pages of a range and waits for them. Does not write metadata.
int finish_write_back(int fd, uint64_t offset, uint64_t length);
// Disables read-ahead on this descriptor (POSIX_FADV_RANDOM).
int disable_read_ahead(int fd);
// Drops the clean pages of a range from the page cache.
int drop_pages(int fd, uint64_t offset, uint64_t length);

// Transfers.

// One pread or pwrite. Returns the number of bytes transferred, which may be less than `length`.
int64_t read_at(int fd, void* address, size_t length, uint64_t offset);
int64_t write_at(int fd, const void* address, size_t length, uint64_t offset);

// io_uring.

// `params` is a struct io_uring_params (120 bytes, see uring_abi.h). Returns the ring's descriptor.
int uring_setup(uint32_t num_entries, void* params);
// Returns the number of submission queue entries consumed.
int uring_enter(int ring_fd, uint32_t to_submit, uint32_t min_complete, uint32_t flags);
// Maps a range of a ring's memory and stores its address.
int map_shared(int fd, size_t length, uint64_t offset, void** address);
void unmap(void* address, size_t length);

// Creates an eventfd, used to wake a thread that waits in io_uring_enter.
int event_create();
// Adds one to the counter. Does not block, since the counter cannot reach its maximum of 2**64 - 2.
int event_signal(int event_fd);

// Process, time and memory.

int64_t monotonic_ns();
int process_id();
void sleep_ms(uint32_t milliseconds);
// Maps private zero-filled memory and stores its page-aligned address.
int map_private(size_t length, void** address);
// To be called by each thread that this module starts. Blocks all signals, so that they are
// delivered to the interpreter's threads, and sets the thread's name (at most 15 characters).
void prepare_native_thread(const char* name);

}  // namespace infinity::aio::os
