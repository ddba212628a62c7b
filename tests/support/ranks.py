"""Ranks as threads of one process, with collectives through memory."""

from __future__ import annotations

import gc
import importlib
import random
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from support import fault_injection
from support.fake_accelerator import FakeAccelerator
from support.models import Batch
from support.trainer import Result, train_on
from torch import Tensor, nn

from infinity.config.schema import load_config
from infinity.distributed.context import CompletedWork, DistContext, Work
from infinity.engine import Engine
from infinity.errors import MachineError
from infinity.storage.device import Device

HANG_S = 600.0
T = TypeVar("T")


class _Input:
    """Input of one rank to a collective; copied at its first use, or when the rank's work ends."""

    def __init__(self, kind: tuple[Any, ...], source: Tensor) -> None:
        self.kind = kind
        self._lock = threading.Lock()
        self._source = source
        self._bytes: Tensor | None = None

    def bytes(self) -> Tensor:
        with self._lock:
            if self._bytes is None:
                self._bytes = self._source.clone()
            return self._bytes


class AsyncCollective:
    """Asynchronous collective that completes when it is waited for.

    Until then its outputs hold poison.
    """

    def __init__(
        self, ranks: ThreadRanks, what: str, source: Tensor, outputs: list[Tensor]
    ) -> None:
        self.what = what
        self._ranks = ranks
        self._outputs = outputs  # outputs by rank; this rank's may be its input
        remote_outputs = [output for output in outputs if output.data_ptr() != source.data_ptr()]
        self.touched = [(source, False), *((output, True) for output in remote_outputs)]
        self._input = _Input((what, source.shape, source.dtype), source)
        for output in remote_outputs:
            output.fill_(0xFF)
        self.number = ranks.group.post_input(ranks.rank, self._input)
        self.awaited = self._over = False
        self._lock = threading.Lock()

    def done(self) -> bool:
        """Return whether it has completed; once all ranks started it, a query may complete it.

        Completion is decided at random, so that no test depends on polling.
        """
        if (
            not self._over
            and self._ranks.random_bool()
            and self._ranks.group.have_all_started(self.number)
        ):
            self.wait()
        return self._over

    def wait(self) -> None:
        self.awaited = True
        with self._lock:
            if self._over:
                return
            inputs = self._ranks.group.wait_for_all(self._ranks.rank, self.number)
            kinds = {rank_input.kind for rank_input in inputs}
            assert len(kinds) == 1, f"collectives that do not belong together: {kinds}"
            self._input.bytes()  # the source may change from now on
            for output, rank_input in zip(self._outputs, inputs, strict=True):
                received = rank_input.bytes()
                if self.what == "all_to_all":
                    received = received.view(self._ranks.count, -1)[self._ranks.rank]
                if rank_input is not self._input or self.what == "all_to_all":
                    output.copy_(received)
            self._over = True
            self._ranks.log.append(("over", self.number))


class Group:
    """State shared by the ranks of one run; waiting for a rank that has ended raises."""

    def __init__(self, count: int, nodes: int = 1) -> None:
        self.count = count
        self.nodes = nodes
        self.sent: list[dict[str, int]] = [{} for _ in range(count)]  # bytes, by collective
        self._changed = threading.Condition()
        self._rounds = [0] * count
        self._table: dict[int, dict[int, Any]] = {}
        self._ended: set[int] = set()
        self._starts = [0] * count
        self._under_way: dict[int, dict[int, _Input]] = {}

    def ranks(self) -> list[ThreadRanks]:
        return [ThreadRanks(self, rank) for rank in range(self.count)]

    def end(self, rank: int) -> None:
        with self._changed:
            self._ended.add(rank)
            self._changed.notify_all()

    def exchange(self, rank: int, value: Any) -> list[Any]:
        """Exchange values synchronously; return those of all ranks."""
        with self._changed:
            number = self._rounds[rank]
            self._rounds[rank] += 1
            values = self._table.setdefault(number, {})
            values[rank] = value
            self._changed.notify_all()
            while len(values) < self.count:
                if self._ended - values.keys():
                    raise MachineError(f"rank {rank} lost the others")
                assert self._changed.wait(HANG_S), "the ranks hang"
            self._table.pop(number - 1, None)  # all ranks have read it
            return [values[other] for other in range(self.count)]

    def post_input(self, rank: int, rank_input: _Input) -> int:
        """Start an asynchronous exchange; return its number, for `wait_for_all`."""
        with self._changed:
            number = self._starts[rank]
            self._starts[rank] += 1
            self._under_way.setdefault(number, {})[rank] = rank_input
            self._changed.notify_all()
            return number

    def have_all_started(self, number: int) -> bool:
        with self._changed:
            return len(self._under_way[number]) == self.count

    def wait_for_all(self, rank: int, number: int) -> list[_Input]:
        """Wait for an asynchronous exchange; return the inputs of all ranks."""
        with self._changed:
            inputs = self._under_way[number]
            while len(inputs) < self.count:
                if self._ended - inputs.keys():
                    raise MachineError(f"rank {rank} lost the others")
                assert self._changed.wait(HANG_S), "the ranks hang"
            return [inputs[other] for other in range(self.count)]


