"""Asynchronous reads and writes between files and memory addresses (native, csrc/aio).

Addresses are plain integers: the caller keeps the memory alive until the ticket is done or the
engine is closed. No order between tickets is promised; wait for a write before reading its bytes.
"""

from collections.abc import Iterable
from typing import Any, final

READ: int
WRITE: int

# Classes of `Engine.submit`: within one first come, first served; a lower one never starves.
URGENT: int  # somebody waits
NORMAL: int  # read-ahead
BACKGROUND: int  # write-back

class AioError(OSError):
    """A transfer that failed; `str()` names everything and the likely cause.

    errno ETIMEDOUT is the watchdog's: the kernel still holds the memory of what the text names.
    """

    # "read", "write"; also "open", "size", "allocate", "sync", "start", "submit", "wait", "close"
    op: str
    offset: int
    length: int

@final
class File:
    """An open file; requests in flight keep it open after `close()`. Thread safe."""

    def __init__(
        self,
        path: str,
        *,
        create: bool = False,  # must not exist; mode 0600
        read_only: bool = False,
        direct: str = "auto",  # "auto": O_DIRECT where the file system takes it; "on"; "off"
    ) -> None: ...
    @property
    def path(self) -> str: ...
    @property
    def fd(self) -> int: ...  # -1 once closed; all but path and fd raise ValueError then
    @property
    def direct(self) -> bool: ...
    @property
    def direct_reason(self) -> str: ...  # why it is buffered, "" when direct
    @property
    def file_system(self) -> str: ...  # "ext4", "overlayfs", ...; hexadecimal when unknown
    @property
    def device(self) -> str: ...  # "major:minor" of stat's st_dev
    @property
    def memory_alignment(self) -> int: ...  # 1 for buffered files
    @property
    def offset_alignment(self) -> int: ...
    @property
    def size(self) -> int: ...
    def allocate(self, size: int) -> None:
        """Reserve blocks for the first `size` bytes; grows the file, never shrinks it."""

    def sync(self) -> None:
        """Put the data on stable storage (fdatasync)."""

    def close(self) -> None: ...

@final
class Ticket:
    """One request; valid also after its engine is closed.

    Dropping the last reference waits until the kernel has let go of the memory. When the watchdog
    says that this is vain, the ticket's `keep` is leaked on purpose and counted (`leaked_tickets`).
    """

    def wait(self, timeout_s: float | None = None) -> bool:
        """Return True when done, False on timeout; raise AioError of the first failed block.

        Promotes what is still queued. When this returned True, or when it raised AioError and
        `done()`, the kernel has let go of the memory.
        """

    def done(self) -> bool: ...
    def cancel(self) -> bool:
        """Cancel what is still queued; True when nothing of it moves any more.

        A ticket of which something was cancelled fails with errno ECANCELED.
        """

    @property
    def nbytes(self) -> int: ...
    @property
    def error(self) -> str | None: ...
    @property
    def times_ns(self) -> tuple[int, int, int] | None:
        """When it was submitted, when its first block began, and when it was over.

        Nanoseconds of `time.perf_counter_ns` on Linux (CLOCK_MONOTONIC); None until done.
        """

@final
class Engine:
    """Cuts requests into blocks and keeps at most `queue_depth` per device in the kernel."""

    def __init__(
        self,
        *,
        backend: str = "auto",  # "auto", "io_uring", "threads"
        block_size: int = 1048576,
        queue_depth: int = 8,  # per device, as is num_threads
        num_threads: int = 4,
        slow_bytes_per_s: int = 0,  # > 0: each device delivers no faster, for tests
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
        keep: object = None,  # lives until the kernel has let go, even if the ticket is dropped
    ) -> Ticket:
        """Queue one scatter list of (file, offset, length, address); never blocks."""

    def counters(self) -> dict[str, int]:
        """Totals over all devices, and tickets, leaked_tickets, leaked_bytes."""

    def device_counters(self) -> dict[str, dict[str, int | str]]:
        """By device: {read,write}_{bytes,requests,queue_ns,device_ns}, queued_blocks,
        in_flight_blocks, busy_ns, backend. Only devices that were used.
        """

    def close(self) -> None:
        """Cancel what is queued, wait for what the kernel holds, stop the threads.

        With `stuck_after_s` the wait ends after that time: AioError (ETIMEDOUT) then says what is
        outstanding; the engine is closed, and what the kernel holds is left to it for ever.
        """

def probe(directory: str) -> dict[str, dict[str, Any]]:
    """Write and read back a block with each back end in `directory`; see csrc/aio/probe.h.

    By name of the back end: {"ok": bool, "reason": str}.
    """

def crc32c(address: int, nbytes: int, initial: int = 0) -> int:
    """CRC32C of memory; `initial` is that of the bytes before."""

def crc32c_copy(target_address: int, address: int, nbytes: int, initial: int = 0) -> int:
    """Copy memory, and return the CRC32C of what was copied; each byte is read once."""

def crc32c_blocks(address: int, nbytes: int, block: int, out_address: int) -> None:
    """Store one little-endian uint32 CRC32C per `block` bytes; the last block may be short."""

crc32c_kind: str  # "sse4.2", "arm-crc" or "table"
