"""Tests of adapted torch optimizers on several ranks, bit for bit against plain torch.

An elementwise optimizer gets the slices of parameters in a rank's shard; one that needs full
parameters gets those assigned to the rank. `tests/parity/test_axes.py` combines both with all other
axes, but its models have no parameter that is split between shards.
"""

from __future__ import annotations

import random
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.fp16_reference import LossScaleSettings, train_half
from support.models import Batch
from support.optimizers import ELEMENTWISE, WHOLE, Maker, SignedMomentum
from support.ranks import make_engine, on_ranks, together, train_ranks, train_with_rank_counts
from support.trainer import make_config, make_device, same_bits, train_reference
from torch import Tensor, nn, optim

from infinity.distributed.context import DistContext
from infinity.errors import ConfigError
from infinity.plan.layout import (
    BF16,
    SQUARE_BLOCK,
    ParameterFacts,
    UnitLayout,
    lay_out,
    padding_notes,
)
from infinity.types import round_up

ON_DISK = ("disk", "disk", "disk")
IN_RAM = ("device", "device", "device")
MAKERS = ELEMENTWISE | WHOLE
WIDTH = 100


class SplitBlock(nn.Module):
    """Block of matrices of 3 and 10 blocks of the norm's tree, which shards split, and vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.gate = nn.Linear(WIDTH, WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).tanh()) * self.gate(x).sigmoid()


class SplitModel(nn.Module):
    """Model of such blocks, and of a scalar parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Embedding(60, WIDTH)
        self.blocks = nn.ModuleList(SplitBlock() for _ in range(2))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return (x * self.scale).float().square().mean()


