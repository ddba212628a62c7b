"""Asynchronous reads and writes between files and memory addresses (native, csrc/aio).

Addresses are plain integers: the caller keeps the memory alive until the ticket is done or the
engine is closed. No order between tickets is promised; wait for a write before reading its bytes.
"""

from typing import final

READ: int
WRITE: int

class AioError(OSError):
    """A transfer that failed; `str()` names everything and the likely cause."""

    op: str  # "read", "write"; also "open", "size", "allocate", "sync", "start", "submit", "wait"
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
    """One request; valid also after its engine is closed."""

    def wait(self, timeout_s: float | None = None) -> bool:
        """Return True when done, False on timeout; raise AioError of the first failed block.

        Whenever this returned True or raised AioError, the kernel has let go of the memory.
        """

    def done(self) -> bool: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def op(self) -> int: ...
    @property
    def error(self) -> str | None: ...
    @property
    def latency_ns(self) -> int: ...  # 0 until done

@final
class Engine:
    """Cuts requests into blocks and keeps at most `queue_depth` of them in the kernel."""

    def __init__(
        self,
        *,
        backend: str = "auto",  # "auto", "io_uring", "threads"
        block_size: int = 1048576,
        queue_depth: int = 8,
        num_threads: int = 4,
        slow_bytes_per_s: int = 0,  # > 0: deliver completions no faster, for tests
    ) -> None: ...
    @property
    def backend(self) -> str: ...
    @property
    def backend_reason(self) -> str: ...
    def submit(self, op: int, segments: list[tuple[File, int, int, int]]) -> Ticket:
        """Queue one scatter list of (file, offset, length, address); never blocks."""

    def counters(self) -> dict[str, int]: ...
    def close(self) -> None:
        """Cancel what is queued, wait for what the kernel holds, stop the threads."""

def probe(directory: str) -> dict[str, object]:
    """Write and read back a block with each back end in `directory`; see csrc/aio/probe.h."""
