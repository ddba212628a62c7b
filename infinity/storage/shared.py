"""RAM that all ranks of one machine map: what one of them writes the others read where it is.

The memory has no name in any file system: the first rank makes it, the others open it by that
rank's descriptor, and it is gone with the last process that maps it, however that ends.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager

from infinity.errors import InfinityError, MachineError
from infinity.plan.layout import PAGE, round_up
from infinity.ranks import Ranks
from infinity.sizes import format_size
from infinity.storage.device import HostArena


class SharedArena(HostArena):
    """A mapping of the same memory in every rank, which all make; not inherited by children."""

    def __init__(self, nbytes: int, ranks: Ranks) -> None:
        """Raises `MachineError` where the system refuses, and on all ranks where one raises."""
        self.nbytes = round_up(max(nbytes, PAGE), PAGE)
        self._carved = 0
        descriptor = -1
        identity: tuple[int, ...] = ()
        try:
            with ranks.settle("shares RAM"), _explained(self.nbytes):
                if not ranks.rank:
                    descriptor = os.memfd_create("infinity-shared")
                    os.ftruncate(descriptor, self.nbytes)
                    identity = _identity(descriptor)
            words = ranks.gather_words([os.getpid(), descriptor, *identity])
            process, number, *told = words[0]
            with ranks.settle("shares RAM"), _explained(self.nbytes):
                if ranks.rank:
                    descriptor = os.open(f"/proc/{process}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
                    if list(_identity(descriptor)) != told:
                        # In a container of its own that number may be any process's.
                        raise OSError(f"process {process} is not rank 0 here")
                self._map = mmap.mmap(descriptor, self.nbytes)
                self._map.madvise(mmap.MADV_DONTFORK)
        finally:
            if descriptor >= 0:
                os.close(descriptor)


def _identity(descriptor: int) -> tuple[int, int, int]:
    """What tells one file of this machine from all others."""
    facts = os.fstat(descriptor)
    return facts.st_dev, facts.st_ino, facts.st_size


@contextmanager
def _explained(nbytes: int) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, OverflowError) as error:
        raise MachineError(
            f"the ranks of this machine cannot share {format_size(nbytes)} of RAM: {error}",
            because="a limit on memory, or processes that may not open each other's descriptors "
            "(other users, containers of their own)",
            remedy="placement.shared: false, and weights are gathered",
        ) from error


def can_share(ranks: Ranks) -> bool:
    """Whether all ranks are on one machine, and can map each other's memory; all ask."""
    if ranks.count == 1 or ranks.num_nodes > 1:
        return False
    try:
        SharedArena(PAGE, ranks)
    except InfinityError:
        return False
    return True
