"""Tests of training on a disk with injected faults: exact results, or the expected error.

Each seed draws a set of faults, a rate and a configuration, and trains a tiny model whose state is
on disk. Then:

- harmless faults (short transfers, delays, reordering) do not change results;
- others give exact results, or an `InfinityError` with the expected errno, path and unit;
- with `verify`, flipped bits are always detected;
- after a failed fetch or gradient write the micro-batch, or the window, can be repeated;
- the engine closes, and no file, thread, descriptor or memory is leaked.
"""

from __future__ import annotations

import errno
import gc
import os
import random
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from support import fault_injection
from support.fake_accelerator import FakeAccelerator
from support.internals import components
from support.leaks import descriptors, tasks
from support.small import batch, masters, same, settings, small_model
from support.trainer import make_device
from support.waiting import wait_until
from torch import Tensor

import infinity
from infinity import _aio
from infinity.engine import Engine
from infinity.errors import EngineFailedError, TransferError
from infinity.storage.disk import Disk, Extent
from infinity.storage.reservations import PROCESS
from infinity.storage.store import Priority

# Warns about two directories on one device, which is intended here.
pytestmark = pytest.mark.filterwarnings("ignore::infinity.errors.InfinityWarning")
STEPS = 3
STUCK_AFTER_S = 0.25  # only with "stuck" faults, so that a busy machine is not taken for stuck
HARMLESS = ("short", "delay", "reorder")
ERRNOS = {
    "eio": {errno.EIO},
    "enospc": {errno.ENOSPC},
    "flip": {errno.EBADMSG},
    "stuck": {errno.ETIMEDOUT},
}
PLACEMENTS = (
    {"weights": "disk", "optimizer_state": "disk", "gradients": "disk"},
    {"weights": "disk", "optimizer_state": "disk", "gradients": "host"},
    {"weights": "disk", "optimizer_state": "host", "gradients": "disk"},
    {"weights": "device", "optimizer_state": "disk", "gradients": "disk"},
)


@dataclass(frozen=True)
class Case:
    """Configuration of the run of one seed."""

    seed: int
    kinds: tuple[str, ...]
    rate: float
    verify: bool
    num_paths: int
    backend: str
    micro_batches: int
    precision: str
    placement: dict[str, str]
    prefetch_units: int
    uses_accelerator: bool

    def config(self, root: Path) -> dict[str, Any]:
        paths = [root / f"drive{i}" for i in range(self.num_paths)]
        for path in paths:
            path.mkdir(exist_ok=True)
        io: dict[str, Any] = {
            "backend": self.backend,
            "block_size": 4096,
            "queue_depth": 4,
            "num_threads": 2,
            "verify": self.verify,
            "timeout_s": STUCK_AFTER_S if "stuck" in self.kinds else 60,
            "faults": f"seed={self.seed},kinds={'+'.join(self.kinds)},rate={self.rate}",
        }
        if self.num_paths > 1:
            io["weights"] = [2, 1]
        return settings(
            root,
            self.placement,
            nvme_path=[str(p) for p in paths],
            io=io,
            precision=self.precision,
            prefetch_units=self.prefetch_units,
            gradient_accumulation_steps=self.micro_batches,
        )


def _has_uring() -> bool:
    try:
        _aio.Engine(backend="io_uring").close()
    except OSError:
        return False
    return True


HAS_URING = _has_uring()


def case_for(seed: int) -> Case:
    rng = random.Random(seed)
    harmless = rng.random() < 0.25
    if harmless:
        kinds = tuple(k for k in HARMLESS if rng.random() < 0.7) or HARMLESS
        rate = rng.choice((0.05, 0.3))
    else:
        kinds = tuple(rng.sample((*ERRNOS, *HARMLESS), rng.randint(1, 4)))
        rate = rng.choice((0.001, 0.003, 0.01, 0.03))
    return Case(
        seed=seed,
        kinds=kinds,
        rate=rate,
        verify=rng.random() < 0.6,
        num_paths=rng.choice((1, 2)),
        backend=rng.choice(("io_uring", "threads")) if HAS_URING else "threads",
        micro_batches=rng.choice((1, 1, 2)),
        precision=rng.choice(("fp32", "bf16")),
        placement=rng.choice(PLACEMENTS),
        prefetch_units=rng.choice((0, 2)),
        uses_accelerator=rng.random() < 0.25,
    )


@dataclass
class Outcome:
    """Result of a run on a faulty disk."""

    losses: dict[int, float] = field(default_factory=dict)
    state: dict[str, Tensor] | None = None  # None if the run ended in an error
    errors: list[TransferError] = field(default_factory=list)


_expected: dict[tuple[int, str], tuple[dict[int, float], dict[str, Tensor]]] = {}


