"""Tests of pairs of all axes of placement and computation, by one covering array.

Each run is compared with plain torch's forward and backward under the explicit update rule, which
knows no placement: results must be bitwise equal, and the bytes moved must equal the forecast.
A new axis is a line in `AXES`.
"""

from __future__ import annotations

import itertools
import random
import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
from support.adam_values import SECTIONS
from support.fake_accelerator import FakeAccelerator
from support.fp16_reference import HalfResult, LossScaleSettings, train_half
from support.models import CASES, CHECKPOINTINGS, LENGTH, Batch, Checkpointing
from support.optimizers import ELEMENTWISE, WHOLE
from support.quantized import round_frozen
from support.ranks import train_ranks
from support.trainer import (
    TIERS,
    Result,
    Run,
    at_once,
    cpu_update_share,
    make_config,
    make_device,
    train_on,
    train_reference,
)

from infinity import _adam, _aio
from infinity.optim.moments import COMPUTE_DTYPES
from infinity.storage.device import Device

TIGHT = 0.5  # below the gradient norm of most steps, so that it takes effect
SCALE = LossScaleSettings(initial=2.0**16, window=2, hysteresis=2)  # the first steps overflow
OptimizerChoice = dict[str, Any]
NONE = CHECKPOINTINGS[0]
RECOMPUTED = Checkpointing("non_reentrant", "block")  # the engine's own, in plain torch
OFFLOADED = {"checkpoint": "units", "tokens": 2 * LENGTH, "min_bytes": 1}
# By name: the model's own checkpointing, and the engine's `activations` section.
RECOMPUTE: dict[str, tuple[Checkpointing, dict[str, Any]]] = {
    **{str(checkpointing): (checkpointing, {}) for checkpointing in CHECKPOINTINGS},
    "units": (NONE, {"checkpoint": "units"}),
    "first": (NONE, {"checkpoint": 1}),
    "first-disk": (NONE, {**OFFLOADED, "checkpoint": 1, "offload": "disk"}),
    "units-host": (NONE, {**OFFLOADED, "offload": "host"}),
    "units-disk": (NONE, {**OFFLOADED, "offload": "disk"}),
}
OPTIMIZERS = {**SECTIONS, "uphill": {"type": "Adam", "maximize": True}}
# Run by torch: an elementwise optimizer, and one that needs full parameters.
ADAPTED = {name: (ELEMENTWISE | WHOLE)[name] for name in ("NAdam", "TrustRatio")}


def backends() -> list[str]:
    """Return the I/O back ends that this machine supports."""
    found = ["threads"]
    try:
        _aio.Engine(backend="io_uring").close()
        found.append("io_uring")
    except OSError:
        pass
    return found


AXES: dict[str, list[Any]] = {
    "model": list(CASES),
    "precision": ["bf16", "fp32", "fp16"],
    "micro_batches": [1, 2],
    "clipping": [TIGHT, 0.0],
    "recompute": list(RECOMPUTE),
    "slices": [1, 2],
    "optimizer": [*OPTIMIZERS, *ADAPTED],
    "format": ["fp32", "8bit", "bf16", "bf16_stochastic"],
    "frozen": ["as_is", "nf4"],
    "device": ["fake", "kernels", "cpu"],
    "update": ["cpu", "device", "both"],  # "both": some chunks by the CPU
    "weights": TIERS,
    "moments": TIERS,
    "gradients": TIERS,
    "prefetch_units": [1, 0, 3],
    "experts": ["auto", 1, 3, 7],  # per unit, of 7; "auto": in the unit of their layer
    "chunk_size": [2048, 4096, "auto", "several"],  # "several": 2048, and several chunks per batch
    "backend": backends(),
    "isa": _adam.isas(),
    "adam_threads": [1, 2],
    "verify": [False, True],
    "resume": [False, True],  # halfway, in another engine with another placement
    "ranks": [1, 2, 3],  # each with `micro_batches` micro-batches
    "whole": [False, True],  # keep weights unsharded between forward and backward
    "shared": [False, True],  # share host memory among the ranks of a node
    "nodes": [1, 2],  # number of nodes
}
RANK_COUNTS = [2, 3, 4]  # tests/ranks/test_array.py covers all of them
# The axes that results depend on; all others are placement.
COMPUTATION = ("model", "precision", "micro_batches", "clipping", "recompute", "slices",
               "optimizer", "format", "frozen", "ranks")  # fmt: skip
