"""Simulation of crashes, power loss, bit flips and failing system calls in a complete run.

One run is recorded: durable steps on two drives, checkpoints, exported weights, the run directory
with its metrics. Each seed is one failure: a kill, or a power loss that reorders and tears what was
not synced, at any point, possibly with a flipped bit; or a system call that fails (EIO, ENOSPC)
during training. Everything acknowledged before must be there exactly: committed steps, saved
checkpoints, saved weights. Only if a bit was flipped may an error be raised instead.

Rerun one seed: INFINITY_SEED=17 python -m pytest tests/faults/test_simulation.py -k replay
"""

from __future__ import annotations

import errno
import os
import random
import shutil
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoint_files import content, same_content
from support.durable import PLACEMENTS, State, durable_engine, equal, gated, state_of, step
from support.recorded_tree import RecordedTree
from support.seeds import many
from torch import Tensor

from infinity.checkpoint.directory import find_tag
from infinity.checkpoint.reader import CheckpointReader
from infinity.errors import InfinityError
from infinity.model.weight_files import WeightFiles
from infinity.train.directory import RunDirectory
from infinity.train.metrics import Metrics

STEPS = 3
QUICK, BATCH = 150, 50
OPTIONS: dict[str, Any] = {
    "placement": PLACEMENTS["moments in RAM"],
    "commit_every": 1,
    "io": {"weights": [2, 1], "block_size": 4096},
}


def train_and_save(world: Path, promise: Callable[[str], None]) -> None:
    """Train three steps and write all outputs, resuming from the contents of `world`.

    `promise` is called with each guarantee as soon as the call that gives it has returned.
    """
    paths = [world / "d0", world / "d1"]
    with ExitStack() as stack:
        directory = RunDirectory(world / "run", resume=True)
        stack.callback(directory.close)
        with directory.beginning({"seed": 1}):
            engine = stack.enter_context(durable_engine(paths, gated(), **OPTIONS, resume="auto"))
        metrics = Metrics(directory.metrics, after=engine.global_steps)
        stack.callback(metrics.close)
        directory.write("config.yaml", "a: 1\n")
        while engine.global_steps < STEPS:
            step(engine)
            number = engine.global_steps
            promise(f"step {number}")
            metrics.write({"event": "step", "step": number, "loss": 1.0})
            engine.save_checkpoint(world / "saved", f"step{number}", wait=True, keep_last=2)
            promise(f"checkpoint {number}")
            directory.remember(noted=number)
            promise(f"saved {number}")
            engine.save_weights(world / "weights", max_shard=4096 if number % 2 else "1MiB")
            promise(f"weights {number}")
    promise("closed")


def make_world(root: Path) -> Path:
    for name in ("d0", "d1"):
        (root / name).mkdir(parents=True)
    return root


@dataclass
class Expected:
    """States, checkpoint streams and weights by step, and the recorded writes."""

    states: list[State]
    checkpoints: dict[str, dict[tuple[str, str], Tensor]]
    weights: list[dict[str, Tensor]]
    tree: RecordedTree
    calls: int


def weights_in(directory: Path) -> dict[str, Tensor]:
    with WeightFiles(directory) as files:
        return {name: files.read(name) for name in files.facts}


@pytest.fixture(scope="module")
def expected(in_memory: Path) -> Expected:
    (reference := in_memory / "calm").mkdir()
    states, checkpoints, weights = [], {}, []
    with durable_engine(reference, gated(), placement=PLACEMENTS["moments in RAM"]) as engine:
        for number in range(STEPS + 1):
            states.append(state_of(engine))
            engine.save_weights(reference / f"weights{number}")
            weights.append(weights_in(reference / f"weights{number}"))
            if number:
                engine.save_checkpoint(reference / "saved", f"step{number}", wait=True)
                checkpoints[f"step{number}"] = content(reference / "saved", f"step{number}")
            step(engine)
    tree, calls = RecordedTree(make_world(in_memory / "world")), 0

    def count(name: str) -> None:
        nonlocal calls
        calls += 1

    with tree.recording(count):
        train_and_save(tree.root, tree.mark)
    shutil.rmtree(tree.root)  # crash states are created there, because runs store absolute paths
    return Expected(states, checkpoints, weights, tree, calls)


# --- one failure ---------------------------------------------------------------------------------

# Files without a checksum: exported weights are safetensors, and the others are text.
UNCHECKED = ("weights", "metrics", "config.yaml", "lock")


def flip(world: Path, rng: random.Random) -> str:
    paths = [path for path in sorted(world.rglob("*")) if path.is_file() and path.stat().st_size]
    names = {path: str(path.relative_to(world)) for path in paths}
    files = [path for path in paths if not any(word in names[path] for word in UNCHECKED)]
    if not files:
        return ""
    path = rng.choice(files)
    data = bytearray(path.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)
    return str(path.relative_to(world))


def last(promises: list[str], what: str) -> int:
    return max((int(p.split()[1]) for p in promises if p.split()[0] == what), default=0)


def check(world: Path, promises: list[str], expected: Expected, flipped: str) -> str:
    """Check all files against the promises; return "exact", or "refused" after a flipped bit."""
    results = [
        check_state(world, promises, expected),
        check_checkpoint(world, promises, expected, any_tag=flipped == "saved/latest"),
        check_weights(world, promises, expected),
        check_run(world, promises),
    ]
    refused = [result for result in results if result]
    assert not refused or flipped, refused
    return "refused" if refused else "exact"


