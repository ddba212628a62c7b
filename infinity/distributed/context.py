"""The processes that train one model together: who they are, and what they say to each other.

[Note: collective calls]
Ranks run the same program, each on its own data, and meet in the same order: where a unit is used,
where a backward ends, in a step. At each meeting every rank says what it is about to do. Only then
bytes move. So ranks that went another way, or failed, end in words on all of them, and not in a
hang: where one says so, all tell each other what they did, and raise. What may fail on one rank
alone stands in `settle`, which ends in a meeting; and between a meeting and the start of what was
agreed on there, nothing may fail on one alone.

An error ends what all ranks did, and they may go on. One whose engine has failed cannot: it says so
once and meets nobody any more, so from then on whatever needs a meeting fails at once on all.

Bytes between ranks are started by the training thread alone, in one order on all of them. Weights
and gradients then move beside compute, and have a channel of their own: no meeting waits for them.
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

from infinity.common.crc32c import crc32c_of
from infinity.errors import (
    ConfigError,
    InfinityError,
    InfinityWarning,
    MachineError,
    TrainingError,
    first_lines,
)

NOTES = 8  # of a meeting, at most
_IN_PLACE_BYTES = 1 << 16  # of a rank, from which on gloo is better told part by part
_HELD_UP = timedelta(minutes=30)  # what a rank may take longer than another, and is not dead yet
_ROLL_CALL_S = 5.0  # in which those that live, and may be busy, say that they have lost one
_SAYS_S = 10.0  # before the ranks have found each other: then a rank says what it waits for
_POLLS_S = 0.1
_STALE_S = 30.0  # in which a process that is started again says what it was told
_SILENCE = timedelta(seconds=60)  # of a meeting that others do not come to, until it is told


class Work(Protocol):
    """Bytes between ranks that are under way, as an `Event` of `storage/device.py`."""

    def done(self) -> bool:
        """Whether they are there; never blocks."""

    def wait(self) -> None:
        """Block until they are there; raises `MachineError` where the other ranks are lost.

        Of NCCL: what the current stream is given from now on comes after them.
        """


class Done:
    """Work that is over."""

    def done(self) -> bool:
        """It is."""
        return True

    def wait(self) -> None:
        """Returns at once."""


class Ranks(ABC):
    """One of `count` ranks: `rank`. `local_count` of them, numbered `local_rank`, share a machine.

    Tensors are uint8 or int64, contiguous unless said otherwise, in host memory or that of the
    rank's device. Every rank calls the same methods in the same order. Until work is over nobody
    may touch its tensors.
    """

    rank: int
    count: int
    local_rank: int
    local_count: int
    _given_up = False  # this rank cannot go on
    _doing = "begins"  # what it met the others for last
    _last_words: Sequence[Sequence[str]] = ()  # of all ranks, when one of them could not go on

    @abstractmethod
    def all_gather(self, whole: Tensor, *, beside: bool = False) -> Work:
        """Start to fill `whole`, as many equal parts as ranks, of which this rank's is there.

        It moves `beside` compute and meetings, or is one of these. In host memory it may be a
        matrix of which only the rows, the parts, are contiguous.
        """

    @abstractmethod
    def all_to_all(self, received: Tensor, sent: Tensor) -> Work:
        """Start to give part r of `sent` to rank r; part r of `received` is then from rank r.

        It moves beside compute and meetings.
        """

    @abstractmethod
    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Make `tensor`, in host memory, what it is on the rank `source`."""

    def check(self, device: torch.device) -> None:  # noqa: B027
        """Raise `ConfigError` if bytes on this device cannot be sent."""

    def close(self) -> None:  # noqa: B027
        """Let go of connections."""

    def end_by(self, error: BaseException) -> None:  # noqa: B027
        """An error ends this rank, which closes: those who miss it are to know."""

    def among(self, sets: Sequence[Sequence[int]], *, by_host: bool = False) -> Ranks:
        """The one of these disjoint sets that this rank is in, as ranks of their own, to be closed.

        All ranks call it together. `rank` and `count` are of the set, as if all were on one node.
        They move what is in host memory alone if `by_host`.
        """
        raise NotImplementedError

    @property
    def here(self) -> range:
        """The numbers of the ranks on this machine."""
        first = self.rank - self.local_rank
        return range(first, first + self.local_count)

    @property
    def num_nodes(self) -> int:
        """How many machines: as many as the ranks fill."""
        return -(-self.count // self.local_count)

    # --- made of these ---------------------------------------------------------------------------

    def gather(self, own: Tensor) -> Tensor:
        """(count, n) of every rank's `own` (n), in host memory."""
        whole = torch.empty((self.count, own.numel()), dtype=own.dtype, device="cpu")
        whole[self.rank] = own
        if own.numel():
            self._await(self.all_gather(whole.view(-1)))
        return whole

    def _await(self, meeting: Work) -> None:
        """Wait for all ranks to come."""
        meeting.wait()

    def num_sharing_processors(self) -> int:
        """How many ranks of this machine may use some of the processors that this one may use.

        All, unless a launcher binds each to some (`torchrun --numa-binding`).
        """
        if self.count == 1:
            return 1
        self.meet("counts processors")
        every = self.gather_words(sorted(os.sched_getaffinity(0)))
        own = set(every[self.rank])
        return sum(not own.isdisjoint(every[rank]) for rank in self.here)

    def gather_words(self, words: Any) -> list[Any]:
        """What every rank gave: plain data that JSON can hold."""
        data = torch.frombuffer(bytearray(json.dumps(words).encode()), dtype=torch.uint8)
        sizes = self.gather(torch.tensor([data.numel()], device="cpu"))[:, 0].tolist()
        padded = torch.zeros(max(sizes), dtype=torch.uint8, device="cpu")
        padded[: data.numel()] = data
        found = self.gather(padded)
        return [json.loads(found[r, :size].numpy().tobytes()) for r, size in enumerate(sizes)]

    def meet(
        self, doing: str, *notes: int, error: BaseException | None = None
    ) -> Sequence[Sequence[int]]:
        """Meet the other ranks, which must be `doing` the same; returns everyone's `notes`.

        A rank that failed meets the others with its `error`. Raises `TrainingError` on all ranks
        where one did (but for the one that says it), or where one does something else; without
        meeting any more where one has said that it cannot go on.
        """
        if self.count == 1:
            return [notes]
        if self._last_words:
            raise _apart(self.rank, self._last_words)
        self._doing = doing
        failed = 0 if error is None else 1 + self._given_up
        own = [zlib.crc32(doing.encode()), failed, *notes]
        assert len(notes) <= NOTES
        own += [0] * (2 + NOTES - len(own))
        table = self.gather(torch.tensor(own, device="cpu")).tolist()
        if any(failed or key != own[0] for key, failed, *_ in table):
            words = "" if error is None else f"{type(error).__name__}: {error}"
            told = self.gather_words([doing, words])
            if any(failed > 1 for _, failed, *_ in table):
                self._last_words = told
            if error is None:
                raise _apart(self.rank, told)
        return [others for _, _, *others in table]

    def meet_alike(
        self, doing: str, *notes: int, alike: Mapping[str, int], remedy: str | None = None
    ) -> Sequence[Sequence[int]]:
        """`meet`, with what must be `alike` on all ranks; raises `TrainingError` on all if not."""
        found = self.meet(doing, *notes, *alike.values())
        for place, what in enumerate(alike, start=len(notes)):
            if len({told[place] for told in found}) > 1:
                number = next(r for r, told in enumerate(found) if told[place] != found[0][place])
                raise _TogetherError(
                    f"ranks 0 and {number} differ ({doing}): {what}",
                    because="each rank must do the same calls, and set the same values; it may be "
                    "that one rank caught an error and continued, or alone set a learning rate",
                    remedy=remedy or "end all ranks, and go on from the last checkpoint or commit",
                )
        return found

    def meet_to_write(self, what: str, *values: Tensor | None) -> None:
        """Meet to replace `what` by these whole values, of which each rank writes a part; none are
        what is there. Raises `TrainingError` on all ranks where they differ.
        """
        if self.count > 1:
            found = [crc32c_of(value) for value in values if value is not None]
            self.meet_alike(
                f"writes {what}",
                alike={f"new values of {what}": zlib.crc32(repr(found).encode())},
                remedy="make the same edit on all ranks (from one: torch.distributed.broadcast); "
                "this was not written, nor what comes after it",
            )

    @contextmanager
    def telling(self, doing: str) -> Iterator[None]:
        """What raises inside is told to the other ranks, which raise where they meet next.

        What is inside may itself meet.
        """
        try:
            yield
        except Exception as error:
            self.tell(doing, error)
            raise

    def tell(self, doing: str, told: Exception) -> None:
        """Meet the other ranks with an error that ends what this one does, unless they know."""
        error: BaseException = told
        if self.count == 1 or is_told(error):
            return
        while error.__cause__ is not None:  # which may be raised in other words again
            error = error.__cause__
        error.add_note(_TOLD)
        with contextlib.suppress(InfinityError):
            self.meet(doing, error=told)

    def give_up(self) -> None:
        """This rank cannot go on: the others learn it with the next error that it tells."""
        self._given_up = self.count > 1

    @contextmanager
    def settle(self, doing: str) -> Iterator[None]:
        """What is inside is done on all ranks, or raises on all: the words of others' errors."""
        with self.telling(doing):
            yield
        self.meet(doing)


class _TogetherError(TrainingError):
    """An error that all ranks know of."""


class _LostError(MachineError):
    """The other ranks cannot be told anything any more."""


_TOLD = "(every rank was told)"


def is_told(error: BaseException | None) -> bool:
    """Whether all ranks know of an error, or of one that it was made from."""
    while error is not None:
        if isinstance(error, _TogetherError | _LostError):
            return True
        if _TOLD in getattr(error, "__notes__", ()):
            return True
        error = error.__cause__ or error.__context__
    return False


def _apart(rank: int, told: Sequence[Sequence[str]]) -> TrainingError:
    """What to raise on `rank`; `told` has of every rank what it did, and its error, if any."""
    failed = [(r, doing, words) for r, (doing, words) in enumerate(told) if words]
    if failed:
        number, doing, words = failed[0]
        return _TogetherError(
            f"rank {number} failed ({doing}): {words}",
            because="ranks train together: what one cannot do ends the step of all",
        )
    others: dict[str, list[int]] = {}
    for number, (doing, _) in enumerate(told):
        others.setdefault(doing, []).append(number)
    said = "; ".join(f"{doing} on {named_ranks(numbers)}" for doing, numbers in others.items())
    return _TogetherError(
        f"ranks do different things: {said}",
        because="they must call the engine, and use the model's units, in one order",
        remedy=f"look at the calls of rank {rank} before: ranks need the same number of batches, "
        "no unit that only some data needs, no call of the engine (a save, state_dict, evaluation) "
        "on one rank alone",
    )


def named_ranks(numbers: Sequence[int]) -> str:
    """Ranks in words."""
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


class Alone(Ranks):
    """One rank: nothing moves."""

    rank = local_rank = 0
    count = local_count = 1

    def all_gather(self, whole: Tensor, *, beside: bool = False) -> Work:
        """It is whole."""
        return Done()

    def all_to_all(self, received: Tensor, sent: Tensor) -> Work:
        """To oneself."""
        received.copy_(sent)
        return Done()

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """It is so."""


ALONE = Alone()


class TorchRanks(Ranks):
    """The ranks of torch's default process group, gloo or NCCL, and of one of gloo beside it.

    A default group that is `owned` was made here: who closes last destroys it.
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
        self._end = ""  # words of the error that ends this rank
        self._patient = True  # nobody was waited for long yet
        self._group: Any = None  # torch's default
        self._all: TorchRanks | None = None  # of whom these are some
        self._members: Sequence[int] = range(self.count)

    def among(self, sets: Sequence[Sequence[int]], *, by_host: bool = False) -> Ranks:
        """See `Ranks`."""
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

    def all_gather(self, whole: Tensor, *, beside: bool = False) -> Work:
        """See `Ranks`."""
        parts, dist = whole.view(self.count, -1), self._dist
        group = self._beside(whole) if beside else self._host
        many = parts[0].nbytes >= _IN_PLACE_BYTES or not whole.is_contiguous()
        if many and (self._gloo or group is self._host):
            # Gloo's own fills memory that is taken anew each time, and copies that to `whole`; and
            # wants it to be contiguous.
            send = dist.broadcast
            return self._start(
                *(
                    partial(send, part, r, group, async_op=True)
                    for r, part in zip(self._members, parts, strict=True)
                )
            )
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name
        flat = whole.view(-1)
        return self._start(partial(gather, flat, parts[self.rank], group, async_op=True))

    def all_to_all(self, received: Tensor, sent: Tensor) -> Work:
        """See `Ranks`."""
        group, send = self._beside(sent), self._dist.all_to_all_single
        return self._start(lambda: send(received, sent, group=group, async_op=True))

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """See `Ranks`."""
        send = self._dist.broadcast
        root = self._members[source]
        self._start(lambda: send(tensor, root, self._host, async_op=True)).wait()

    def _beside(self, tensor: Tensor) -> Any:
        """The default group, if it is of what reaches the tensor."""
        return self._group if self._gloo or tensor.device.type != "cpu" else self._host

    def _start(self, *collectives: Callable[[], Any]) -> Work:
        with self.connected():
            return _TorchWork(self, [collective() for collective in collectives])

    def _await(self, meeting: Work) -> None:
        """See `Ranks`. Says once that others do not come: torch would wait in silence."""
        works = meeting.works if isinstance(meeting, _TorchWork) and self._patient else ()
        began = time.monotonic()
        try:
            for work in works:
                work.wait(_SILENCE)
        except RuntimeError:  # in vain, or it failed, which it will say again
            if time.monotonic() - began >= _SILENCE.total_seconds() and not meeting.done():
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
        meeting.wait()

    @contextmanager
    def connected(self) -> Iterator[None]:
        """What raises inside is that others are lost."""
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
                first += next((f" by {words}" for words in closed.values() if words), "")
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
        """Which ranks closed their engine, with the error that made them, if any; and which of the
        others have not lost any: they ended, or hang.
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
        """See `Ranks`."""
        if device.type != "cpu" and self._gloo:
            raise ConfigError(
                f"the process group is of gloo, and the engine computes on {device}",
                because="gloo sends RAM only; weights and gradients are gathered on the GPU",
                remedy='torch.distributed.init_process_group("nccl"), or leave it to initialize()',
            )

    def end_by(self, error: BaseException) -> None:
        """See `Ranks`."""
        self._end = f"{type(error).__name__}: {first_lines(error)}"

    def close(self) -> None:
        """Destroy what was made here; idempotent."""
        host, self._host = self._host, None
        if host is None or not self._dist.is_initialized():
            return
        if self._dist.group.WORLD is not self._world:  # whoever destroyed that, ours with it
            return
        _OF_OUR_GROUP.discard(self)
        if self._all is None and self._store is not None:
            with contextlib.suppress(RuntimeError):  # others may have ended, and it with them
                self._store.set(self._closed(self.rank), self._end)
        is_last = all(other._world is not self._world for other in _OF_OUR_GROUP)
        self._dist.destroy_process_group(None if self._owned and is_last else host)
        if self._group not in (None, host):
            self._dist.destroy_process_group(self._group)


_OF_OUR_GROUP: weakref.WeakSet[TorchRanks] = weakref.WeakSet()  # a default group made here


def _patience(group: Any) -> timedelta:
    """How long torch's `group` waits for a rank: so do meetings, which are in a group of ours."""
    with contextlib.suppress(AttributeError, RuntimeError):  # torch has no public name for it
        found = group._get_backend(group._device_types[0]).options._timeout
        if isinstance(found, timedelta):
            return found
    return _HELD_UP


class _TorchWork:
    """Work of torch's, whose errors say who is lost."""

    def __init__(self, ranks: TorchRanks, works: Sequence[Any]) -> None:
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


def find_ranks(timeout: timedelta | None = None) -> Ranks:
    """The ranks of torch's default process group, or those a launcher started; else `ALONE`.

    A launcher such as `torchrun` says so in WORLD_SIZE, RANK, MASTER_ADDR and MASTER_PORT: then a
    group is made, of NCCL where there are GPUs, else of gloo, in which who takes longer than
    `timeout` counts as lost. Raises `ConfigError` where one of these is missing, or not the same on
    all ranks, `MachineError` where no group can be made.
    """
    dist: Any = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        ours = any(user._world is dist.group.WORLD for user in _OF_OUR_GROUP)
        return TorchRanks(owned=ours) if dist.get_world_size() > 1 else ALONE
    count = num_launched()
    if count <= 1:
        return ALONE
    missing = [n for n in ("RANK", "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(n)]
    if missing:
        raise ConfigError(
            f"WORLD_SIZE is {count}, but {', '.join(missing)} is not set",
            remedy=f"torchrun --nproc-per-node {count} train.py, which sets them; or unset "
            "WORLD_SIZE for one process",
        )
    import torch.distributed as dist

    backend, timeout = "nccl" if torch.cuda.is_available() else "gloo", timeout or _HELD_UP
    try:
        if _number("RANK", 0):
            _wait_until(_listens, "rank 0", timeout)
        # A store that waits for nobody: else rank 0 would wait there for ranks that nobody starts.
        store, rank, _ = next(dist.rendezvous("env://", world_size=1, timeout=timeout))
        _check_count(store, rank, count, timeout)
        one_machine = _on_this_machine(store, rank, count)[1] == count
        with _by_loopback(one_machine):
            if one_machine:  # a store that torchrun keeps over restarts has addresses of the dead
                restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
                store = dist.PrefixStore(f"restart-{restart}", store)
            # Likewise of a group that this process had before, as that of an engine it has closed.
            number = store.add(f"groups of rank {rank}", 1)
            store = dist.PrefixStore(f"group-{number}", store)
            dist.init_process_group(
                backend, store=store, rank=rank, world_size=count, timeout=timeout
            )
            return TorchRanks(owned=True)
    except (RuntimeError, ValueError) as error:
        raise MachineError(
            f"the {count} ranks do not find each other: {first_lines(error)}",
            because="a rank did not start, or MASTER_ADDR and MASTER_PORT cannot be reached",
            remedy="on one machine: torchrun --standalone --nproc-per-node N train.py",
        ) from error


def _wait_until(came: Callable[[], bool], who: str, timeout: timedelta) -> None:
    """Poll for other ranks, so that Ctrl-C ends it; warns of a long wait, raises `RuntimeError`."""
    place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    began, patience_s, says_s = time.monotonic(), timeout.total_seconds(), _SAYS_S
    while not came():
        if (waited_s := time.monotonic() - began) > patience_s:
            raise RuntimeError(f"{who} did not come to {place} in {waited_s:.0f} s")
        if waited_s > says_s:
            says_s = patience_s  # once
            warnings.warn(
                f"rank {_number('RANK', 0)} of {num_launched()} waits for {who} to come to {place}",
                InfinityWarning,
                stacklevel=4,
            )
        time.sleep(_POLLS_S)


def _listens() -> bool:
    """Return True if rank 0, or a launcher for it, takes connections."""
    place = os.environ["MASTER_ADDR"], _number("MASTER_PORT", 0)
    with contextlib.suppress(OSError), socket.create_connection(place, timeout=1):
        return True
    return False


def _check_count(store: Any, rank: int, count: int, timeout: timedelta) -> None:
    """Wait for all ranks; raise `ConfigError` where two were started as of different numbers."""
    key = "WORLD_SIZE of rank {}".format
    store.set(key(rank), str(count))
    for other in range(count):
        _wait_until(partial(store.check, [key(other)]), f"rank {other}", timeout)
        end = None
        while (told := int(store.get(key(other)))) != count:
            # A store that is kept over restarts may have what a dead one was told.
            end = end or time.monotonic() + _STALE_S
            if time.monotonic() > end:
                raise ConfigError(
                    f"WORLD_SIZE is {count} on rank {rank}, {told} on rank {other}",
                    because="they were started for different numbers of processes",
                    remedy="start all with one command; on several nodes with the same --nnodes "
                    "and --nproc-per-node on each",
                )
            time.sleep(_POLLS_S)


def num_launched() -> int:
    """How many processes a launcher started, by its WORLD_SIZE; 1 where there is none."""
    return _number("WORLD_SIZE", 1)


def _on_this_machine(store: Any, rank: int, count: int) -> tuple[int, int]:
    """The number of this rank among those of its machine, and how many these are.

    As torchrun or DeepSpeed's launcher says; of others, such as srun, ranks tell by `store` where
    they are, the ranks of a machine one after the other.
    """
    told = _number("LOCAL_WORLD_SIZE", _number("LOCAL_SIZE", 0))
    if told or store is None:
        return _number("LOCAL_RANK", rank), told or count
    here = _this_machine()
    store.set(f"machine of rank {rank}", here)
    local = [r for r in range(count) if store.get(f"machine of rank {r}") == here]
    if local[-1] - local[0] >= len(local):
        raise ConfigError(
            f"{named_ranks(local)} are on one machine, and others between them are not",
            remedy="number the ranks of a machine one after the other: srun --distribution=block",
        )
    return local.index(rank), len(local)


def _this_machine() -> bytes:
    """Its name, and its kernel's start: containers of one machine may have names of their own."""
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id", "rb") as file:
        return f"{socket.gethostname()} ".encode() + file.read()
    return socket.gethostname().encode()


def launched_rank(name: str) -> int:
    """This process's RANK or LOCAL_RANK, by a launcher; 0 where there is none."""
    return _number(name, 0)


def _number(name: str, default: int) -> int:
    text = os.environ.get(name) or str(default)
    if not text.isdecimal():
        raise ConfigError(f"{name} is {text!r}, not a number", remedy=f"unset {name}")
    return int(text)


@contextmanager
def _by_loopback(one_machine: bool) -> Iterator[None]:
    """Groups of gloo made inside use the loopback interface where all ranks are on one machine.

    Else gloo looks for the machine's own name, which containers cannot always resolve.
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
    """Facts to be compared; of tensors, which print few digits, all of them."""
    return json.dumps(facts, default=lambda v: v.tolist() if isinstance(v, Tensor) else str(v))


def check_alike(ranks: Ranks, what: str, facts: Mapping[str, Any]) -> None:
    """Raise `ConfigError` on every rank where `facts` (plain data) of two ranks differ.

    It names the first difference, and the ranks; `what` is what the facts are of.
    """
    if ranks.count == 1:
        return
    mine = json.loads(as_json(dict(facts)))
    ranks.meet(f"compares {what}")
    every = ranks.gather_words(mine)
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
    """Where two pieces of plain data first differ: its place, and both in words."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in [*one, *(k for k in other if k not in one)]:
            inside = f"{where}.{key}" if where else str(key)
            found = _difference(one.get(key), other.get(key), inside)
            if found is not None:
                return found
        return None
    return None if one == other else (where, f"{one!r:.200}", f"{other!r:.200}")
