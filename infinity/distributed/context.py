"""Distributed context: ranks, collectives, and errors propagated between ranks.

[Note: collective calls]
Ranks run the same program, each on its own data, and synchronize in the same order: where a unit is
used, at the end of a backward, in a step. At each synchronization every rank reports the operation
it is about to start; only then do bytes move. So ranks that diverge or fail raise an error on all
ranks instead of hanging: if one reports a failure, all exchange their operations and errors, and
raise. Code that may fail on one rank alone runs in a `collective_section`, which ends with a
synchronization; between a synchronization and the start of what it agreed on, nothing may fail on
one rank alone.

An error ends the operation of all ranks, which may continue. A rank whose engine has failed cannot:
it reports that once and synchronizes no more, so every later synchronization fails at once on all.

Transfers between ranks are started by the training thread alone, in the same order on all ranks.
Weights and gradients then move while compute runs, on a channel of their own, so that no
synchronization waits for them.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import socket
import sys
import time
import warnings
import weakref
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from infinity.common.accelerators import backend
from infinity.common.crc32c import crc32c_of
from infinity.errors import (
    ConfigError,
    InfinityError,
    InfinityWarning,
    MachineError,
    TrainingError,
    first_lines,
)

NOTES = 8  # integers that a rank may report at a synchronization
_IN_PLACE_BYTES = 1 << 16  # of a shard, from which gloo is faster with one broadcast a shard
_HELD_UP = timedelta(minutes=30)  # a rank that is late by more counts as lost
_ROLL_CALL_S = 5.0  # for ranks that are alive, and may be busy, to report that they lost one
_SAYS_S = 10.0  # of the rendezvous, after which a rank warns what it waits for
_POLLS_S = 0.1
_STALE_S = 30.0  # for a restarted process to replace its entry in the store
_SILENCE = timedelta(seconds=60)  # of a synchronization, after which a rank warns


class Work(Protocol):
    """An asynchronous collective; an `Event` of `storage/device.py`."""

    def done(self) -> bool:
        """Return True if the collective has completed. Never blocks."""

    def wait(self) -> None:
        """Block until the collective has completed.

        With NCCL it blocks the current stream, not the host.

        Raises:
            MachineError: The other ranks are lost.
        """


class CompletedWork:
    """Work that has completed."""

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        """Return at once."""


class DistContext(ABC):
    """Rank `rank` of `count`, and `local_rank` of the `local_count` ranks on this machine.

    Tensors are uint8 or int64, contiguous unless noted, in host memory or in the memory of the
    rank's device. Every rank calls the same methods in the same order. The tensors of a collective
    must not be used until its `Work` has completed.
    """

    rank: int
    count: int
    local_rank: int
    local_count: int
    _failed = False  # this rank cannot go on
    _doing = "begins"  # operation of the last synchronization
    _last_reports: Sequence[Sequence[str]] = ()  # of all ranks, once one of them failed

    @abstractmethod
    def all_gather(self, full: Tensor, *, overlap: bool = False) -> Work:
        """Start an in-place all-gather of `count` equal shards, of which this rank's is set.

        Args:
            full: Shards of all ranks. In host memory it may be a matrix of (count, n) whose rows
                alone are contiguous.
            overlap: Use the channel that runs while compute and synchronizations do.
        """

    @abstractmethod
    def all_to_all(self, received: Tensor, sent: Tensor) -> Work:
        """Start to send shard r of `sent` to rank r, and to receive shard r of `received` from it.

        It runs while compute and synchronizations do.
        """

    @abstractmethod
    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Copy `tensor`, in host memory, from the rank `source` to all others."""

    def check(self, device: torch.device) -> None:  # noqa: B027
        """Raise `ConfigError` if the backend cannot send tensors of this device."""

    def close(self) -> None:  # noqa: B027
        """Release connections."""

    def abort(self, error: BaseException) -> None:  # noqa: B027
        """Store the error that ends this rank, for the messages of ranks that lose it."""

    def new_subgroup(self, sets: Sequence[Sequence[int]], *, by_host: bool = False) -> DistContext:
        """Return a context over the set of ranks that contains this one; the caller closes it.

        Args:
            sets: Disjoint sets of ranks, equal on all ranks, which call this together. In the new
                context `rank` and `count` are those of the set, as if all were on one node.
            by_host: Move tensors in host memory only.
        """
        raise NotImplementedError

    @property
    def local_ranks(self) -> range:
        """Ranks on this machine."""
        first = self.rank - self.local_rank
        return range(first, first + self.local_count)

    @property
    def num_nodes(self) -> int:
        """Number of machines."""
        return -(-self.count // self.local_count)

    # --- composed ---------------------------------------------------------------------------------

    def gather(self, local: Tensor) -> Tensor:
        """Return (count, n) of every rank's `local` (n), in host memory."""
        full = torch.empty((self.count, local.numel()), dtype=local.dtype, device="cpu")
        full[self.rank] = local
        if local.numel():
            self._await(self.all_gather(full.view(-1)))
        return full

    def _await(self, work: Work) -> None:
        """Wait for a collective that other ranks may be late for."""
        work.wait()

    def num_sharing_processors(self) -> int:
        """Return the number of ranks on this machine that share processors with this one.

        All, unless a launcher binds each rank to some (`torchrun --numa-binding`).
        """
        if self.count == 1:
            return 1
        self.synchronize("counts processors")
        every = self.all_gather_object(sorted(os.sched_getaffinity(0)))
        local = set(every[self.rank])
        return sum(not local.isdisjoint(every[rank]) for rank in self.local_ranks)

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return the `value` of every rank: plain data that JSON can hold."""
        data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        sizes = self.gather(torch.tensor([data.numel()], device="cpu"))[:, 0].tolist()
        padded = torch.zeros(max(sizes), dtype=torch.uint8, device="cpu")
        padded[: data.numel()] = data
        found = self.gather(padded)
        return [json.loads(found[r, :size].numpy().tobytes()) for r, size in enumerate(sizes)]

    def synchronize(
        self, doing: str, *notes: int, error: BaseException | None = None
    ) -> Sequence[Sequence[int]]:
        """Synchronize with the other ranks, which must be doing the same.

        Args:
            doing: Operation, as a verb phrase for messages; compared across ranks.
            notes: At most `NOTES` integers to exchange.
            error: Error of this rank, reported to the others, which raise.

        Returns:
            The notes of every rank.

        Raises:
            TrainingError: A rank reported an error (on all ranks but that one), does something
                else, or has failed before.
        """
        if self.count == 1:
            return [notes]
        if self._last_reports:
            raise _divergence_error(self.rank, self._last_reports)
        self._doing = doing
        failed = 0 if error is None else 1 + self._failed
        local = [zlib.crc32(doing.encode()), failed, *notes]
        assert len(notes) <= NOTES
        local += [0] * (2 + NOTES - len(local))
        table = self.gather(torch.tensor(local, device="cpu")).tolist()
        if any(failed or key != local[0] for key, failed, *_ in table):
            message = "" if error is None else f"{type(error).__name__}: {error}"
            reports = self.all_gather_object([doing, message])
            if any(failed > 1 for _, failed, *_ in table):
                self._last_reports = reports
            if error is None:
                raise _divergence_error(self.rank, reports)
        return [others for _, _, *others in table]

    def assert_equal_across_ranks(
        self, doing: str, *notes: int, values: Mapping[str, int], remedy: str | None = None
    ) -> Sequence[Sequence[int]]:
        """Synchronize, and raise `TrainingError` on all ranks if one of `values` differs."""
        found = self.synchronize(doing, *notes, *values.values())
        for column, what in enumerate(values, start=len(notes)):
            if len({row[column] for row in found}) > 1:
                number = next(r for r, row in enumerate(found) if row[column] != found[0][column])
                raise _CollectiveError(
                    f"ranks 0 and {number} differ ({doing}): {what}",
                    because="each rank must do the same calls, and set the same values; it may be "
                    "that one rank caught an error and continued, or alone set a learning rate",
                    remedy=remedy or "end all ranks, and go on from the last checkpoint or commit",
                )
        return found

    def synchronize_write(self, what: str, *values: Tensor | None) -> None:
        """Synchronize before a write of full values, of which each rank writes its shard.

        Raises:
            TrainingError: The values differ between ranks. Raised on all of them.
        """
        if self.count > 1:
            found = [crc32c_of(value) for value in values if value is not None]
            self.assert_equal_across_ranks(
                f"writes {what}",
                values={f"new values of {what}": zlib.crc32(repr(found).encode())},
                remedy="make the same edit on all ranks (from one: torch.distributed.broadcast); "
                "this was not written, nor what comes after it",
            )

    @contextmanager
    def propagate_errors(self, doing: str) -> Iterator[None]:
        """On an exception, make every other rank raise at its next synchronization.

        The block may itself synchronize.
        """
        try:
            yield
        except Exception as error:
            self.broadcast_error(doing, error)
            raise

    def broadcast_error(self, doing: str, raised: Exception) -> None:
        """Report an error to the other ranks, unless they know of it."""
        error: BaseException = raised
        if self.count == 1 or is_propagated(error):
            return
        while error.__cause__ is not None:  # which may be raised again as another error
            error = error.__cause__
        error.add_note(_PROPAGATED)
        with contextlib.suppress(InfinityError):
            self.synchronize(doing, error=raised)

    def mark_failed(self) -> None:
        """Make the next reported error final: this rank cannot continue."""
        self._failed = self.count > 1

    @contextmanager
    def collective_section(self, doing: str) -> Iterator[None]:
        """Synchronize after the block, which so raises on all ranks if it does on one."""
        with self.propagate_errors(doing):
            yield
        self.synchronize(doing)


class _CollectiveError(TrainingError):
    """An error that all ranks raise."""


class _LostError(MachineError):
    """The other ranks can no longer be reached."""


_PROPAGATED = "(raised on every rank)"


def is_propagated(error: BaseException | None) -> bool:
    """Return True if all ranks know of an error, or of one in its chain."""
    while error is not None:
        if isinstance(error, _CollectiveError | _LostError):
            return True
        if _PROPAGATED in getattr(error, "__notes__", ()):
            return True
        error = error.__cause__ or error.__context__
    return False


def _divergence_error(rank: int, reports: Sequence[Sequence[str]]) -> TrainingError:
    """Return the error to raise on `rank`, by every rank's (operation, error message or "")."""
    failed = [(r, doing, message) for r, (doing, message) in enumerate(reports) if message]
    if failed:
        number, doing, message = failed[0]
        return _CollectiveError(
            f"rank {number} failed ({doing}): {message}",
            because="ranks train together: what one cannot do ends the step of all",
        )
    others: dict[str, list[int]] = {}
    for number, (doing, _) in enumerate(reports):
        others.setdefault(doing, []).append(number)
    said = "; ".join(f"{doing} on {named_ranks(numbers)}" for doing, numbers in others.items())
    return _CollectiveError(
        f"ranks do different things: {said}",
        because="they must call the engine, and use the model's units, in one order",
        remedy=f"look at the calls of rank {rank} before: ranks need the same number of batches, "
        "no unit that only some data needs, no call of the engine (a save, state_dict, evaluation) "
        "on one rank alone",
    )


def named_ranks(numbers: Sequence[int]) -> str:
    """Return "rank 3" or "ranks 0, 2"."""
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


class SingleProcess(DistContext):
    """Context of a single process; collectives do nothing."""

    rank = local_rank = 0
    count = local_count = 1

    def all_gather(self, full: Tensor, *, overlap: bool = False) -> Work:
        return CompletedWork()

    def all_to_all(self, received: Tensor, sent: Tensor) -> Work:
        received.copy_(sent)
        return CompletedWork()

    def broadcast(self, tensor: Tensor, source: int) -> None: ...


SINGLE_PROCESS = SingleProcess()


class TorchDistContext(DistContext):
    """Context over torch's default process group (gloo or NCCL) and a gloo group for host memory.

    An `owned` default group was created here; the last context to close destroys it.
    """

    def __init__(self, *, owned: bool) -> None:
        import torch.distributed as dist

        self._dist: Any = dist
        find = getattr(dist.group.WORLD, "get_group_store", None)
        self._store: Any = find() if find is not None else None
        self._world = dist.group.WORLD
        self._owned = owned
        if owned:
            _OF_OUR_GROUP.add(self)
        self.rank, self.count = dist.get_rank(), dist.get_world_size()
        self.local_rank, self.local_count = _on_this_machine(self._store, self.rank, self.count)
        self._gloo = dist.get_backend() == "gloo"
        with _by_loopback(self.local_count == self.count):
            self._host: Any = dist.new_group(backend="gloo", timeout=_patience(dist.group.WORLD))
        number = self._store.add(f"engines of rank {self.rank}", 1) if self._store else 0
        self._closed = f"engine {number} closed by rank {{}}".format  # a key of the store
        self._end = ""  # message of the error that ends this rank
        self._patient = True  # until it has warned of a long wait
        self._group: Any = None  # torch's default
        self._all: TorchDistContext | None = None  # the context that this is a subgroup of
        self._members: Sequence[int] = range(self.count)

    def new_subgroup(self, sets: Sequence[Sequence[int]], *, by_host: bool = False) -> DistContext:
        found = copy.copy(self)
        new = partial(self._dist.new_group, timeout=_patience(self._dist.group.WORLD))
        with self.connected():
            for members in sets:  # all ranks make all groups, in one order
                host = new(members, backend="gloo")
                group = host if by_host else new(members)
                if self.rank in members:
                    found._group, found._host, found._members = group, host, members
        found.rank = found.local_rank = found._members.index(self.rank)
        found.count = found.local_count = len(found._members)
        found._all, found._owned = self, False
        return found

    def all_gather(self, full: Tensor, *, overlap: bool = False) -> Work:
        shards, dist = full.view(self.count, -1), self._dist
        group = self._overlapping(full) if overlap else self._host
        many = shards[0].nbytes >= _IN_PLACE_BYTES or not full.is_contiguous()
        if many and (self._gloo or group is self._host):
            # Gloo's all-gather allocates a buffer at each call, copies that to `full`, and needs it
            # to be contiguous.
            send = dist.broadcast
            return self._start(
                *(
                    partial(send, shard, r, group, async_op=True)
                    for r, shard in zip(self._members, shards, strict=True)
                )
            )
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        flat = full.view(-1)
        return self._start(partial(gather, flat, shards[self.rank], group, async_op=True))

    def all_to_all(self, received: Tensor, sent: Tensor) -> Work:
        group, send = self._overlapping(sent), self._dist.all_to_all_single
        return self._start(lambda: send(received, sent, group=group, async_op=True))

    def broadcast(self, tensor: Tensor, source: int) -> None:
        send = self._dist.broadcast
        root = self._members[source]
        self._start(lambda: send(tensor, root, self._host, async_op=True)).wait()

    def _overlapping(self, tensor: Tensor) -> Any:
        """Return the default group if its backend reaches the tensor's memory."""
        return self._group if self._gloo or tensor.device.type != "cpu" else self._host

    def _start(self, *collectives: Callable[[], Any]) -> Work:
        with self.connected():
            return _TorchWork(self, [collective() for collective in collectives])

    def _await(self, work: Work) -> None:
        """See `DistContext`. Warns once of a long wait: torch waits in silence."""
        works = work.works if isinstance(work, _TorchWork) and self._patient else ()
        began = time.monotonic()
        try:
            for one in works:
                one.wait(_SILENCE)
        except RuntimeError:  # timed out, or failed, which the wait below raises again
            if time.monotonic() - began >= _SILENCE.total_seconds() and not work.done():
                self._patient = False
                rank = (self._all or self).rank
                warnings.warn(
                    f"rank {rank} has waited {_SILENCE.seconds} s for other ranks to come "
                    f"where it is ({self._doing}). If they do not read data or compute all the "
                    "time: is this call made on some ranks only (`if rank == 0:`), or had they "
                    "fewer batches? All must save, evaluate, generate and read values together",
                    InfinityWarning,
                    stacklevel=4,
                )
        work.wait()

    @contextmanager
    def connected(self) -> Iterator[None]:
        """Turn errors of torch in the block into `MachineError`: the other ranks are lost."""
        try:
            yield
        except (RuntimeError, ValueError) as error:  # ValueError: there is no group any more
            every = self._all or self
            closed, silent = every._roll_call()
            first = f", {named_ranks(silent)} first" if silent else ""
            here = f"; this one {every._doing}"
            because = f"another rank has ended, was killed, hangs, or cannot be reached{here}"
            remedy = (
                "look at what the other ranks said last; torchrun names the one that ended "
                f"first. One that is silent for {_HELD_UP.seconds // 60} minutes counts as lost; "
                "for less: torch.distributed.init_process_group(timeout=...) before initialize()"
            )
            if closed:
                who = named_ranks([*closed])
                first = f", for {who} closed the engine, or ended"
                first += next((f" by {message}" for message in closed.values() if message), "")
                because = f"all ranks must call the engine, and use the model, together{here}"
                remedy = (
                    f"look whether {who} ended by an error; else: no `if rank == 0:` around "
                    "these calls, and as many batches on each rank"
                )
            raise _LostError(
                f"rank {every.rank} of {every.count} lost the others{first}: {first_lines(error)}",
                because=because,
                remedy=remedy,
            ) from error

    def _roll_call(self) -> tuple[dict[int, str], list[int]]:
        """Return the ranks that closed their engine, each with its error's message or "", and the
        other ranks that have not reported a lost rank: they ended, or hang.
        """
        closed: dict[int, str] = {}
        silent: list[int] = []
        store, self._store = self._store, None  # asked once
        if store is not None:
            with contextlib.suppress(RuntimeError):
                store.set(f"lost-{self.rank}", "")
                others = [r for r in range(self.count) if r != self.rank]
                # One that closed because it had lost others is not to blame.
                closed = {
                    r: store.get(self._closed(r)).decode()
                    for r in others
                    if store.check([self._closed(r)]) and not store.check([f"lost-{r}"])
                }
                end = time.monotonic() + _ROLL_CALL_S
                for rank in others if not closed else ():
                    left = timedelta(seconds=max(end - time.monotonic(), 0.1))
                    try:
                        store.wait([f"lost-{rank}"], left)
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
        self._end = f"{type(error).__name__}: {first_lines(error)}"

    def close(self) -> None:
        """Destroy the process groups that were created here. Idempotent."""
        host, self._host = self._host, None
        if host is None or not self._dist.is_initialized():
            return
        if self._dist.group.WORLD is not self._world:  # destroyed by the user, and ours with it
            return
        _OF_OUR_GROUP.discard(self)
        if self._all is None and self._store is not None:
            with contextlib.suppress(RuntimeError):  # others may have ended, and it with them
                self._store.set(self._closed(self.rank), self._end)
        is_last = all(other._world is not self._world for other in _OF_OUR_GROUP)
        self._dist.destroy_process_group(None if self._owned and is_last else host)
        if self._group not in (None, host):
            self._dist.destroy_process_group(self._group)


_OF_OUR_GROUP: weakref.WeakSet[TorchDistContext] = weakref.WeakSet()  # a default group made here


def _patience(group: Any) -> timedelta:
    """Return the timeout of a process group, for the group that synchronizations use."""
    with contextlib.suppress(AttributeError, RuntimeError):  # torch has no public accessor
        found = group._get_backend(group._device_types[0]).options._timeout
        if isinstance(found, timedelta):
            return found
    return _HELD_UP


class _TorchWork:
    """Collectives of torch whose errors name the ranks that are lost."""

    def __init__(self, ranks: TorchDistContext, works: Sequence[Any]) -> None:
        self._ranks = ranks
        self.works = works

    def done(self) -> bool:
        """See `Work`."""
        return all(work.is_completed() for work in self.works)

    def wait(self) -> None:
        """See `Work`."""
        with self._ranks.connected():
            for work in self.works:
                work.wait()


def find_ranks(timeout: timedelta | None = None) -> DistContext:
    """Return the context of torch's default process group, or of the ranks a launcher started.

    A launcher such as `torchrun` sets WORLD_SIZE, RANK, MASTER_ADDR and MASTER_PORT: then a default
    group is created, NCCL where there are GPUs, else gloo. Without either: `SINGLE_PROCESS`.

    Args:
        timeout: A rank that is late by more counts as lost; 30 minutes by default.

    Raises:
        ConfigError: One of the variables is missing, or WORLD_SIZE differs between ranks.
        MachineError: The group cannot be created.
    """
    dist: Any = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        ours = any(user._world is dist.group.WORLD for user in _OF_OUR_GROUP)
        return TorchDistContext(owned=ours) if dist.get_world_size() > 1 else SINGLE_PROCESS
    count = num_launched()
    if count <= 1:
        return SINGLE_PROCESS
    missing = [n for n in ("RANK", "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(n)]
    if missing:
        raise ConfigError(
            f"WORLD_SIZE is {count}, but {', '.join(missing)} is not set",
            remedy=f"torchrun --nproc-per-node {count} train.py, which sets them; or unset "
            "WORLD_SIZE for one process",
        )
    import torch.distributed as dist

    timeout = timeout or _HELD_UP
    try:
        if _number("RANK", 0):
            _wait_until(_listens, "rank 0", timeout)
        # world_size=1: else rank 0 would wait here, deaf to Ctrl-C, for ranks that never start.
        store, rank, _ = next(dist.rendezvous("env://", world_size=1, timeout=timeout))
        _check_count(store, rank, count, timeout)
        one_machine = _on_this_machine(store, rank, count)[1] == count
        with _by_loopback(one_machine):
            if one_machine:  # torchrun keeps the store over restarts, with addresses of dead ranks
                restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
                store = dist.PrefixStore(f"restart-{restart}", store)
            # Likewise for an earlier group of this process, as that of an engine it has closed.
            number = store.add(f"groups of rank {rank}", 1)
            store = dist.PrefixStore(f"group-{number}", store)
            dist.init_process_group(
                backend(), store=store, rank=rank, world_size=count, timeout=timeout
            )
            return TorchDistContext(owned=True)
    except (RuntimeError, ValueError) as error:
        raise MachineError(
            f"the {count} ranks do not find each other: {first_lines(error)}",
            because="a rank did not start, or MASTER_ADDR and MASTER_PORT cannot be reached",
            remedy="on one machine: torchrun --standalone --nproc-per-node N train.py",
        ) from error


def _wait_until(came: Callable[[], bool], who: str, timeout: timedelta) -> None:
    """Poll for other ranks, so that Ctrl-C ends it; warns of a long wait, raises `RuntimeError`."""
    address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    began, patience_s, says_s = time.monotonic(), timeout.total_seconds(), _SAYS_S
    while not came():
        if (waited_s := time.monotonic() - began) > patience_s:
            raise RuntimeError(f"{who} did not come to {address} in {waited_s:.0f} s")
        if waited_s > says_s:
            says_s = patience_s  # once
            warnings.warn(
                f"rank {_number('RANK', 0)} of {num_launched()} waits for {who} to come to "
                f"{address}",
                InfinityWarning,
                stacklevel=4,
            )
        time.sleep(_POLLS_S)


def _listens() -> bool:
    """Return True if rank 0, or a launcher for it, takes connections."""
    address = os.environ["MASTER_ADDR"], _number("MASTER_PORT", 0)
    with contextlib.suppress(OSError), socket.create_connection(address, timeout=1):
        return True
    return False


def _check_count(store: Any, rank: int, count: int, timeout: timedelta) -> None:
    """Wait for all ranks; raise `ConfigError` if WORLD_SIZE differs between two of them."""
    key = "WORLD_SIZE of rank {}".format
    store.set(key(rank), str(count))
    for other in range(count):
        _wait_until(partial(store.check, [key(other)]), f"rank {other}", timeout)
        end = None
        while (found := int(store.get(key(other)))) != count:
            # A store that is kept over restarts may hold the entry of a dead process.
            end = end or time.monotonic() + _STALE_S
            if time.monotonic() > end:
                raise ConfigError(
                    f"WORLD_SIZE is {count} on rank {rank}, {found} on rank {other}",
                    because="they were started for different numbers of processes",
                    remedy="start all with one command; on several nodes with the same --nnodes "
                    "and --nproc-per-node on each",
                )
            time.sleep(_POLLS_S)


def num_launched() -> int:
    """Return WORLD_SIZE, or 1 without a launcher."""
    return _number("WORLD_SIZE", 1)


def _on_this_machine(store: Any, rank: int, count: int) -> tuple[int, int]:
    """Return the local rank, and the number of ranks on this machine.

    Taken from the variables of torchrun or DeepSpeed's launcher. With another launcher, such as
    srun, ranks compare their machines through `store`.
    """
    launched = _number("LOCAL_WORLD_SIZE", _number("LOCAL_SIZE", 0))
    if launched or store is None:
        return _number("LOCAL_RANK", rank), launched or count
    machine = _machine_id()
    store.set(f"machine of rank {rank}", machine)
    local = [r for r in range(count) if store.get(f"machine of rank {r}") == machine]
    if local[-1] - local[0] >= len(local):
        raise ConfigError(
            f"{named_ranks(local)} are on one machine, and others between them are not",
            remedy="number the ranks of a machine one after the other: srun --distribution=block",
        )
    return local.index(rank), len(local)


def _machine_id() -> bytes:
    """Return host name and boot id: containers of one machine may differ in their names."""
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id", "rb") as file:
        return f"{socket.gethostname()} ".encode() + file.read()
    return socket.gethostname().encode()


def launched_rank(name: str) -> int:
    """Return RANK or LOCAL_RANK, as `name`; 0 without a launcher."""
    return _number(name, 0)


def _number(name: str, default: int) -> int:
    text = os.environ.get(name) or str(default)
    if not text.isdecimal():
        raise ConfigError(f"{name} is {text!r}, not a number", remedy=f"unset {name}")
    return int(text)


@contextmanager
def _by_loopback(one_machine: bool) -> Iterator[None]:
    """Make gloo groups created in the block use the loopback interface, on one machine.

    By default gloo resolves the host's name, which fails in some containers.
    """
    name, there = "GLOO_SOCKET_IFNAME", "/sys/class/net/lo"
    wanted = one_machine and name not in os.environ and os.path.exists(there)
    if wanted:
        os.environ[name] = "lo"
    try:
        yield
    finally:
        if wanted:
            os.environ.pop(name, None)


def as_json(facts: Any) -> str:
    """Serialize facts for comparison, tensors with all their digits."""
    return json.dumps(facts, default=lambda v: v.tolist() if isinstance(v, Tensor) else str(v))


def check_alike(ranks: DistContext, what: str, facts: Mapping[str, Any]) -> None:
    """Raise `ConfigError` on every rank if `facts` (plain data) of two ranks differ.

    The message names the first difference, the ranks, and `what` the facts describe.
    """
    if ranks.count == 1:
        return
    mine = json.loads(as_json(dict(facts)))
    ranks.synchronize(f"compares {what}")
    every = ranks.all_gather_object(mine)
    for number, theirs in enumerate(every):
        found = _difference(every[0], theirs)
        if found is not None:
            where, first, other = found
            raise ConfigError(
                f"ranks 0 and {number} differ in {what}: {where} is {first} on rank 0, {other} on "
                f"rank {number}",
                because="ranks train one model, with one configuration",
                remedy="give every rank the same: build the model after the same "
                "torch.manual_seed(...), read the configuration from one file",
            )


def _difference(one: Any, other: Any, where: str = "") -> tuple[str, str, str] | None:
    """Return the path and both values of the first difference between two pieces of plain data."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in [*one, *(k for k in other if k not in one)]:
            inside = f"{where}.{key}" if where else str(key)
            found = _difference(one.get(key), other.get(key), inside)
            if found is not None:
                return found
        return None
    return None if one == other else (where, f"{one!r:.200}", f"{other!r:.200}")
