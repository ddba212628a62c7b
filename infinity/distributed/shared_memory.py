"""RAM that is shared by the ranks of a node.

The memory has no name in any file system: the first rank of the node creates it, the others open it
through that rank's file descriptor, and the system frees it when the last process that maps it has
ended, even if killed.
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

_Key = tuple[int, bool]  # unit, and True for its frozen bytes, False for its trained ones


class SharedArena(HostArena):
    """Mapping of the same memory in every rank of a node; child processes do not inherit it."""

    def __init__(self, nbytes: int, ranks: DistContext) -> None:
        """Create and map the memory; all ranks call this together.

        Raises:
            MachineError: The system refuses it on this rank or another one.
        """
        self.nbytes = round_up(max(nbytes, PAGE), PAGE)
        self._carved = 0
        descriptor = -1
        first = ranks.local_ranks.start
        local_identity: tuple[int, ...] = ()
        try:
            with ranks.collective_section("shares RAM"), _as_machine_error(self.nbytes):
                if ranks.rank == first:
                    descriptor = os.memfd_create("infinity-shared")
                    os.ftruncate(descriptor, self.nbytes)
                    local_identity = _identity(descriptor)
            reports = ranks.all_gather_object([os.getpid(), descriptor, *local_identity])
            owner_pid, owner_descriptor, *expected = reports[first]
            with ranks.collective_section("shares RAM"), _as_machine_error(self.nbytes):
                if ranks.rank != first:
                    path = f"/proc/{owner_pid}/fd/{owner_descriptor}"
                    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
                    if list(_identity(descriptor)) != expected:
                        # With containers, the process of this number may be another one.
                        raise OSError(f"process {owner_pid} is not rank {first} here")
                self._map = mmap.mmap(descriptor, self.nbytes)
                self._map.madvise(mmap.MADV_DONTFORK)
        finally:
            if descriptor >= 0:
                os.close(descriptor)


def _identity(descriptor: int) -> tuple[int, int, int]:
    """Return a key that identifies a file on this machine."""
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino, status.st_size


@contextmanager
def _as_machine_error(nbytes: int) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, OverflowError) as error:
        raise MachineError(
            f"the ranks of a node cannot share {format_size(nbytes)} of RAM: {error}",
            because="a limit on memory, or processes that may not open each other's descriptors "
            "(other users, containers of their own)",
            remedy="placement.shared: false, and weights are gathered",
        ) from error


def can_share_memory(ranks: DistContext) -> bool:
    """Return True if the ranks of a node can share memory, and nodes have equal numbers of ranks.

    All ranks call this together.
    """
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
    """All shards of units' weights, in RAM that is shared by the ranks of a node.

    A rank writes its local shard. Shards of ranks on other nodes are copies, which are stale once
    those ranks have written theirs. Each rank fetches the shards of its peers, the ranks of equal
    local rank on the other nodes, so that every byte is sent between two nodes once, however often
    it is then copied to devices.
    """

    def __init__(
        self, units: Mapping[int, UnitLayout], ranks: DistContext, pin: Callable[[HostArena], None]
    ) -> None:
        """Reserve the memory; `units` has the layouts of local shards, by unit.

        Raises:
            MachineError: See `SharedArena`.
        """
        local, nodes = ranks.local_count, ranks.num_nodes
        strides = {unit: round_up(layout.shard_bytes, PAGE) for unit, layout in units.items()}
        arena = SharedArena(ranks.count * sum(strides.values()), ranks)
        self._peers: DistContext | None = None
        if nodes > 1:  # before steps that may fail on one rank alone
            sets = [range(i, ranks.count, local) for i in range(local)]
            self._peers = ranks.new_subgroup(sets, by_host=True)
        self.shards: dict[int, list[Tensor]] = {}  # uint8, by unit and rank
        # Shards of this rank and its peers (nodes, n); all-gathers into them; keys that are fresh.
        self._peer_shards: dict[_Key, Tensor] = {}
        self._gathers: dict[_Key, Work] = {}
        self._fresh: set[_Key] = set()
        try:
            pin(arena)
        except BaseException:
            self.close()
            raise
        for unit, layout in units.items():
            full = arena.carve(ranks.count * strides[unit]).view(local, nodes, -1)
            full = full[..., : layout.shard_bytes]
            self.shards[unit] = [full[r % local, r // local] for r in range(ranks.count)]
            peer_shards = full[ranks.local_rank]
            trained_shards = peer_shards[:, : layout.trained_bytes]
            frozen_shards = peer_shards[:, layout.trained_bytes :]
            for frozen, shards in ((False, trained_shards), (True, frozen_shards)):
                if nodes > 1 and shards.shape[1]:
                    self._peer_shards[unit, frozen] = shards

    def __contains__(self, unit: int) -> bool:
        return unit in self.shards

    def _keys(self, unit: int) -> list[_Key]:
        return [key for key in ((unit, False), (unit, True)) if key in self._peer_shards]

    def is_up_to_date(self, unit: int) -> bool:
        """Return True if no peer's shard of a unit is stale or in flight.

        Raises:
            MachineError: The peers are lost.
        """
        keys = self._keys(unit)
        if not all(key in self._fresh and self._gathers[key].done() for key in keys):
            return False
        self.settle(unit)  # `done()` is True for a failed transfer, too
        return True

    def fetch_stale(self, unit: int) -> int:
        """Start to fetch stale shards of peers; return their bytes.

        All ranks call this together, once all have written their shards.
        """
        stale = [key for key in self._keys(unit) if key not in self._fresh]
        for key in stale:
            self._wait(key)  # a fetch of earlier values that was not used
            assert self._peers is not None
            self._gathers[key] = self._peers.all_gather(self._peer_shards[key], overlap=True)
            self._fresh.add(key)
        return sum(self._peer_shards[key][1:].numel() for key in stale)

    def settle(self, unit: int) -> None:
        """Wait for the transfers that `fetch_stale` started."""
        for key in self._keys(unit):
            self._wait(key)

    def _wait(self, key: _Key) -> None:
        if key in self._gathers:
            self._gathers[key].wait()

    def written(self, unit: int, *, frozen: bool = False) -> None:
        """Mark copies of a unit's shards as stale, with `frozen` also their frozen bytes."""
        self._fresh -= {(unit, False), (unit, frozen)}

    def close(self) -> None:
        """Wait for transfers in flight, and free the memory."""
        for work in self._gathers.values():
            with suppress(MachineError):  # the next synchronization raises for lost ranks
                work.wait()
        if self._peers is not None:
            self._peers.close()
        for mapping in (self.shards, self._peer_shards, self._gathers):
            mapping.clear()