PLACEMENT = ("device", "weights", "moments", "gradients")
COSTLY = ("ranks", "micro_batches")
BASE: OptimizerChoice = {name: values[0] for name, values in AXES.items()} | {
    "weights": "disk",
    "optimizer_state": "disk",
    "gradients": "disk",
}
# Experts are chosen for the full batch, outside the block that would be sliced.
# The second: gradients of each slice arrive separately, as its checkpoint runs a backward. The
# third: the engine sums a block's calls first, plain torch adds each gradient as it arrives.
IMPOSSIBLE = [
    {"model": "routed", "slices": 2},
    {"recompute": "reentrant-inside", "slices": 2},
    {"model": "reused", "slices": 2, "micro_batches": 2},
]
# The other models have no frozen parameters.
IMPOSSIBLE += [{"model": name, "frozen": "nf4"} for name in CASES if name != "frozen"]
# All ranks must use the same units, but routing depends on data; buffers see the data of one rank;
# and a gradient that arrives twice in a backward is added in another order.
IMPOSSIBLE += [
    {**counts, **excluded}
    for counts in (*({"ranks": ranks} for ranks in RANK_COUNTS), {"nodes": 2})
    for excluded in (
        {"model": "routed"},
        {"model": "buffered"},
        {"model": "reused", "slices": 2},  # as with two micro-batches
        *({"model": "reused", "recompute": name} for name in RECOMPUTE if "reentrant" in name),
    )
]


IMPOSSIBLE += [{"ranks": ranks, "nodes": 2} for ranks in (1, 3)]
# Only "stacked" has expert stacks, and none of its parameters are frozen.
for count in AXES["experts"][1:]:
    IMPOSSIBLE += [{"model": name, "experts": count} for name in CASES if name != "stacked"]
    IMPOSSIBLE += [{"frozen": "nf4", "experts": count}]
# Optimizers whose operations torch runs keep fp32 state.
IMPOSSIBLE += [
    {"optimizer": name, "format": form}
    for name in (*ADAPTED, "Muon")
    for form in AXES["format"][1:]
]


def possible(row: OptimizerChoice) -> bool:
    return not any(excluded.items() <= row.items() for excluded in IMPOSSIBLE)


def batches_of(choice: OptimizerChoice) -> list[Batch]:
    """Return the batches of three steps, or of four in fp16, where the first steps overflow."""
    steps = 4 if choice["precision"] == "fp16" else 3
    per_step = choice["micro_batches"] * choice["ranks"]
    return CASES[choice["model"]].batches(steps * per_step)


def config_of(choice: OptimizerChoice) -> dict[str, Any]:
    activations = RECOMPUTE[choice["recompute"]][1] | {"slices": choice["slices"]}
    config = make_config(
        (choice["weights"], choice["moments"], choice["gradients"]),
        precision=choice["precision"],
        gradient_accumulation_steps=choice["micro_batches"],
        gradient_clipping=choice["clipping"],
        activations=activations,
        update=choice["update"].replace("both", "device"),
        prefetch_units=choice["prefetch_units"],
        experts_per_unit=choice["experts"],
        chunk_size="auto" if choice["chunk_size"] == "several" else choice["chunk_size"],
        io={"backend": choice["backend"], "verify": choice["verify"]},
        cpu={"isa": choice["isa"], "num_threads": choice["adam_threads"]},
        seed=5,
    )
    config["frozen"] = {"format": choice["frozen"]}
    config["placement"] |= {
        "reshard_after_forward": not choice["whole"],
        "shared": choice["shared"],
    }
    if choice["optimizer"] in ADAPTED:
        del config["optimizer"]
    else:
        common = {"weight_decay": 0.01, "lr": 1e-2, "moments": choice["format"]}
        config["optimizer"] = common | OPTIMIZERS[choice["optimizer"]]
    if choice["precision"] == "fp16":
        config["loss_scale"] = {"initial_power": 16, "window": 2, "hysteresis": 2}
    return config


def plain(choice: OptimizerChoice) -> Result:
    """Return the result of the computation without an engine."""
    return _plain(tuple(choice[axis] for axis in COMPUTATION))


@cache
def _plain(computation: tuple[Any, ...]) -> Result:
    choice = BASE | dict(zip(COMPUTATION, computation, strict=True))
    case = CASES[choice["model"]]
    checkpointing, activations = RECOMPUTE[choice["recompute"]]
    if (
        activations or checkpointing == NONE or checkpointing.place == "inside"
    ):  # else the model's own block checkpoints are used as they are
        checkpointing = replace(
            RECOMPUTED if activations else checkpointing, slices=choice["slices"]
        )
    batches, per_step = batches_of(choice), choice["micro_batches"] * choice["ranks"]
    config = config_of(choice | {"micro_batches": per_step})
    config["activations"] = {"slices": choice["slices"]}  # their gradients are summed in fp32
    model = case.build(checkpointing)
    if choice["frozen"] != "as_is":
        round_frozen(model, choice["frozen"], COMPUTE_DTYPES[choice["precision"]])
    options = {"groups": case.groups, "make_optimizer": ADAPTED.get(choice["optimizer"])}
    if choice["precision"] == "fp16":
        return train_half(model, batches, config, SCALE, **options)
    return train_reference(model, batches, config, **options)