class ThreadRanks(DistContext):
    """Context of one rank; mismatched collectives raise instead of hanging."""

    def __init__(self, group: Group, rank: int) -> None:
        self.group = group
        self.rank, self.count = rank, group.count
        self.local_count = group.count // group.nodes
        self.local_rank = rank % self.local_count
        self.thread = 0  # the thread that all collectives must come from
        # In order: collectives started, with their numbers; synchronizations; completions.
        self.log: list[tuple[str, str | int]] = []
        self.works: list[AsyncCollective] = []
        self._random = random.Random(rank)

    @property
    def sent(self) -> dict[str, int]:
        """Bytes that this rank sent, by collective, including its own share."""
        return self.group.sent[self.rank]

    def random_bool(self) -> bool:
        return self._random.random() < 0.5

    def _begin(self, what: str, source: Tensor) -> None:
        thread = threading.get_ident()
        assert self.thread in (0, thread), "a collective of another thread"
        self.thread = thread
        self.sent[what] = self.sent.get(what, 0) + source.nbytes

    def _exchange(self, what: str, source: Tensor) -> list[Tensor]:
        self._begin(what, source)
        group = self.group
        exchanged = group.exchange(self.rank, (what, source.shape, source.dtype, source.clone()))
        kinds = {(name, shape, dtype) for name, shape, dtype, _ in exchanged}
        assert len(kinds) == 1, f"collectives that do not belong together: {kinds}"
        return [tensor for *_, tensor in exchanged]

    def synchronize(
        self, doing: str, *notes: int, error: BaseException | None = None
    ) -> Sequence[Sequence[int]]:
        self.log.append(("meets", doing))
        return super().synchronize(doing, *notes, error=error)

    def all_gather(self, full: Tensor, *, overlap: bool = False) -> Work:
        outputs = full.view(self.count, -1)
        if overlap:
            return self._start_async("all_gather", outputs[self.rank], outputs)
        for output, received in zip(
            outputs, self._exchange("gather", outputs[self.rank]), strict=True
        ):
            output.copy_(received)
        return CompletedWork()

    def all_to_all(self, received: Tensor, sent: Tensor) -> Work:
        return self._start_async("all_to_all", sent, received.view(self.count, -1))

    def _start_async(self, what: str, source: Tensor, outputs: Tensor) -> Work:
        self._begin(what, source)
        work = AsyncCollective(self, what, source, list(outputs))
        self.works.append(work)
        self.log.append((what, work.number))
        return work

    def broadcast(self, tensor: Tensor, source: int) -> None:
        tensor.copy_(self._exchange("broadcast", tensor)[source])

    def new_subgroup(self, sets: Sequence[Sequence[int]], *, by_host: bool = False) -> DistContext:
        members = next(members for members in sets if self.rank in members)
        groups = self.group.exchange(self.rank, Group(len(members)))
        return ThreadRanks(groups[members[0]], members.index(self.rank))


def on_ranks(count: int, work: Callable[[DistContext], T], *, nodes: int = 1) -> list[T]:
    """Return the results of `work` by rank; raise the first error not caused by another rank."""
    results, errors = together(count, work, nodes=nodes)
    failed = sorted(errors.items(), key=lambda item: "lost the others" in str(item[1]))
    if failed:
        raise failed[0][1]
    return [results[rank] for rank in range(count)]