def expected_result(
    micro_batches: int, precision: str
) -> tuple[dict[int, float], dict[str, Tensor]]:
    """Return losses and master weights of a run without a disk; placement does not change them."""
    key = micro_batches, precision
    if key not in _expected:
        config = settings(
            Path("unused"),
            {"weights": "device", "optimizer_state": "host", "gradients": "host"},
            precision=precision,
            gradient_accumulation_steps=micro_batches,
        )
        del config["nvme_path"]
        engine, *_ = infinity.initialize(small_model(num_blocks=2), config)
        with engine:
            outcome = Outcome()
            train(engine, outcome)
            _expected[key] = outcome.losses, masters(engine)
    return _expected[key]


def train(engine: Engine, outcome: Outcome) -> None:
    """Train all steps; retry micro-batches and windows after transfer errors."""
    while engine.global_steps < STEPS:
        index = engine.global_steps * engine.plan.micro_batches + engine.micro_step
        try:
            loss = engine(batch(index))
            outcome.losses[index] = float(loss.detach())
            engine.backward(loss)
            engine.step()
        except TransferError as error:
            outcome.errors.append(error)
            assert len(outcome.errors) < 200
            if error.errno == errno.ETIMEDOUT:
                raise  # a stuck drive would be stuck again


def run(case: Case, root: Path) -> Outcome:
    """Train on a faulty disk and close the engine; collect transfer errors, raise all others."""
    outcome = Outcome()
    accelerator = FakeAccelerator(case.seed, max_delay_s=0.0005) if case.uses_accelerator else None
    engine = None
    try:
        engine, *_ = fault_injection.initialize(
            small_model(num_blocks=2), case.config(root), device=accelerator
        )
        train(engine, outcome)
        outcome.state = masters(engine)
    except TransferError as error:
        outcome.errors.append(error)
    except EngineFailedError as error:
        if not isinstance(error.__cause__, TransferError):
            raise
        outcome.errors.append(error.__cause__)
    finally:
        if engine is not None:
            if any(error.errno == errno.ETIMEDOUT for error in outcome.errors):
                with pytest.raises(EngineFailedError):
                    engine(batch(0))
            try:
                engine.close()
            except TransferError as error:
                outcome.errors.append(error)
                if error.errno != errno.ETIMEDOUT:
                    raise
            del engine
    if accelerator is not None:
        assert not accelerator.violations, accelerator.violations[:3]
    return outcome


def check_outcome(case: Case, outcome: Outcome, root: Path) -> str:
    """Assert what must hold of an outcome; return "error", "repeated" or "clean"."""
    allowed = set().union(*(ERRNOS.get(kind, set()) for kind in case.kinds))
    if not case.verify:
        allowed.discard(errno.EBADMSG)
    for error in outcome.errors:
        assert error.errno in allowed, error
        assert str(root) in error.path, error
        if error.errno != errno.ETIMEDOUT:  # a timeout names the oldest request of the engine
            assert "unit '" in str(error), error
            assert error.length > 0
    for drive in root.iterdir():
        assert not list(drive.iterdir())
    if outcome.state is None:
        assert outcome.errors
        return "error"
    losses, expected = expected_result(case.micro_batches, case.precision)
    has_undetected_flips = "flip" in case.kinds and not case.verify
    if not has_undetected_flips:
        assert outcome.losses == losses
        assert same(outcome.state, expected)
    return "repeated" if outcome.errors else "clean"


def resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")


def run_seeds(seeds: Iterable[int], root: Path) -> Iterator[Counter[str]]:
    """Run many seeds; yield the counts of outcomes and errnos after each."""
    expected_result(1, "fp32")
    seen: Counter[str] = Counter()
    for seed in seeds:
        case = case_for(seed)
        directory = root / str(seed)
        directory.mkdir()
        gc.collect()
        threads, files, reserved = tasks(), descriptors(), PROCESS.total("host")
        try:
            outcome = run(case, directory)
            seen[check_outcome(case, outcome, directory)] += 1
            seen.update(errno.errorcode[error.errno] for error in outcome.errors)
            del outcome  # the tracebacks of its errors refer to the engine
            gc.collect()
            assert wait_until(lambda before=threads: tasks() <= before)
            assert descriptors() <= files
            assert PROCESS.total("host") == reserved
        except BaseException as error:
            error.add_note(f"in {case}")
            raise
        yield seen


# Seeds that cover every kind of fault, alone and combined, on both back ends.
SEEDS = (4, 6, 10, 18, 22, 25, 36, 38, 43, 44, 49, 50, 56, 57, 98, 101)
OUTCOMES = ("error", "clean", "EIO", "ENOSPC", "EBADMSG", "ETIMEDOUT")