def build(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return SplitModel()


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Return two groups: vectors have a separate learning rate."""
    vectors = [p for p in model.parameters() if p.dim() < 2]
    return [{"params": [p for p in model.parameters() if p.dim() > 1]},
            {"params": vectors, "lr": 3e-3}]  # fmt: skip


def batches_of(count: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    return [Batch((torch.randint(60, (7,), generator=generator),)) for _ in range(count)]


def config_of(placement: tuple[str, str, str], micro_batches: int = 1, **overrides: Any) -> Any:
    config = make_config(placement, gradient_accumulation_steps=micro_batches, **overrides)
    del config["optimizer"]
    return config


CHOICES = [
    ("NAdam", 2, ON_DISK, "bf16", "fake"),
    ("RMSprop", 3, IN_RAM, "fp32", "cpu"),
    ("ASGD", 2, ("host", "disk", "device"), "fp16", "fake"),
    ("Adagrad", 3, ("disk", "host", "host"), "bf16", "cpu"),  # its constructor creates state
    ("own", 3, ON_DISK, "fp32", "fake"),
    pytest.param("Adafactor", 2, ON_DISK, "bf16", "cpu", marks=pytest.mark.big),
    ("Adafactor", 3, ("device", "host", "disk"), "fp32", "fake"),
    pytest.param("TrustRatio", 3, ON_DISK, "fp32", "cpu", marks=pytest.mark.big),
    ("TrustRatio", 2, IN_RAM, "bf16", "fake"),
]


@pytest.mark.parametrize(("name", "count", "placement", "precision", "device"), CHOICES)
def test_torch_optimizers_match_plain_torch_bitwise(
    name: str, count: int, placement: tuple[str, str, str], precision: str, device: str
) -> None:
    half = precision == "fp16"
    settings = {"precision": precision} | ({"loss_scale": {"value": 1024.0}} if half else {})
    batches = batches_of(2 * 2 * count)
    one = config_of(placement, 2 * count, **settings)
    found = train_ranks(
        count, build, batches, config_of(placement, 2, **settings), groups=groups_of,
        device=partial(make_device, device), optimizer=MAKERS[name],
    )  # fmt: skip
    plain = (
        partial(train_half, scale_settings=LossScaleSettings(static=1024.0))
        if half
        else train_reference
    )
    expected = plain(build(), batches, one, groups=groups_of, make_optimizer=MAKERS[name])
    assert found.differences(expected) == []
    assert found.plan is not None
    assert found.unforecast_moves() == []
    split = [s for unit in found.plan.units for s in unit.trained_segments if is_split(unit, s)]
    assert bool(split) == (name in ELEMENTWISE), "the model must (not) have split parameters"


def is_split(unit: UnitLayout, segment: Any) -> bool:
    first, last = (n // unit.shard_numel for n in (segment.offset, end_of(segment) - 1))
    return first != last


def end_of(segment: Any) -> int:
    return int(segment.offset + segment.numel)


def test_adapted_muon_matches_plain_torch_bitwise() -> None:
    class Matrices(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x).tanh()
            return x.square().mean()

    def make() -> nn.Module:
        torch.manual_seed(3)
        return Matrices()

    generator = torch.Generator().manual_seed(1)
    batches = [Batch((torch.randn(3, WIDTH, generator=generator),)) for _ in range(8)]
    muon = partial(optim.Muon, lr=0.02)
    expected = train_reference(make(), batches, config_of(ON_DISK, 2), make_optimizer=muon)
    found = train_ranks(2, make, batches, config_of(ON_DISK), optimizer=muon)
    assert found.differences(expected) == []


# --- state other than moments --------------------------------------------------------------------


class LastValue(SignedMomentum):
    """Keeps a number per tile; that of a parameter's last shard counts, as on one rank."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["last"] = float(p.reshape(-1)[-1])


@pytest.mark.parametrize("name", ["NAdam", "Adafactor", "last"])
def test_read_state_returns_full_state_on_every_rank(name: str, tmp_path: Path) -> None:
    maker = LastValue if name == "last" else MAKERS[name]
    models = [build() for _ in range(4)]
    batches = batches_of(12)

    def work(ranks: DistContext) -> list[dict[str, Any]]:
        model, config = models.pop(), config_of(ON_DISK, 6 // ranks.count)
        with make_engine(
            ranks, model, config, tmp_path, groups=groups_of, optimizer=maker
        ) as engine:
            states = []
            for number, batch in enumerate(batches[ranks.rank :: ranks.count], 1):
                engine.backward(batch.call(engine))
                engine.step()
                if number * ranks.count % 6 == 0:
                    states += [engine.optimizer.read_state(p) for p in model.parameters()]
            return states

    (expected,) = on_ranks(1, work)
    for found in on_ranks(3, work):
        for actual, reference in zip(found, expected, strict=True):
            assert actual.keys() == reference.keys()
            for key, value in reference.items():
                assert same_bits(torch.as_tensor(actual[key]), torch.as_tensor(value)), key


@pytest.mark.parametrize(
    ("name", "placement"),
    [("own", ON_DISK), pytest.param("Adafactor", IN_RAM, marks=pytest.mark.big)],
)
def test_checkpoint_resumes_on_other_rank_counts(
    name: str, placement: tuple[str, str, str], tmp_path: Path
) -> None:
    counts, micro_batches, steps = (3, 1, 2), 6, 2
    batches = batches_of(micro_batches * steps * len(counts))
    one = config_of(placement, micro_batches, precision="bf16")
    expected = train_reference(build(), batches, one, groups=groups_of, make_optimizer=MAKERS[name])
    found = train_with_rank_counts(
        counts, build, batches,
        lambda _, count: config_of(placement, micro_batches // count, precision="bf16"),
        tmp_path, groups=groups_of, optimizer=MAKERS[name],
    )  # fmt: skip
    assert found.differences(expected) == []


# --- layouts -------------------------------------------------------------------------------------


def facts_of(sizes: list[int]) -> list[ParameterFacts]:
    return [
        ParameterFacts(str(i), i, (size,), "bfloat16", size, 2, True, 0)
        for i, size in enumerate(sizes)
    ]


def test_full_parameters_are_distributed_evenly_and_not_split() -> None:
    rng = random.Random(0)
    for case in range(200):
        ranks = rng.randint(2, 9)
        sizes = [rng.choice([1, 77, 5000, 40_000, 100_000]) for _ in range(rng.randint(1, 9))]
        unit = lay_out(case, "unit", facts_of(sizes), BF16, ranks=ranks, needs_full=True)
        assert sorted(s.parameter for s in unit.segments) == list(range(len(sizes)))
        assert not any(is_split(unit, s) for s in unit.segments)
        ends = [0, *(end_of(s) for s in unit.segments)]
        assert all(s.offset >= end for s, end in zip(unit.segments, ends, strict=False))
        assert all(s.offset % SQUARE_BLOCK == 0 for s in unit.segments)
        shards = [unit.of_shard(rank) for rank in range(ranks)]
        held = Counter(s.parameter for shard in shards for s in shard.segments)
        assert set(held.values()) == {1}
        # Within the bound of longest-first: 4/3 of the optimum, which is at least these.
        padded = [round_up(size, SQUARE_BLOCK) for size in sizes]
        assert unit.numel % (ranks * SQUARE_BLOCK) == 0
        assert unit.shard_numel <= 4 / 3 * max(max(padded), sum(padded) / ranks) + max(padded) / 3


def test_largest_shard_rotates_over_ranks() -> None:
    sizes = [3 * SQUARE_BLOCK, SQUARE_BLOCK, SQUARE_BLOCK]
    units = [lay_out(i, "u", facts_of(sizes), BF16, ranks=3, needs_full=True) for i in range(3)]
    most = [max(range(3), key=lambda r: u.of_shard(r).num_trained) for u in units]
    assert sorted(most) == [0, 1, 2]


def test_padding_note_reports_cost() -> None:
    block = lay_out(0, "block", facts_of([40_960] * 8), BF16, ranks=4, needs_full=True)
    alone = lay_out(1, "embed", facts_of([163_840]), BF16, ranks=4, needs_full=True)
    assert padding_notes([block], "Rule") == ()
    (note,) = padding_notes([block, alone], "Rule")
    assert "Rule needs full parameters, which are distributed over 4 ranks" in note
    assert "2.00 times their elements; most in unit 'embed', 4.00 times" in note


def test_plan_includes_padding_note(tmp_path: Path) -> None:
    models = [build() for _ in range(2)]

    def work(ranks: DistContext) -> str:
        model, config = models[ranks.rank], config_of(ON_DISK)
        options = {"groups": groups_of, "optimizer": optim.Adafactor}
        with make_engine(ranks, model, config, tmp_path, **options) as engine:
            return engine.plan.describe()

    for message in on_ranks(2, work):
        assert (
            "torch.optim.Adafactor needs full parameters, which are distributed over 2 ranks"
            in message
        )


# --- differences and errors ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (optim.RAdam, "name is 'torch.optim.NAdam' on rank 0, 'torch.optim.RAdam' on rank 1"),
        (partial(optim.NAdam, lr=3.0), "group 0.lr is 0.002 on rank 0, 3.0 on rank 1"),
    ],
)
def test_differing_optimizers_are_rejected(other: Maker, message: str, tmp_path: Path) -> None:
    models = [build() for _ in range(2)]

    def work(ranks: DistContext) -> None:
        maker = other if ranks.rank else optim.NAdam
        make_engine(ranks, models[ranks.rank], config_of(ON_DISK), tmp_path, optimizer=maker)

    results, errors = together(2, work)
    assert not results
    for error in errors.values():
        assert isinstance(error, ConfigError)
        assert f"ranks 0 and 1 differ in the optimizer: {message}" in str(error)


def test_optimizer_error_on_one_rank_ends_step_on_all(tmp_path: Path) -> None:
    models = [build() for _ in range(2)]
    failing = [False, False]

    class RaisesOnOneRank(SignedMomentum):
        def step(self, closure: Any = None) -> None:
            if failing[0] and self.param_groups[0]["params"][0].numel() == 4 * WIDTH:
                raise ValueError("a bad day")
            super().step()

    def work(ranks: DistContext) -> None:
        with make_engine(
            ranks, models[ranks.rank], config_of(IN_RAM), tmp_path, optimizer=RaisesOnOneRank
        ) as engine:
            for batch in batches_of(3):
                engine.backward(batch.call(engine))
                engine.step()
                failing[0] = True

    results, errors = together(2, work)
    assert not results
    messages = [str(error) for error in errors.values()]
    assert any("a bad day" in message for message in messages), messages
    assert all("a bad day" in message or "rank" in message for message in messages), messages