def check_state(world: Path, promises: list[str], expected: Expected) -> str:
    promised = last(promises, "step")
    try:
        paths = [world / "d0", world / "d1"]
        with durable_engine(paths, gated(), **OPTIONS, resume="auto") as engine:
            found = engine.global_steps
            # The commit of the last step may be in progress until close() returns.
            assert found >= promised - ("closed" not in promises), (found, promised)
            assert equal(state_of(engine), expected.states[found]), f"another state of {found}"
            if found < STEPS:
                step(engine)
                assert equal(state_of(engine), expected.states[found + 1]), "another state later"
    except InfinityError as error:
        return f"state: {error}"
    return ""


def check_checkpoint(world: Path, promises: list[str], expected: Expected, *, any_tag: bool) -> str:
    """With `any_tag`, `latest` may name another complete checkpoint than the last."""
    saved = world / "saved"
    try:
        tag = find_tag(saved, None) if saved.is_dir() else None
        if not any_tag:
            assert (tag or "step0") >= f"step{last(promises, 'checkpoint')}", (tag, promises)
        if tag is not None:
            with CheckpointReader(saved, tag) as reader:
                problems = list(reader.verify())
            if problems:
                return f"checkpoint: {problems[0]}"
            assert same_content(content(saved, tag), expected.checkpoints[tag]), tag
    except InfinityError as error:
        return f"checkpoint: {error}"
    return ""


def check_weights(world: Path, promises: list[str], expected: Expected) -> str:
    promised = last(promises, "weights")
    try:
        found = weights_in(world / "weights")
    except InfinityError as error:
        return f"weights: {error}" if promised else ""
    steps = [n for n, weights in enumerate(expected.weights) if same_content(found, weights)]
    assert steps, "weights of no step"
    assert steps[0] >= promised, (steps, promised)
    return ""


def check_run(world: Path, promises: list[str]) -> str:
    if not (world / "run").is_dir():
        return "" if not promises else "run: it is gone"
    try:
        directory = RunDirectory(world / "run", resume=True)
        try:
            assert directory.record.get("noted", 0) >= last(promises, "saved")
            Metrics(directory.metrics, after=STEPS).close()
        finally:
            directory.close()
    except InfinityError as error:
        return f"run: {error}"
    return ""


def simulate_failure(seed: int, root: Path, expected: Expected) -> str:
    """Simulate the failure of a seed; return its kind and the result of the checks."""
    rng = random.Random(seed)
    kind = rng.choice(("kill", "kill", "power", "power", "power", "call"))
    world, flipped = root if kind == "call" else expected.tree.root, ""
    try:
        if kind == "call":
            promises = failing_call(world, rng, expected)
        else:
            cut = rng.randint(expected.tree.num_safe, len(expected.tree.log))
            expected.tree.left(cut, world, rng if kind == "power" else None)
            promises = expected.tree.marks(cut)
            if rng.random() < 0.3:
                flipped = flip(world, rng)
        how = f"{kind} and flip" if flipped else kind
        return f"{how}: {check(world, promises, expected, flipped)}"
    except Exception as error:
        command = f"INFINITY_SEED={seed} python -m pytest tests/faults/test_simulation.py -k replay"
        label = f"seed {seed} ({kind}, flipped {flipped!r})"
        raise AssertionError(f"{label}: {error}; {command}") from error
    finally:
        shutil.rmtree(world, ignore_errors=True)


def failing_call(world: Path, rng: random.Random, expected: Expected) -> list[str]:
    """Train while one system call, or all after it, fails; return the promises made before."""
    remaining, persistent = rng.randrange(expected.calls), rng.random() < 0.5
    error_number = rng.choice((errno.EIO, errno.ENOSPC))
    promises: list[str] = []

    def count(name: str) -> None:
        nonlocal remaining
        remaining -= 1
        if remaining == -1 or (
            persistent and remaining < 0 and name not in ("open", "unlink", "rmdir")
        ):
            raise OSError(error_number, os.strerror(error_number), f"at {name}")

    tree = RecordedTree(make_world(world))
    with suppress(InfinityError), tree.recording(count):
        train_and_save(world, promises.append)
    return promises


# --- seeds ---------------------------------------------------------------------------------------


def simulate_seeds(seeds: range, root: Path, expected: Expected) -> Counter[str]:
    return many(seeds, lambda seed: simulate_failure(seed, root / str(seed), expected))


@pytest.mark.parametrize("first", range(0, QUICK, BATCH))
def test_crashed_or_failed_run_keeps_its_promises(
    in_memory: Path, expected: Expected, first: int
) -> None:
    torch.set_num_threads(1)
    seen = simulate_seeds(range(first, first + BATCH), in_memory, expected)
    assert sum(seen.values()) == BATCH
    assert {"kill: exact", "power: exact", "call: exact"} <= seen.keys(), seen


@pytest.mark.big
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("first", range(QUICK, 10_000 + QUICK, 1000))
def test_crashed_or_failed_run_keeps_its_promises_many_seeds(
    in_memory: Path, expected: Expected, first: int, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = simulate_seeds(range(first, first + 1000), in_memory, expected)
    with capsys.disabled():
        print(f"\n{first}: {dict(sorted(seen.items()))}")


@pytest.mark.skipif("INFINITY_SEED" not in os.environ, reason="INFINITY_SEED names one")
def test_replay(in_memory: Path, expected: Expected) -> None:
    simulate_failure(int(os.environ["INFINITY_SEED"]), in_memory / "one", expected)
