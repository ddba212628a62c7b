"""Arenas of host memory: reserved once, page-aligned, in huge pages where available.

An arena is an anonymous mapping. It is never unmapped explicitly: tensors over it keep it alive,
and the system frees it with the last of them. Forked children do not inherit the pages
(`MADV_DONTFORK`): a DataLoader worker would double a private pool, and forking during O_DIRECT
transfers into private memory is unsafe.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

from infinity.common.sizes import format_size
from infinity.errors import MachineError
from infinity.types import PAGE, round_up


class HostArena:
    """One reserved mapping of `nbytes`, rounded up to pages."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = round_up(max(nbytes, PAGE), PAGE)
        try:
            self._map = mmap.mmap(-1, self.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, ValueError, OverflowError) as error:
            raise MachineError(
                f"the system refused to reserve {format_size(self.nbytes)} of RAM: {error}",
                remedy="lower budget.host, or check `ulimit -v`",
            ) from error
        self._map.madvise(mmap.MADV_DONTFORK)
        with contextlib.suppress(OSError):  # kernels without transparent huge pages
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self._carved = 0

    def view(self, offset: int, nbytes: int) -> Tensor:
        """Return a uint8 tensor over a range, with a separate storage."""
        assert 0 <= offset <= offset + nbytes <= self.nbytes, (offset, nbytes, self.nbytes)
        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(self._map, dtype=torch.uint8, count=nbytes, offset=offset)

    def carve(self, nbytes: int) -> Tensor:
        """Return the next free range, page-aligned; the caller sizes the arena for all ranges."""
        start = self._carved
        self._carved = round_up(start + nbytes, PAGE)
        return self.view(start, nbytes)


def make_arena(sizes: Sequence[int]) -> HostArena:
    """Return an arena that exactly holds page-aligned ranges of these sizes."""
    return HostArena(sum(round_up(size, PAGE) for size in sizes))
