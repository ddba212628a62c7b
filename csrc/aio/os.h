// Every system call of the I/O engine, each in one place.
//
// Convention: a result is >= 0 or a negated errno; nothing here throws, allocates or retries, and
// no other file of this module calls the kernel (threads and locks of the C++ library excepted).
// EINTR is handed up, because only the caller knows whether a Python signal handler must run.
#pragma once

#include <cstddef>
#include <cstdint>

namespace infinity::aio::os {

// What statx(STATX_DIOALIGN) tells of an open file. `known` is false on kernels before 6.1 and on
// file systems that do not answer; with `known`, a memory alignment of 0 means "no direct I/O".
struct DirectAlignment {
  bool known;
  uint32_t memory;
  uint32_t offset;
};

// --- files ---------------------------------------------------------------------------------------
struct OpenFlags {
  bool create;  // O_CREAT | O_EXCL, mode 0600
  bool read_only;
  bool direct;  // O_DIRECT
};
// Opens `path` with O_CLOEXEC. Post: a descriptor the caller owns.
int open_file(const char* path, OpenFlags flags);
// Pre: `fd` is owned by the caller and used by nobody else. Post: `fd` is gone, error or not.
int close_fd(int fd);
int unlink_file(const char* path);
// Size in bytes of a regular file or block device.
int64_t file_size(int fd);
// Clears O_DIRECT on an open file; later transfers go through the page cache.
int clear_direct(int fd);
DirectAlignment direct_alignment(int fd);
// Reserves blocks for [0, size). -EOPNOTSUPP where the file system cannot.
int allocate(int fd, int64_t size);
int truncate(int fd, int64_t size);
// Data and the size are on stable storage when this returns 0.
int data_sync(int fd);
// Magic number of the file system that holds an open file.
int64_t file_system_magic(int fd);
// The block device behind an open file, as stat's st_dev; anonymous devices have major 0.
struct Device {
  uint32_t major;
  uint32_t minor;
};
int file_device(int fd, Device* device);

// --- page cache ----------------------------------------------------------------------------------
// Starts writing the dirty pages of a range; returns before they are on the device, unless the
// device's queue is full.
int start_write_back(int fd, uint64_t offset, uint64_t length);
// Waits until the pages of a range that were dirty are written. Says nothing of metadata.
int finish_write_back(int fd, uint64_t offset, uint64_t length);
// No read-ahead through this descriptor: what is asked for is read, all at once, and no more.
int forbid_read_ahead(int fd);
// Drops the clean pages of a range from the page cache.
int drop_pages(int fd, uint64_t offset, uint64_t length);

// --- transfers -----------------------------------------------------------------------------------
// One attempt; may transfer less than `length`. Pre: `address` is valid for `length` bytes.
int64_t read_at(int fd, void* address, size_t length, uint64_t offset);
int64_t write_at(int fd, const void* address, size_t length, uint64_t offset);

// --- io_uring ------------------------------------------------------------------------------------
// `params` is a struct io_uring_params (120 bytes, see uring_abi.h). Post: the ring's descriptor.
int uring_setup(uint32_t num_entries, void* params);
// Post: number of submissions consumed.
int uring_enter(int ring_fd, uint32_t to_submit, uint32_t min_complete, uint32_t flags);
// Shared mapping of a ring. Post: `*address` is set and mapped when the result is 0.
int map_shared(int fd, size_t length, uint64_t offset, void** address);
void unmap(void* address, size_t length);

// --- waking a thread that sleeps in the ring -----------------------------------------------------
int event_create();
// Adds one to the event; never blocks (the counter cannot overflow with one reader that resets it).
int event_signal(int event_fd);

// --- process and time ----------------------------------------------------------------------------
int64_t monotonic_ns();
int process_id();
void sleep_ms(uint32_t milliseconds);
// Page-aligned private memory, zero filled.
int map_private(size_t length, void** address);
// For native threads: signals belong to the interpreter's main thread; also names the thread.
void prepare_native_thread(const char* name);

}  // namespace infinity::aio::os
