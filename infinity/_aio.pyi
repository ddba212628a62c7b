"""Asynchronous reads and writes between files and memory addresses (native, csrc/aio).

Addresses are integers. The caller keeps the memory allocated until the ticket is done. Tickets may
complete in any order: wait for a write before reading the same bytes.
"""

from collections.abc import Iterable
from typing import Any, final

READ: int
WRITE: int

# Priorities of `Engine.submit`. FIFO within a class; no class starves.
URGENT: int  # the caller is about to wait
NORMAL: int  # prefetch
BACKGROUND: int  # write-back

class AioError(OSError):
    """Failed I/O operation; `str()` describes the operation and the likely cause.

    ETIMEDOUT is raised by the watchdog: the kernel still references the memory of the requests that
    the message lists.
    """

    # "read", "write", "open", "size", "allocate", "sync", "start", "submit", "wait", "cancel",
    # "counters", "device_counters", "close" or "probe"
    op: str
    offset: int
    length: int

@final
class File:
    """Open file. Requests in flight keep the descriptor open after `close()`. Thread-safe."""

    def __init__(
        self,
        path: str,
        *,
        create: bool = False,  # the file must not exist; mode 0600
        read_only: bool = False,
        direct: str = "auto",  # "auto": O_DIRECT if the file system supports it; "on"; "off"
    ) -> None: ...
    @property
    def path(self) -> str: ...
    @property
    def fd(self) -> int: ...  # -1 if closed; the other members except path then raise ValueError
    @property
    def direct(self) -> bool: ...
    @property
    def direct_reason(self) -> str: ...  # why the file is buffered, "" if direct
    @property
    def file_system(self) -> str: ...  # "ext4", "overlayfs", ...; hexadecimal if unknown
    @property
    def device(self) -> str: ...  # "major:minor" of st_dev
    @property
    def memory_alignment(self) -> int: ...  # bytes; 1 if buffered
    @property
    def offset_alignment(self) -> int: ...  # bytes, also of lengths; 1 if buffered
    @property
    def size(self) -> int: ...
    def allocate(self, size: int) -> None:
        """Allocate disk space for the first `size` bytes. May grow the file; never shrinks it."""

    def sync(self) -> None:
        """Write the data to stable storage (fdatasync)."""

    def close(self) -> None: ...

@final
class Ticket:
    """Submitted request. Remains valid after its engine is closed.

    Dropping the last reference waits until the kernel no longer accesses the memory. If the
    watchdog reports the request as stuck, `keep` is leaked and counted (`leaked_tickets`).
    """

    def wait(self, timeout_s: float | None = None) -> bool:
        """Return True when done, False on timeout. Raise AioError of the first failed block.

        Moves queued blocks to the URGENT class. The memory may be reused after True, and after an
        AioError if `done()`.
        """

    def done(self) -> bool: ...
    def cancel(self) -> bool:
        """Cancel the queued blocks. Return True if no block is in flight.

        If any block was cancelled, the ticket fails with ECANCELED.
        """

    @property
    def nbytes(self) -> int: ...
    @property
    def error(self) -> str | None: ...
    @property
    def times_ns(self) -> tuple[int, int, int] | None:
        """Times of submission, of the start of the first block and of completion; None until done.

        Nanoseconds of `time.perf_counter_ns` on Linux (CLOCK_MONOTONIC).
        """

@final
class Engine:
    """Splits requests into blocks, of which `queue_depth` per device are in flight at a time."""

    def __init__(
        self,
        *,
        backend: str = "auto",  # "auto", "io_uring", "threads"
        block_size: int = 1048576,  # bytes
        queue_depth: int = 8,  # per device, as is num_threads
        num_threads: int = 4,
        slow_bytes_per_s: int = 0,  # > 0: limits the rate of each device, for tests
        stuck_after_s: float = 0.0,  # > 0: waits for requests older than this raise ETIMEDOUT
        faults: str = "",  # "seed=1[,kinds=eio+enospc+short+delay+reorder+flip+stuck][,rate=0.01]"
    ) -> None: ...
    @property
    def backend(self) -> str: ...
    @property
    def backend_reason(self) -> str: ...
    def submit(
        self,
        op: int,
        segments: Iterable[tuple[File, int, int, int]],
        *,
        priority: int = 1,  # NORMAL
        keep: object = None,  # referenced until the kernel no longer accesses the memory
    ) -> Ticket:
        """Queue a list of segments (file, offset, length, address). Does not wait for I/O."""

    def counters(self) -> dict[str, int]:
        """Totals over all devices since the engine was created.

        Keys: {read,write}_{bytes,requests,queue_ns,ns}, queued_blocks, in_flight_blocks, busy_ns,
        tickets, leaked_tickets, leaked_bytes.
        """

    def device_counters(self) -> dict[str, dict[str, int | str]]:
        """Counters of each device used, by `File.device`.

        Keys: {read,write}_{bytes,requests,queue_ns,device_ns}, queued_blocks, in_flight_blocks,
        busy_ns, backend.
        """

    def close(self) -> None:
        """Cancel queued blocks, wait for blocks in flight and stop the threads.

        With `stuck_after_s` the wait ends after that time with AioError (ETIMEDOUT), which lists
        the outstanding requests. The engine is then closed, and the kernel may access the memory of
        these requests at any later time.
        """

def probe(directory: str) -> dict[str, dict[str, Any]]:
    """Write and read back a block in `directory` with each back end; see csrc/aio/probe.h.

    By name of the back end: {"ok": bool, "reason": str}.
    """

def crc32c(address: int, nbytes: int, initial: int = 0) -> int:
    """Return the CRC32C of memory; `initial` is the CRC32C of the preceding bytes."""

def crc32c_copy(target_address: int, address: int, nbytes: int, initial: int = 0) -> int:
    """Copy memory and return the CRC32C of the copied bytes, in one pass."""

def crc32c_blocks(address: int, nbytes: int, block: int, out_address: int) -> None:
    """Store one little-endian uint32 CRC32C per `block` bytes; the last block may be shorter."""

crc32c_kind: str  # "sse4.2", "arm-crc" or "table"
