"""Tests of saves, loads and commits with injected disk faults: exact results, or an error.

Each seed trains durably on a faulty scratch disk and saves after every step with a faulty writer.
Every published checkpoint loads exactly or is refused, as does the last committed step; training
resumed from it ends as without faults.
"""

from __future__ import annotations

import gc
import random
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import fault_injection
from support.small import MIXED, ON_DEVICE, ON_DISK, masters, same, settings, small_model, train
from torch import Tensor

from infinity.checkpoint import reader, writer
from infinity.engine import Engine
from infinity.errors import CheckpointError, InfinityError, TransferError

pytestmark = pytest.mark.filterwarnings("ignore::infinity.errors.InfinityWarning")
STEPS = 4
KINDS = ("eio", "enospc", "flip", "short", "delay", "reorder")
PLACEMENTS = (ON_DISK, MIXED, {**ON_DEVICE, "optimizer_state": "disk"})


def make_engine(root: Path, placement: dict[str, str], **options: Any) -> Engine:
    root.mkdir(exist_ok=True)
    config = settings(root, placement, **options)
    return fault_injection.initialize(small_model(num_blocks=2), config, poison=None)[0]


def state_of(engine: Engine) -> dict[str, Tensor]:
    state = masters(engine)
    for name, parameter in engine.module.named_parameters():
        for key, value in engine.optimizer.read_state(parameter).items():
            state[f"{name}.{key}"] = torch.as_tensor(value)
    return state


_reference_states: list[dict[str, Tensor]] = []


def reference_states(root: Path) -> list[dict[str, Tensor]]:
    """Return the states after 0, 1, ... steps without faults."""
    if not _reference_states:
        with make_engine(root / "clean", ON_DEVICE) as engine:
            _reference_states.append(state_of(engine))
            for step in range(STEPS):
                train(engine, 1, first=step)
                _reference_states.append(state_of(engine))
    return _reference_states


def faulty_run(engine: Engine, saved: Path) -> None:
    """Train and save until the last step, or until the engine fails."""
    while engine.global_steps < STEPS:
        try:
            train(engine, 1, first=engine.global_steps)
        except TransferError:
            continue  # a fetch failed: the micro-batch is repeated
        try:
            engine.save_checkpoint(saved, wait=True)
        except (TransferError, CheckpointError):
            continue


@pytest.fixture
def faulty_files(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Return a function that sets the faults of checkpoint files; "" for none."""
    faults = ""

    def engine(original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: original(*args, **{**kwargs, "faults": faults})

    def set_faults(text: str) -> None:
        nonlocal faults
        faults = text

    for module in (reader, writer):
        if hasattr(module, "_aio"):
            proxy = _Proxy(module._aio)
            proxy.Engine = engine(module._aio.Engine)
            monkeypatch.setattr(module, "_aio", proxy)
    return set_faults


class _Proxy:
    """Module with a replaced `Engine`."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self.Engine: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def run_seed(seed: int, root: Path, set_faults: Callable[[str], None]) -> Counter[str]:
    rng = random.Random(seed)
    seen: Counter[str] = Counter()
    placement = rng.choice(PLACEMENTS)
    kinds = rng.sample(KINDS, rng.randint(1, 4))
    rate = rng.choice((0.001, 0.005, 0.02))
    fault_text = f"seed={seed},kinds={'+'.join(kinds)},rate={rate}"
    expected, saved = reference_states(root), root / "saved"
    io = {"verify": True, "block_size": 4096, "faults": fault_text}
    set_faults(fault_text)
    engine = None
    try:
        engine = make_engine(
            root / "nvme", placement, durable=True, commit_every=rng.choice((1, 2)), io=io
        )
        faulty_run(engine, saved)
        seen["finished"] += 1
    except InfinityError:
        seen["failed"] += 1
    finally:
        if engine is not None:
            try:
                engine.close()
            except InfinityError:
                seen["close failed"] += 1
            del engine
    set_faults("")
    gc.collect()
    for path in sorted(saved.glob("global_step*")):
        with make_engine(root / "other", ON_DEVICE) as engine:
            try:
                engine.load_checkpoint(saved, path.name)
            except CheckpointError:
                if "flip" not in kinds:
                    raise
                seen["refused"] += 1
                continue
            assert same(state_of(engine), expected[engine.global_steps]), path
            assert path.name == f"global_step{engine.global_steps}"
            seen["loaded"] += 1
    try:
        with make_engine(
            root / "nvme", placement, durable=True, resume="auto", io={"verify": True}
        ) as engine:
            seen["resumed" if engine.resumed else "began anew"] += 1
            assert same(state_of(engine), expected[engine.global_steps])
            train(engine, STEPS - engine.global_steps, first=engine.global_steps)
            assert same(state_of(engine), expected[STEPS])
    except (TransferError, CheckpointError):
        if "flip" not in kinds:
            raise
        seen["commit refused"] += 1
    return seen


def run_seeds(seeds: Iterable[int], root: Path, set_faults: Callable[[str], None]) -> Counter[str]:
    seen: Counter[str] = Counter()
    reference_states(root)
    for seed in seeds:
        folder = root / str(seed)
        folder.mkdir()
        try:
            seen += run_seed(seed, folder, set_faults)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
    return seen


def test_faulty_saves_and_commits_load_exactly_or_are_refused(
    tmp_path: Path, faulty_files: Callable[[str], None]
) -> None:
    """Seeds that cover each kind of fault, each placement and each outcome."""
    seen = run_seeds((2, 3, 9, 11, 13, 17, 22, 23, 28, 29, 31, 33, 34), tmp_path, faulty_files)
    for what in ("finished", "failed", "loaded", "resumed"):
        assert seen[what], seen


@pytest.mark.big
@pytest.mark.timeout(3600)
def test_faulty_saves_and_commits_load_exactly_or_are_refused_many_seeds(
    tmp_path: Path, faulty_files: Callable[[str], None]
) -> None:
    seen = run_seeds(range(1000, 1500), tmp_path, faulty_files)
    for what in ("finished", "failed", "loaded", "resumed", "refused"):
        assert seen[what], seen
