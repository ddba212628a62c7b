"""Distributed context over process groups of `torch.distributed`."""

from __future__ import annotations

import copy
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import Tensor

from infinity.distributed.context import DistContext, LostRankError, Work, format_ranks
from infinity.distributed.environment import gloo_over_loopback, local_rank_and_count
from infinity.errors import ConfigError, InfinityWarning, first_lines

_IN_PLACE_BYTES = 1 << 16  # shard size from which gloo is faster with a broadcast per shard
DEFAULT_TIMEOUT = timedelta(minutes=30)  # delay after which a rank counts as lost
_LOSS_REPORT_S = 5.0  # time for ranks that are alive, and may be busy, to report a lost rank
_WARN_AFTER = timedelta(seconds=60)  # wait in a synchronization after which a rank warns


class TorchDistContext(DistContext):
    """Context over torch's default process group (gloo or NCCL) and a gloo group for host memory.

    An `owned` default group was created by infinity; the last context to close destroys it.
    """

    def __init__(self, *, owned: bool) -> None:
        import torch.distributed as dist

        self._dist: Any = dist
        get_store = getattr(dist.group.WORLD, "get_group_store", None)
        self._store: Any = get_store() if get_store is not None else None
        self._world = dist.group.WORLD
        self._owned = owned
        if owned:
            OWNED_CONTEXTS.add(self)
        self.rank, self.count = dist.get_rank(), dist.get_world_size()
        self.local_rank, self.local_count = local_rank_and_count(self._store, self.rank, self.count)
        self._gloo = dist.get_backend() == "gloo"
        with gloo_over_loopback(self.local_count == self.count):
            timeout = timeout_of(dist.group.WORLD)
            self._host_group: Any = dist.new_group(backend="gloo", timeout=timeout)
        number = self._store.add(f"engines of rank {self.rank}", 1) if self._store else 0
        self._closed_key = f"engine {number} closed by rank {{}}".format  # in the store
        self._end_message = ""  # of the error that ends this rank
        self._warns_of_waits = True  # False after a warning of a long wait
        self._group: Any = None  # None: torch's default group
        self._parent: TorchDistContext | None = None  # None unless a subgroup
        self._members: Sequence[int] = range(self.count)

    def new_subgroup(self, sets: Sequence[Sequence[int]], *, by_host: bool = False) -> DistContext:
        subgroup = copy.copy(self)
        new_group = partial(self._dist.new_group, timeout=timeout_of(self._dist.group.WORLD))
        with self.connected():
            for members in sets:  # all ranks must create all groups, in the same order
                host_group = new_group(members, backend="gloo")
                group = host_group if by_host else new_group(members)
                if self.rank in members:
                    subgroup._group = group
                    subgroup._host_group = host_group
                    subgroup._members = members
        subgroup.rank = subgroup.local_rank = subgroup._members.index(self.rank)
        subgroup.count = subgroup.local_count = len(subgroup._members)
        subgroup._parent, subgroup._owned = self, False
        return subgroup

    def all_gather(self, full: Tensor, *, overlap: bool = False) -> Work:
        shards, dist = full.view(self.count, -1), self._dist
        group = self._overlapping(full) if overlap else self._host_group
        by_broadcast = shards[0].nbytes >= _IN_PLACE_BYTES or not full.is_contiguous()
        if by_broadcast and (self._gloo or group is self._host_group):
            # gloo's all-gather allocates a buffer in each call, copies it to `full`, and requires
            # `full` to be contiguous.
            sources = zip(self._members, shards, strict=True)
            return self._start(
                *(partial(dist.broadcast, shard, r, group, async_op=True) for r, shard in sources)
            )
        all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        flat = full.view(-1)
        return self._start(partial(all_gather, flat, shards[self.rank], group, async_op=True))

    def all_to_all(self, received: Tensor, sent: Tensor) -> Work:
        group = self._overlapping(sent)
        all_to_all = self._dist.all_to_all_single
        return self._start(lambda: all_to_all(received, sent, group=group, async_op=True))

    def broadcast(self, tensor: Tensor, source: int) -> None:
        broadcast = self._dist.broadcast
        root = self._members[source]
        self._start(lambda: broadcast(tensor, root, self._host_group, async_op=True)).wait()

    def _overlapping(self, tensor: Tensor) -> Any:
        """Return the default group if its backend supports the tensor's memory, else the host's."""
        return self._group if self._gloo or tensor.device.type != "cpu" else self._host_group

    def _start(self, *collectives: Callable[[], Any]) -> Work:
        with self.connected():
            return _TorchWork(self, [collective() for collective in collectives])

    def _await(self, work: Work) -> None:
        """Wait for a collective; warn once of a long wait, which torch does not report."""
        torch_works = work.works if isinstance(work, _TorchWork) and self._warns_of_waits else ()
        start = time.monotonic()
        try:
            for torch_work in torch_works:
                torch_work.wait(_WARN_AFTER)
        except RuntimeError:  # timed out, or failed, which the wait below raises again
            if time.monotonic() - start >= _WARN_AFTER.total_seconds() and not work.done():
                self._warns_of_waits = False
                rank = (self._parent or self).rank
                warnings.warn(
                    f"rank {rank} has waited {_WARN_AFTER.seconds} s for other ranks to come "
                    f"where it is ({self._operation}). If they do not read data or compute all the "
                    "time: is this call made on some ranks only (`if rank == 0:`), or had they "
                    "fewer batches? All must save, evaluate, generate and read values together",
                    InfinityWarning,
                    stacklevel=4,
                )
        work.wait()

    @contextmanager
    def connected(self) -> Iterator[None]:
        """Convert errors of torch in the block to `LostRankError`."""
        try:
            yield
        except (RuntimeError, ValueError) as error:  # ValueError: the group was destroyed
            context = self._parent or self
            closed, silent = context._find_lost_ranks()
            reason = f", {format_ranks(silent)} first" if silent else ""
            operation = f"; this one {context._operation}"
            because = f"another rank has ended, was killed, hangs, or cannot be reached{operation}"
            remedy = (
                "read the last messages of the other ranks; torchrun names the first that "
                f"ended. One that is silent for {DEFAULT_TIMEOUT.seconds // 60} minutes counts "
                "as lost; for less: torch.distributed.init_process_group(timeout=...) before "
                "initialize()"
            )
            if closed:
                closed_ranks = format_ranks([*closed])
                reason = f", for {closed_ranks} closed the engine, or ended"
                reason += next((f" by {message}" for message in closed.values() if message), "")
                because = f"all ranks must call the engine, and use the model, together{operation}"
                remedy = (
                    f"look whether {closed_ranks} ended by an error; else: no `if rank == 0:` "
                    "around these calls, and the same number of batches on each rank"
                )
            if not self._dist.is_initialized():
                because = f"this rank destroyed torch's process group{operation}"
                remedy = "call torch.distributed.destroy_process_group() after engine.close()"
            raise LostRankError(
                f"rank {context.rank} of {context.count} lost the others{reason}: "
                f"{first_lines(error)}",
                because=because,
                remedy=remedy,
            ) from error

    def _find_lost_ranks(self) -> tuple[dict[int, str], list[int]]:
        """Return the ranks that closed their engine, with error messages or "", and silent ranks.

        A silent rank has not reported a lost rank in time: it has ended, or hangs. Silent ranks are
        sought only if no rank has closed its engine.
        """
        closed: dict[int, str] = {}
        silent: list[int] = []
        store, self._store = self._store, None  # asked once
        if store is not None:
            with suppress(RuntimeError):
                store.set(f"lost-{self.rank}", "")
                others = [r for r in range(self.count) if r != self.rank]
                # A rank that closed because it had lost others is not the cause.
                closed = {
                    r: store.get(self._closed_key(r)).decode()
                    for r in others
                    if store.check([self._closed_key(r)]) and not store.check([f"lost-{r}"])
                }
                end = time.monotonic() + _LOSS_REPORT_S
                for rank in others if not closed else ():
                    timeout = timedelta(seconds=max(end - time.monotonic(), 0.1))
                    try:
                        store.wait([f"lost-{rank}"], timeout)
                    except RuntimeError:
                        silent.append(rank)
        return closed, silent

    def check(self, device: torch.device) -> None:
        if device.type != "cpu" and self._gloo:
            raise ConfigError(
                f"the process group is of gloo, and the engine computes on {device}",
                because="gloo sends RAM only; weights and gradients are gathered on the GPU",
                remedy='torch.distributed.init_process_group("nccl"), or leave it to initialize()',
            )

    def abort(self, error: BaseException) -> None:
        self._end_message = f"{type(error).__name__}: {first_lines(error)}"

    def close(self) -> None:
        """Destroy the process groups that this context created. Idempotent."""
        host_group, self._host_group = self._host_group, None
        if host_group is None or not self._dist.is_initialized():
            return
        if self._dist.group.WORLD is not self._world:  # the user destroyed all groups
            return
        OWNED_CONTEXTS.discard(self)
        if self._parent is None and self._store is not None:
            with suppress(RuntimeError):  # the store may have ended with its rank
                self._store.set(self._closed_key(self.rank), self._end_message)
        is_last = all(other._world is not self._world for other in OWNED_CONTEXTS)
        self._dist.destroy_process_group(None if self._owned and is_last else host_group)
        if self._group not in (None, host_group):
            self._dist.destroy_process_group(self._group)


OWNED_CONTEXTS: weakref.WeakSet[TorchDistContext] = weakref.WeakSet()  # contexts with `owned`


def timeout_of(group: Any) -> timedelta:
    """Return the timeout of a process group; `DEFAULT_TIMEOUT` if torch does not expose it."""
    with suppress(AttributeError, RuntimeError):  # torch has no public accessor
        timeout = group._get_backend(group._device_types[0]).options._timeout
        if isinstance(timeout, timedelta):
            return timeout
    return DEFAULT_TIMEOUT


class _TorchWork:
    """Collectives of torch whose errors name the lost ranks."""

    def __init__(self, ranks: TorchDistContext, works: Sequence[Any]) -> None:
        self._ranks = ranks
        self.works = works

    def done(self) -> bool:
        return all(work.is_completed() for work in self.works)

    def wait(self) -> None:
        with self._ranks.connected():
            for work in self.works:
                work.wait()