def test_faulty_disk_gives_exact_state_or_expected_error(tmp_path: Path) -> None:
    *_, seen = run_seeds(SEEDS, tmp_path)
    for what in (*OUTCOMES, "repeated"):
        assert seen[what], (what, seen)


def test_delayed_blocks_do_not_change_results(tmp_path: Path) -> None:
    """Half of all blocks are delayed, so a read that overtakes its write gets other bytes."""
    for seed in range(6):
        placement = {
            "weights": ("device", "disk")[seed % 2],
            "optimizer_state": "disk",
            "gradients": "disk",
        }
        case = Case(
            seed=seed, kinds=("delay",), rate=0.5, verify=False, num_paths=1,
            backend=("threads", "io_uring")[HAS_URING and seed % 3 == 0], micro_batches=3,
            precision=("bf16", "fp32")[seed % 2], placement=placement, prefetch_units=2,
            uses_accelerator=False,
        )  # fmt: skip
        directory = tmp_path / str(seed)
        directory.mkdir()
        assert check_outcome(case, run(case, directory), directory) == "clean", case


@pytest.mark.big
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("part", range(5))
def test_faulty_disk_gives_exact_state_or_expected_error_many_seeds(
    tmp_path: Path, part: int
) -> None:
    results = run_seeds(range(part * 200, part * 200 + 200), tmp_path)
    resident, seen = zip(*((resident_bytes(), seen) for seen in results), strict=True)
    assert resident[-1] - resident[100] < 48 << 20
    for what in OUTCOMES:
        assert seen[-1][what], (what, seen[-1])


class FailedTicket:
    """Ticket of a failed request."""

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        raise TransferError("lost", path="p", offset=0, length=1, errno=errno.EIO)


def fail_once(
    monkeypatch: pytest.MonkeyPatch, name: str, selects: Callable[[Extent, Priority], bool]
) -> list[str]:
    """Fail the first request that `wanted` selects; return a list that will hold its owner."""
    original, failed = getattr(Disk, name), []

    def request(self: Disk, segments: Any, priority: Priority) -> Any:
        if not failed and selects(segments[0][0], priority):
            failed.append(segments[0][0].owner)
            return FailedTicket()
        return original(self, segments, priority)

    monkeypatch.setattr(Disk, name, request)
    return failed


LAST_GRADIENTS = "unit 'embedding', gradients"  # the last that a backward writes
FAILURES = {
    "a fetch": ("read", lambda extent, priority: priority is Priority.URGENT),
    "gradients written back": ("write", lambda extent, _: "gradients" in extent.owner),
    "the last gradients written back": ("write", lambda e, _: e.owner == LAST_GRADIENTS),
    "gradients coming back": ("read", lambda extent, _: "gradients" in extent.owner),
}


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("what", FAILURES)
@pytest.mark.parametrize("kind", ["cpu", "fake"])
def test_retry_after_transfer_error_is_exact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, what: str, micro_batches: int
) -> None:
    """Weights are unchanged and the accumulation window starts over."""
    options = {"gradient_accumulation_steps": micro_batches, "prefetch_units": 0}
    config = settings(tmp_path, **options)
    device = make_device(kind)
    engine, *_ = infinity.initialize(small_model(num_blocks=2), config, device=device)
    with engine:
        outcome = Outcome()
        failed = fail_once(monkeypatch, *FAILURES[what])
        try:
            train(engine, outcome)
        except EngineFailedError:
            # With one micro-batch only the optimizer pass reads gradients; it cannot be retried.
            assert (what, micro_batches) == ("gradients coming back", 1)
            return
        assert failed
        assert len(outcome.errors) == 1
        losses, expected = expected_result(micro_batches, "fp32")
        assert outcome.losses == losses
        assert same(masters(engine), expected)


@pytest.mark.parametrize("kind", ["cpu", "fake"])
def test_failed_backward_does_not_keep_engine_alive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Autograd keeps the rest of the graph; it must not keep the engine's memory alive."""
    config = settings(tmp_path, gradient_accumulation_steps=2)
    engine = infinity.initialize(small_model(num_blocks=2), config, device=make_device(kind))[0]
    with engine:
        engine.backward(engine(batch(0)))
        engine.step()
        loss = engine(batch(1))
        owner = "unit 'blocks.1', gradients"
        fail_once(monkeypatch, "read", lambda extent, _: extent.owner == owner)
        with pytest.raises(TransferError):  # noqa: PT012
            engine.backward(loss)
            engine.step()  # gradients of a device are summed after the backward
    prefetcher = weakref.ref(components(engine).prefetcher)
    del engine, loss
    gc.collect()
    assert prefetcher() is None