def device_of(choice: OptimizerChoice, seed: int) -> Device | str:
    if choice["device"] == "kernels":
        return FakeAccelerator(seed, max_delay_s=0.001, kernels=True)
    return make_device(choice["device"], seed)


class TrainingRun:
    """One engine, or two, the second of which resumes from a checkpoint of the first."""

    def __init__(self, choice: OptimizerChoice, seed: int) -> None:
        self.choice, self.seed = choice, seed
        self.case = CASES[choice["model"]]
        self.losses: list[float] = []
        self.norms: list[float] = []

    def run(self) -> Result:
        batches, ranks = batches_of(self.choice), self.choice["ranks"]
        if not self.choice["resume"]:
            return self._run_part(self.choice, batches)
        half = len(batches) // ranks // 2
        cut = ranks * (half + (1 - half % 2) * (self.choice["micro_batches"] > 1))  # in a window
        next_tier = dict(zip(TIERS, (*TIERS[1:], TIERS[0]), strict=True))
        other_placement = {
            kind: next_tier[self.choice[kind]] for kind in ("weights", "moments", "gradients")
        }
        if self.choice["model"] == "stacked":
            sizes = AXES["experts"]
            other_placement["experts"] = sizes[sizes.index(self.choice["experts"]) - 1]
        with tempfile.TemporaryDirectory() as folder:
            self._run_part(self.choice, batches[:cut], save=Path(folder))
            return self._run_part(self.choice | other_placement, batches[cut:], load=Path(folder))

    def _run_part(
        self,
        choice: OptimizerChoice,
        batches: Sequence[Batch],
        *,
        save: Path | None = None,
        load: Path | None = None,
    ) -> Result:
        checkpointing, _ = RECOMPUTE[choice["recompute"]]
        seed, config = int(load is not None), config_of(choice)
        options: dict[str, Any] = {"groups": self.case.groups}
        if choice["optimizer"] in ADAPTED:
            options["optimizer"] = ADAPTED[choice["optimizer"]]
        if load is not None:
            config["seed"] = 99  # the seed of stochastic rounding is restored from the checkpoint
        if choice["ranks"] > 1:
            result = train_ranks(
                choice["ranks"], partial(self.case.build, checkpointing, seed=seed),
                batches, config,
                device=lambda rank: device_of(choice, self.seed + rank),
                load=load, save=save, nodes=choice["nodes"], **options,
            )  # fmt: skip
        else:
            model, device = self.case.build(checkpointing, seed=seed), device_of(choice, self.seed)
            with Run(model, config, device=device, **options) as run:
                result = train_on(run.engine, batches, load=load, save=save)
        self.losses += result.losses
        self.norms += result.norms
        return replace(result, losses=self.losses, norms=self.norms)


def is_steady(choice: OptimizerChoice, expected: Result) -> bool:
    """Return True if the last step moves as many bytes as every other step."""
    if isinstance(expected, HalfResult) and any(expected.overflows[-2:]):
        return False  # a skipped step publishes no weights, so the next one fetches none again
    # An engine's first micro-batch probes slices of each block, which pass ranges of experts each;
    # of two steps the second follows the access order learned from that.
    if choice["model"] == "stacked" and choice["slices"] > 1 and choice["resume"]:
        return False
    # A reentrant checkpoint runs a separate backward per call: gradients leave in several parts.
    return choice["model"] != "reused" or not choice["recompute"].startswith("reentrant")


def check(choice: OptimizerChoice, seed: int = 0) -> list[str]:
    """Train as chosen; return the differences from the plain computation and the forecast."""
    expected = plain(choice)
    if choice["clipping"] and max(expected.norms) <= choice["clipping"]:
        return ["clipping never acted"]
    if isinstance(expected, HalfResult) and all(expected.overflows):
        return ["no step was without an overflow"]
    several = choice["chunk_size"] == "several"
    with (
        cpu_update_share(0.4 if choice["update"] == "both" else 0.0),
        at_once(3) if several else nullcontext(),
    ):
        run = TrainingRun(choice, seed).run()
    assert run.plan is not None
    assert run.report is not None
    has_paired_units = any(u.paired is not None for u in run.plan.units)
    small = choice["chunk_size"] in (2048, "several") and not (
        run.plan.rule.needs_full or has_paired_units
    )
    if small and max(u.num_chunks(2048) for u in run.plan.units) < 2:
        return ["no unit has two chunks: the chunk axis tests nothing"]
    found = run.differences(expected)
    if isinstance(expected, HalfResult) and run.report.loss_scale != expected.scales[-1]:
        found.append(f"loss scale {run.report.loss_scale} instead of {expected.scales[-1]}")
    if CASES[choice["model"]].regular and is_steady(choice, expected):
        found += run.unforecast_moves()
        if run.report.mispredictions:
            found.append(f"{run.report.mispredictions} mispredictions in the last step")
        checkpointing, _ = RECOMPUTE[choice["recompute"]]
        planned = run.plan.predicted_bytes  # before any step
        if choice["model"] == "stacked" and checkpointing == NONE and run.report.moved != planned:
            found.append(f"moved {run.report.moved}, planned {planned}")
    return found


