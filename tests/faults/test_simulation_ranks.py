"""Simulation of crashes of two ranks, and of files of other times, histories and ranks.

A run of two ranks commits a step and is continued twice from there, with other batches the second
time. Each seed ends the first history by a kill or a power loss, and may replace some files of a
rank by those of another time, of the other history, or of the other rank. The resumed state is
exact, or resuming is refused.

Rerun one seed: INFINITY_SEED=17 python -m pytest tests/faults/test_simulation_ranks.py -k replay
"""

from __future__ import annotations

import os
import random
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from support.ranks import make_engine, on_ranks
from support.recorded_tree import RecordedTree
from support.seeds import many
from support.small import MIXED, batch, settings, small_model
from torch import Tensor

from infinity.checkpoint.commits import COMMIT_NAMES
from infinity.checkpoint.durable_reader import DurableReader
from infinity.distributed.context import DistContext
from infinity.errors import InfinityError

COUNT, STEPS, QUICK = 2, 4, 40
FILES = (*COMMIT_NAMES, "checksums.bin", "plan.json", "run.json", "lock", "state.bin")
Weights = dict[str, Tensor]


def resume_and_train(
    world: Path,
    steps: int | None = None,
    shift: int = 0,
    promise: Callable[[str], None] | None = None,
) -> dict[int, Weights]:
    """Resume and train to step `steps` (default: the next); return the master weights by step."""
    config = settings(
        world, MIXED | {"reshard_after_forward": True}, seed=1, durable=True, resume="auto"
    )
    config |= {"commit_every": 1, "io": {"block_size": 4096}}

    models = [small_model(num_blocks=1) for _ in range(COUNT)]  # threads share the generator

    def work(ranks: DistContext) -> dict[int, Weights]:
        states: dict[int, Weights] = {}
        with make_engine(ranks, models[ranks.rank], config, world) as engine:
            last = engine.global_steps + 1 if steps is None else steps
            while True:
                masters = engine.state_dict(master=True)
                states[engine.global_steps] = {n: v.clone() for n, v in masters.items()}
                if engine.global_steps >= last:
                    return states
                number = engine.global_steps * COUNT + ranks.rank
                engine.backward(engine(batch(number + shift)))
                engine.step()
                if promise is not None and ranks.rank == 0:
                    promise(f"step {engine.global_steps}")

    return on_ranks(COUNT, work)[0]


@dataclass
class Expected:
    tree: RecordedTree  # of the first history
    fork: Path  # the end of the second one
    states: list[dict[int, Weights]]  # of each history


@pytest.fixture(scope="module")
def expected(in_memory: Path) -> Expected:
    world, fork = in_memory / "world", in_memory / "fork"
    world.mkdir()
    committed = resume_and_train(world, 1)
    shutil.copytree(world, fork)
    tree = RecordedTree(world)
    with tree.recording():
        first = resume_and_train(world, STEPS, promise=tree.mark)
    shutil.rmtree(world)
    fork.rename(world)  # runs store absolute paths
    second = resume_and_train(world, STEPS, shift=50)
    world.rename(fork)
    tree.left(len(tree.log), world, None)
    first |= resume_and_train(world)  # the moments affect the weights one step later
    shutil.rmtree(world)
    return Expected(tree, fork, [committed | first, committed | second])


def directory_of(world: Path, rank: int) -> Path:
    (found,) = (world / f"rank-{rank}").glob("infinity-run-*")
    return found


def replace_some(world: Path, rng: random.Random, expected: Expected) -> list[str]:
    """Replace some files by those of another time, history or rank; return which."""
    source = rng.choice(("time", "history", "rank", "rank's directory"))
    rank = rng.randrange(COUNT)
    source_world, source_rank = world.with_name("elsewhere"), rank
    if source == "time":
        cut = rng.randint(expected.tree.num_safe, len(expected.tree.log))
        expected.tree.left(cut, source_world, None)
    elif source == "history":
        shutil.copytree(expected.fork, source_world)
    else:
        shutil.copytree(world, source_world)
        source_rank = 1 - rank
    files = rng.sample(FILES, rng.choice((1, 2, 2, 3)))
    if source == "rank's directory" or rng.random() < 0.2:
        shutil.rmtree(directory_of(world, rank))
        source_path = directory_of(source_world, source_rank)
        shutil.copytree(source_path, world / f"rank-{rank}" / source_path.name)
        files = ["all"]
    else:
        for name in files:
            source_path = directory_of(source_world, source_rank) / name
            shutil.copyfile(source_path, directory_of(world, rank) / name)
    shutil.rmtree(source_world)
    return [source, f"rank {rank}", *files]


def simulate_failure(seed: int, expected: Expected) -> str:
    rng, tree = random.Random(seed), expected.tree
    world, replaced = tree.root, []
    cut = rng.randint(tree.num_safe, len(tree.log))
    tree.left(cut, world, rng if rng.random() < 0.5 else None)
    promised = max((int(mark.split()[1]) for mark in tree.marks(cut)), default=1)
    try:
        if rng.random() < 0.7:
            replaced = replace_some(world, rng, expected)
        return check(world, promised, replaced, expected)
    except Exception as error:
        command = f"INFINITY_SEED={seed} python -m pytest {Path(__file__).name} -k replay"
        raise AssertionError(f"seed {seed}, replaced {replaced}: {error}; {command}") from error
    finally:
        shutil.rmtree(world)


def check(world: Path, promised: int, replaced: list[str], expected: Expected) -> str:
    try:
        states = resume_and_train(world)
        found = min(states)
        # A step is committed once `step()` of the next one, or close(), has returned.
        assert found >= (1 if replaced else max(1, promised - 1)), (found, promised)
        matching_histories = [
            n
            for n, steps in enumerate(expected.states)
            if found in steps and equal(states[found], steps[found])
        ]
        assert matching_histories, f"wrong weights after update {found}"
        if (
            0 in matching_histories
        ):  # resume_and_train() trained with the batches of the first history
            later = expected.states[0][found + 1]
            assert equal(states[found + 1], later), "wrong weights one step later"
    except InfinityError:
        if not replaced:
            raise
        return "refused"
    with DurableReader(directory_of(world, 0)) as reader:
        problems = list(reader.verify())
    assert not problems, problems
    return "exact"


def equal(one: Weights, other: Weights) -> bool:
    return all(torch.equal(value, other[name]) for name, value in one.items())


def simulate_seeds(seeds: range, expected: Expected) -> Counter[str]:
    return many(seeds, lambda seed: simulate_failure(seed, expected))


@pytest.mark.filterwarnings("ignore::infinity.errors.InfinityWarning")
def test_crashed_ranks_resume_exactly_or_are_refused(expected: Expected) -> None:
    assert simulate_seeds(range(QUICK), expected).keys() == {"exact", "refused"}


@pytest.mark.big
@pytest.mark.timeout(7200)
@pytest.mark.filterwarnings("ignore::infinity.errors.InfinityWarning")
@pytest.mark.parametrize("first", range(QUICK, 10_000 + QUICK, 1000))
def test_crashed_ranks_resume_exactly_or_are_refused_many_seeds(
    expected: Expected, first: int, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = simulate_seeds(range(first, first + 1000), expected)
    with capsys.disabled():
        print(f"\n{first}: {dict(seen)}")


@pytest.mark.skipif("INFINITY_SEED" not in os.environ, reason="INFINITY_SEED names one")
def test_replay(expected: Expected) -> None:
    simulate_failure(int(os.environ["INFINITY_SEED"]), expected)