def together(
    count: int, work: Callable[[DistContext], T], *, nodes: int = 1
) -> tuple[dict[int, T], dict[int, BaseException]]:
    """Run `work` on each rank; return results and errors by rank.

    Asserts that every asynchronous collective was waited for.
    """
    # Two threads that import it at once may break CPython 3.11's parser (gh-106905).
    importlib.import_module("torch._dynamo")
    group = Group(count, nodes)
    members = group.ranks()
    results: dict[int, T] = {}
    errors: dict[int, BaseException] = {}

    def run(ranks: ThreadRanks) -> None:
        torch.set_num_threads(1)  # of this thread
        try:
            results[ranks.rank] = work(ranks)
        except BaseException as error:
            errors[ranks.rank] = error
        finally:
            group.end(ranks.rank)

    threads = [threading.Thread(target=run, args=(ranks,)) for ranks in members]
    # `torch.get_rng_state` makes a tensor under its generator's lock. A garbage collection at that
    # point may switch to another thread, which waits for the lock while it holds the GIL.
    gc.collect()
    gc.disable()
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        gc.enable()
    pending = [
        (ranks.rank, work.what) for ranks in members for work in ranks.works if not work.awaited
    ]
    assert not pending, f"left under way: {pending}; errors {errors}"
    return results, errors


# --- training ------------------------------------------------------------------------------------


def make_engine(
    ranks: DistContext,
    model: nn.Module,
    config: Mapping[str, Any],
    folder: Path,
    *,
    device: Device | str | None = None,
    groups: Callable[[nn.Module], list[dict[str, Any]]] | None = None,
    **options: Any,
) -> Engine:
    """Return the engine of one rank, with scratch files in a folder that all ranks share.

    By default units move through slots and weights are gathered for each forward.
    """
    placement = {"reshard_after_forward": True, "shared": False, **config.get("placement", {})}
    plain, io = fault_injection.taken({"nvme_path": str(folder), **config, "placement": placement})
    if groups is not None:
        options["model_parameters"] = groups(model)
    engine: Engine = fault_injection.initialize(
        model, load_config(plain), io=io, device=device, ranks=ranks, **options
    )[0]
    return engine


def train_with_rank_counts(
    counts: Sequence[int],
    build: Callable[[int], nn.Module],
    batches: Sequence[Batch],
    config_of: Callable[[int, int], Mapping[str, Any]],
    folder: Path,
    **options: Any,
) -> Result:
    """Train runs with different numbers of ranks in turn; each loads the previous checkpoint.

    Run i has `counts[i]` ranks, an equal share of `batches`, the model `build(i)` and the
    configuration `config_of(i, counts[i])`.
    """
    losses: list[float] = []
    norms: list[float] = []
    share = len(batches) // len(counts)
    for number, count in enumerate(counts):
        result = train_ranks(
            count, partial(build, number), batches[number * share :][:share],
            config_of(number, count), save=folder / str(number),
            load=folder / str(number - 1) if number else None, **options,
        )  # fmt: skip
        losses += result.losses
        norms += result.norms
    result.losses, result.norms = losses, norms
    return result


def train_ranks(
    count: int,
    build: Callable[[], nn.Module],
    batches: Sequence[Batch],
    config: Mapping[str, Any],
    *,
    device: Callable[[int], Device | str | None] = lambda rank: None,
    groups: Callable[[nn.Module], list[dict[str, Any]]] | None = None,
    load: Path | None = None,
    save: Path | None = None,
    nodes: int = 1,
    **options: Any,
) -> Result:
    """Train on `count` ranks; rank r gets batches r, r + count, ...

    Losses are returned in the order of batches; norms and masters, which must be equal on all
    ranks, those of rank 0.
    """
    devices = [device(rank) for rank in range(count)]
    models = [build() for _ in range(count)]  # not in threads, which share torch's generator
    with tempfile.TemporaryDirectory(prefix="ranks-") as name:

        def work(ranks: DistContext) -> Result:
            model, device = models[ranks.rank], devices[ranks.rank]
            with make_engine(
                ranks, model, config, Path(name), device=device, groups=groups, **options
            ) as engine:
                result = train_on(engine, batches[ranks.rank :: count], load=load, save=save)
                losses = ranks.gather(torch.tensor(result.losses, dtype=torch.float64))
                result.losses = losses.T.flatten().tolist()
                return result

        results = on_ranks(count, work, nodes=nodes)
        files = list(Path(name).iterdir())
        assert not files, f"left in nvme_path: {files}"
    for used in devices:
        if isinstance(used, FakeAccelerator):
            assert not used.violations, used.violations[:3]
    first = results[0]
    for other in results[1:]:
        assert first.differences(other) == [], "ranks differ"
    first.of_ranks = [replace(one) for one in results]
    return first