def test_base_configuration_matches_plain_torch() -> None:
    assert check(BASE) == []


@cache
def pairwise(**fixed: Any) -> list[OptimizerChoice]:
    """Return rows that cover every pair of values of two axes that is possible with `fixed`.

    Greedy: choose the best of a few candidates, each of which starts with an uncovered pair and is
    filled axis by axis with the value that covers the most uncovered pairs.
    """
    rng = random.Random(0)
    missing = {
        frozenset([(one, repr(a)), (other, repr(b))])
        for one, other in itertools.combinations(AXES.keys() - fixed.keys(), 2)
        for a in AXES[one]
        for b in AXES[other]
        if possible(fixed | {one: a, other: b})
    }
    rows: list[OptimizerChoice] = []
    while missing:
        wanted = Counter(value for pair in missing for value in pair)
        starts = sorted((sum(wanted[v] for v in pair), sorted(pair)) for pair in missing)[-20:]
        found = [fill_row(fixed, rng.choice(starts)[1], missing, rng) for _ in range(5)]
        rows.append(max((r for r in found if r), key=lambda row: len(pairs_of(row) & missing)))
        missing -= pairs_of(rows[-1])
    return rows


def fill_row(
    fixed: OptimizerChoice, pair: list[tuple[str, str]], missing: set[Any], rng: random.Random
) -> OptimizerChoice:
    """Return a row with these values, or {} if there is none; prefer cheap values on a tie."""
    row = fixed | {
        axis: next(v for v in AXES[axis] if repr(v) == value_repr) for axis, value_repr in pair
    }

    def score(axis: str, value: Any) -> tuple[int, int, float]:
        one = axis, repr(value)
        new = sum(frozenset([one, (a, repr(v))]) in missing for a, v in row.items())
        return new, -value if axis in COSTLY else 0, rng.random()

    for axis in rng.sample(sorted(AXES.keys() - row.keys()), len(AXES) - len(row)):
        fitting = [value for value in AXES[axis] if possible(row | {axis: value})]
        if not fitting:
            return {}
        row[axis] = max(fitting, key=partial(score, axis))
    return {axis: row[axis] for axis in AXES}


def pairs_of(row: OptimizerChoice) -> set[frozenset[tuple[str, str]]]:
    named = [(axis, repr(value)) for axis, value in row.items()]
    return {frozenset(pair) for pair in itertools.combinations(named, 2)}


GROUPS = 8


@pytest.mark.parametrize("group", range(GROUPS))
def test_axis_pairs_match_plain_torch(group: int) -> None:
    rows = pairwise()[group::GROUPS]
    problems = {str(row): found for i, row in enumerate(rows) if (found := check(row, i))}
    assert problems == {}


# The product of all axes would take months. This takes the full product of the axes that change
# code paths, and draws a value of every other axis for each run.
@pytest.mark.big
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("micro_batches", AXES["micro_batches"])
@pytest.mark.parametrize("precision", AXES["precision"])
@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("model", CASES)
def test_axis_product_matches_plain_torch(
    model: str, recompute: str, precision: str, micro_batches: int
) -> None:
    fixed = {"model": model, "recompute": recompute, "precision": precision}
    fixed["micro_batches"] = micro_batches
    rng = random.Random(repr(fixed))
    left = [axis for axis in COMPUTATION if axis not in fixed]
    drawn = ({axis: rng.choice(AXES[axis]) for axis in left} for _ in itertools.count())
    fixed = next(row for row in (fixed | one for one in drawn) if possible(row))
    problems = {}
    for number, placement in enumerate(itertools.product(*(AXES[axis] for axis in PLACEMENT))):
        row = {axis: rng.choice(options) for axis, options in AXES.items()} | fixed
        row |= dict(zip(PLACEMENT, placement, strict=True))
        if found := check(row, number):
            problems[str(row)] = found
    assert problems == {}
