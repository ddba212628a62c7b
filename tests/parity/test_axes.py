"""Every axis of placement and of computation: one at a time, in pairs, and by seeded sample.

Each run is compared with plain torch's forward and backward under the update rule written out,
which knows nothing of placement: equal to the last bit.
"""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
from support.models import CASES, CHECKPOINTINGS
from support.trainer import (
    TIERS,
    Result,
    make_config,
    make_device,
    train,
    train_exactly,
)

from infinity import _adam, _aio

STEPS = 10
TIGHT = 0.5  # below the gradient norm of most steps: it acts
Choice = dict[str, Any]


def backends() -> list[str]:
    """The I/O back ends that work here."""
    found = ["threads"]
    try:
        _aio.Engine(backend="io_uring").close()
        found.append("io_uring")
    except OSError:
        pass
    return found


AXES: dict[str, list[Any]] = {
    "model": list(CASES),
    "precision": ["bf16", "fp32"],
    "micro_batches": [1, 3],
    "clipping": [TIGHT, 0.0],
    "checkpointing": list(CHECKPOINTINGS),
    "device": ["fake", "cpu"],
    "weights": TIERS,
    "moments": TIERS,
    "gradients": TIERS,
    "look_ahead": [1, 0, 3],
    "backend": backends(),
    "isa": _adam.isas(),
    "chunk_size": [2048, 4096, "auto"],
    "adam_threads": [1, 2],
    "optimizer": ["AdamW", "Adam"],
    "format": ["fp32", "8bit", "bf16_stochastic"],
}
BASE: Choice = {name: values[0] for name, values in AXES.items()} | {
    "weights": "disk",
    "moments": "disk",
    "gradients": "disk",
}


def config_of(choice: Choice) -> dict[str, Any]:
    return make_config(
        (choice["weights"], choice["moments"], choice["gradients"]),
        precision=choice["precision"],
        gradient_accumulation_steps=choice["micro_batches"],
        gradient_clipping=choice["clipping"],
        look_ahead=choice["look_ahead"],
        chunk_size=choice["chunk_size"],
        io={"backend": choice["backend"]},
        cpu={"isa": choice["isa"], "num_threads": choice["adam_threads"]},
        optimizer={"type": choice["optimizer"], "moments": choice["format"]},
    )


def plain(choice: Choice) -> Result:
    """The computation without an engine."""
    case = CASES[choice["model"]]
    batches = case.batches(STEPS * choice["micro_batches"])
    model = case.build(choice["checkpointing"])
    return train_exactly(model, batches, config_of(choice), groups=case.groups)


def check(choice: Choice, seed: int = 0, expected: Result | None = None) -> list[str]:
    """Train as chosen; what differs from the plain computation."""
    case = CASES[choice["model"]]
    expected = expected or plain(choice)
    if choice["clipping"] and max(expected.norms) <= choice["clipping"]:
        return ["clipping never acted"]
    run = train(
        case.build(choice["checkpointing"]),
        case.batches(STEPS * choice["micro_batches"]),
        config_of(choice),
        device=make_device(choice["device"], seed),
        groups=case.groups,
    )
    assert run.plan is not None
    if choice["chunk_size"] == 2048 and max(u.num_chunks(2048) for u in run.plan.units) < 2:
        return ["no unit has two chunks: the chunk axis tests nothing"]
    return run.differences(expected)


ONE_AT_A_TIME = [(axis, v) for axis, values in AXES.items() for v in values if v != BASE[axis]]


@pytest.mark.parametrize(("axis", "value"), ONE_AT_A_TIME, ids=str)
def test_one_axis_at_a_time(axis: str, value: Any) -> None:
    assert check(BASE | {axis: value}) == []


def test_the_base() -> None:
    assert check(BASE) == []


def pairwise(seed: int = 0) -> list[Choice]:
    """Choices in which every pair of values of two axes occurs: greedy, the best of a few."""
    chance = random.Random(seed)
    missing = {
        frozenset([(one, repr(a)), (other, repr(b))])
        for one, other in itertools.combinations(AXES, 2)
        for a in AXES[one]
        for b in AXES[other]
    }
    rows: list[Choice] = []
    while missing:
        needed = dict(min(sorted(sorted(pair) for pair in missing)))
        best: Choice = {}
        best_covered: set[frozenset[tuple[str, str]]] = set()
        for _ in range(30):
            row = {
                axis: next(v for v in values if repr(v) == needed[axis])
                if axis in needed
                else chance.choice(values)
                for axis, values in AXES.items()
            }
            covered = pairs_of(row) & missing
            if len(covered) > len(best_covered):
                best, best_covered = row, covered
        rows.append(best)
        missing -= best_covered
    return rows


def pairs_of(row: Choice) -> set[frozenset[tuple[str, str]]]:
    named = [(axis, repr(value)) for axis, value in row.items()]
    return {frozenset(pair) for pair in itertools.combinations(named, 2)}


GROUPS = 8


@pytest.mark.parametrize("group", range(GROUPS))
def test_pairs_of_axes(group: int) -> None:
    rows = pairwise()[group::GROUPS]
    problems = {str(row): found for i, row in enumerate(rows) if (found := check(row, i))}
    assert problems == {}


@pytest.mark.parametrize("group", range(GROUPS))
def test_random_sample(group: int) -> None:
    chance = random.Random(20260 + group)
    rows = [{axis: chance.choice(values) for axis, values in AXES.items()} for _ in range(3)]
    problems = {str(row): found for i, row in enumerate(rows) if (found := check(row, i))}
    assert problems == {}


# The product of all axes would be months of runs. Here the product of what changes code paths is
# whole, and every other axis is drawn anew for each of the 6480 runs.
COMPUTATION = ("model", "precision", "micro_batches", "checkpointing")
PLACEMENT = ("device", "weights", "moments", "gradients")


@pytest.mark.big
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "computation",
    list(itertools.product(*(AXES[axis] for axis in COMPUTATION))),
    ids=lambda values: "-".join(map(str, values)),
)
def test_full_product(computation: tuple[Any, ...]) -> None:
    chance = random.Random(repr(computation))
    fixed = dict(zip(COMPUTATION, computation, strict=True))
    fixed |= {axis: chance.choice(AXES[axis]) for axis in ("clipping", "optimizer", "format")}
    expected = plain(BASE | fixed)
    problems = {}
    for number, placement in enumerate(itertools.product(*(AXES[axis] for axis in PLACEMENT))):
        row = {axis: chance.choice(options) for axis, options in AXES.items()} | fixed
        row |= dict(zip(PLACEMENT, placement, strict=True))
        if found := check(row, number, expected):
            problems[str(row)] = found
    assert problems == {}
