"""RAM that all ranks of one node map: what one of them writes the others read where it is.

The memory has no name in any file system: the node's first rank makes it, the others open it by
that rank's descriptor, and it is gone with the last process that maps it, however that ends.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress

from torch import Tensor

from infinity.common.sizes import format_size
from infinity.distributed.context import DistContext, Work
from infinity.errors import InfinityError, MachineError
from infinity.plan.layout import UnitLayout
from infinity.storage.host_arena import HostArena
from infinity.types import PAGE, round_up

_Key = tuple[int, bool]  # a unit, and whether its frozen bytes


class SharedArena(HostArena):
    """A mapping of the same memory in every rank of a node; all make it, children inherit none."""

    def __init__(self, nbytes: int, ranks: DistContext) -> None:
        """Raises `MachineError` where the system refuses, and on all ranks where one raises."""
        self.nbytes = round_up(max(nbytes, PAGE), PAGE)
        self._carved = 0
        descriptor, first = -1, ranks.local_ranks.start
        identity: tuple[int, ...] = ()
        try:
            with ranks.collective_section("shares RAM"), _explained(self.nbytes):
                if ranks.rank == first:
                    descriptor = os.memfd_create("infinity-shared")
                    os.ftruncate(descriptor, self.nbytes)
                    identity = _identity(descriptor)
            reports = ranks.all_gather_object([os.getpid(), descriptor, *identity])
            process, number, *expected = reports[first]
            with ranks.collective_section("shares RAM"), _explained(self.nbytes):
                if ranks.rank != first:
                    descriptor = os.open(f"/proc/{process}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
                    if list(_identity(descriptor)) != expected:
                        # In a container of its own that number may be any process's.
                        raise OSError(f"process {process} is not rank {first} here")
                self._map = mmap.mmap(descriptor, self.nbytes)
                self._map.madvise(mmap.MADV_DONTFORK)
        finally:
            if descriptor >= 0:
                os.close(descriptor)


def _identity(descriptor: int) -> tuple[int, int, int]:
    """Return a key that identifies a file on this machine."""
    facts = os.fstat(descriptor)
    return facts.st_dev, facts.st_ino, facts.st_size


@contextmanager
def _explained(nbytes: int) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, OverflowError) as error:
        raise MachineError(
            f"the ranks of a node cannot share {format_size(nbytes)} of RAM: {error}",
            because="a limit on memory, or processes that may not open each other's descriptors "
            "(other users, containers of their own)",
            remedy="placement.shared: false, and weights are gathered",
        ) from error


def can_share(ranks: DistContext) -> bool:
    """Return True if ranks of a node can map each other's memory; nodes need equal counts."""
    if ranks.count == 1:
        return False
    counts = {count for count, *_ in ranks.synchronize("asks for shared RAM", ranks.local_count)}
    if len(counts) > 1 or ranks.count != ranks.num_nodes * ranks.local_count:
        return False
    try:
        SharedArena(PAGE, ranks)
    except InfinityError:
        return False
    return True


class SharedWeights:
    """Units' weights at rest in RAM that the ranks of each node map: there all shards of a unit.

    A rank writes its own. Those of other nodes' ranks are copies, which are stale once these have
    written. So each rank brings what its peers have, the ranks of its number on the other nodes:
    every byte passes between two nodes once, however often it is then copied to devices.
    """

    def __init__(
        self, units: Mapping[int, UnitLayout], ranks: DistContext, pin: Callable[[HostArena], None]
    ) -> None:
        """`units` by index, their layouts those of a shard. Raises as `SharedArena`."""
        local, nodes = ranks.local_count, ranks.num_nodes
        strides = {unit: round_up(layout.shard_bytes, PAGE) for unit, layout in units.items()}
        arena = SharedArena(ranks.count * sum(strides.values()), ranks)
        self._peers: DistContext | None = None
        if nodes > 1:  # before anything that may fail on one rank alone
            sets = [range(i, ranks.count, local) for i in range(local)]
            self._peers = ranks.new_subgroup(sets, by_host=True)
        self.shards: dict[int, list[Tensor]] = {}  # by unit and rank: uint8
        # Of a unit's trained or frozen bytes: (nodes, n), and what is on its way there.
        self._of_peers: dict[_Key, Tensor] = {}
        self._coming: dict[_Key, Work] = {}
        self._current: set[_Key] = set()
        try:
            pin(arena)
        except BaseException:
            self.close()
            raise
        for unit, layout in units.items():
            full = arena.carve(ranks.count * strides[unit]).view(local, nodes, -1)
            full = full[..., : layout.shard_bytes]
            self.shards[unit] = [full[r % local, r // local] for r in range(ranks.count)]
            mine, trained = full[ranks.local_rank], layout.trained_bytes
            for frozen, parts in ((False, mine[:, :trained]), (True, mine[:, trained:])):
                if nodes > 1 and parts.shape[1]:
                    self._of_peers[unit, frozen] = parts

    def __contains__(self, unit: int) -> bool:
        return unit in self.shards

    def _parts(self, unit: int) -> list[_Key]:
        return [key for key in ((unit, False), (unit, True)) if key in self._of_peers]

    def is_here(self, unit: int) -> bool:
        """Whether the peers' shards of a unit are here, or need not come: it is not shared.

        Raises `MachineError` where the peers are lost.
        """
        keys = self._parts(unit)
        if not all(key in self._current and self._coming[key].done() for key in keys):
            return False
        self.settle(unit)  # what failed is over, too
        return True

    def bring(self, unit: int) -> int:
        """Start to fetch stale shards of peers, which all have written; return their bytes.

        All ranks call it together.
        """
        stale = [key for key in self._parts(unit) if key not in self._current]
        for key in stale:
            self._wait(key)  # for an edition before, which nobody wanted
            assert self._peers is not None
            self._coming[key] = self._peers.all_gather(self._of_peers[key], overlap=True)
            self._current.add(key)
        return sum(self._of_peers[key][1:].numel() for key in stale)

    def settle(self, unit: int) -> None:
        """Wait for what `bring` started."""
        for key in self._parts(unit):
            self._wait(key)

    def _wait(self, key: _Key) -> None:
        if key in self._coming:
            self._coming[key].wait()

    def written(self, unit: int, *, frozen: bool = False) -> None:
        """All ranks write their shards of the unit, of `frozen` bytes as well: copies are stale."""
        self._current -= {(unit, False), (unit, frozen)}

    def close(self) -> None:
        """Wait for transfers in flight, and drop the memory."""
        for work in self._coming.values():
            with suppress(MachineError):  # lost others show where ranks meet
                work.wait()
        if self._peers is not None:
            self._peers.close()
        for kept in (self.shards, self._of_peers, self._coming):
            kept.clear()
