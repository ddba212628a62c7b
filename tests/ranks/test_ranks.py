"""Tests that N ranks compute what one rank computes with N times the micro-batches, bit for bit.

Ranks are threads (`support/ranks.py`), so no processes are needed. Placement, recomputation,
formats and rules are tested in pairs in `tests/parity/test_axes.py`, on 1, 2 and 3 ranks.
"""

from __future__ import annotations

import itertools
import os
import re
import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.internals import components
from support.models import CASES, Batch, Gpt
from support.ranks import (
    ThreadRanks,
    make_engine,
    on_ranks,
    together,
    train_ranks,
    train_with_rank_counts,
)
from support.trainer import make_config, make_device, same_bits, train_reference
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import infinity
from infinity import _initialize
from infinity.config.schema import Config, load_config
from infinity.distributed.context import SINGLE_PROCESS, DistContext
from infinity.engine import Engine
from infinity.errors import CheckpointError, InfinityError, TrainingError
from infinity.integrations.deepspeed import zero
from infinity.model.meta_init import InitialValues
from infinity.offload.exchange import NormTree
from infinity.optim.cpu import CpuKernels
from infinity.plan.budget import Limits
from infinity.plan.layout import FP32, ParameterFacts, lay_out
from infinity.plan.plan import Plan
from infinity.storage.device import CpuDevice
from infinity.training import run_plan
from infinity.training.run_plan import limits_for

ON_DISK = ("disk", "disk", "disk")
IN_RAM = ("device", "device", "device")
GPT = CASES["gpt"]


def with_micro_batches(config: dict[str, Any], count: int) -> dict[str, Any]:
    return {**config, "gradient_accumulation_steps": count}


@pytest.mark.parametrize(
    ("count", "micro_batches", "placement", "device"),
    [(2, 2, ON_DISK, "fake"), (4, 1, ("host", "disk", "device"), "cpu"), (3, 2, IN_RAM, "fake")],
)
def test_ranks_match_single_rank_bitwise(
    count: int, micro_batches: int, placement: tuple[str, str, str], device: str
) -> None:
    config = make_config(placement, precision="bf16")
    batches = GPT.batches(3 * count * micro_batches)
    one = with_micro_batches(config, count * micro_batches)
    expected = train_reference(GPT.build(), batches, one, groups=GPT.groups)
    found = train_ranks(
        count, GPT.build, batches, with_micro_batches(config, micro_batches), groups=GPT.groups,
        device=partial(make_device, device),
    )  # fmt: skip
    assert found.differences(expected) == []


def test_each_rank_stores_one_shard(tmp_path: Path) -> None:
    count = 4
    config = make_config(("disk", "host", "host"), precision="bf16")
    models = [GPT.build() for _ in range(count)]

    def work(ranks: DistContext) -> tuple[int, int, int, int]:
        with make_engine(ranks, models[ranks.rank], config, tmp_path) as engine:
            store, plan = components(engine).store, engine.plan
            in_ram = sum(place.nbytes for unit in store.units for place in unit.memory.values())
            on_disk = sum(e.nbytes for unit in store.units for copy in unit.copies for e in copy)
            sums = sum(place.nbytes for place in components(engine).gradients.ranges.values())
            assert in_ram == sum(tier["state"] for tier in plan.memory.values())
            elements = sum(unit.numel for unit in plan.units)
            assert plan.num_trained <= elements
            return in_ram, on_disk, sums, elements

    found = on_ranks(count, work)
    assert len(set(found)) == 1
    *stored, elements = found[0]
    assert stored == [nbytes * elements // count for nbytes in (10, 2, 4)]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("count", "micro_batches", "placement"), [(2, 1, IN_RAM), (2, 3, ON_DISK), (3, 2, IN_RAM)]
)
def test_communicated_bytes_match_plan(
    count: int, micro_batches: int, placement: tuple[str, str, str]
) -> None:
    config = with_micro_batches(make_config(placement, precision="bf16"), micro_batches)
    batches = GPT.batches(3 * count * micro_batches)
    found = train_ranks(count, GPT.build, batches, config, groups=GPT.groups)
    assert found.report is not None
    assert found.plan is not None
    moved, units = found.report.moved, found.plan.units
    assert moved == found.forecast == found.plan.predicted_bytes
    # Gradients are sent in bf16, as they are computed. Each rank gets its shard from every other.
    elements = sum(unit.numel for unit in units)
    assert moved["all_to_all"] == micro_batches * 2 * elements // count * (count - 1)
    blocks = (
        8
        * (count - 1)
        * max(map(sum, zip(*(unit.num_reported_squares for unit in units), strict=True)))
    )
    fetches = (moved["all_gather"] - blocks) * count // (count - 1) / (2 * elements)
    assert 1 <= fetches <= 2 * micro_batches, "per unit: a forward and a backward may share a fetch"


def test_counters_match_sent_bytes(tmp_path: Path) -> None:
    models, batches = [GPT.build() for _ in range(3)], GPT.batches(6)

    def work(ranks: DistContext) -> None:
        assert isinstance(ranks, ThreadRanks)
        with make_engine(ranks, models[ranks.rank], make_config(), tmp_path) as engine:
            for batch in batches[ranks.rank :: 3]:
                before, sent = engine.counters(), dict(ranks.sent)
                engine.backward(batch.call(engine))
                engine.step()
                sent_bytes = {name: n - sent.get(name, 0) for name, n in ranks.sent.items()}
                moved = {name: n - before[name] for name, n in engine.counters().items()}
                assert moved["all_to_all"] == sent_bytes["all_to_all"] * 2 // 3
                squares = moved["all_gather"] - 2 * sent_bytes["all_gather"]
                squares_per_unit = (unit.num_reported_squares for unit in engine.plan.units)
                assert squares == 8 * 2 * max(map(sum, zip(*squares_per_unit, strict=True)))
                assert squares < 2 * sent_bytes["gather"], "barriers use gather too, uncounted"

    on_ranks(3, work)


def test_each_rank_has_separate_directories_on_every_drive(tmp_path: Path) -> None:
    drives = [tmp_path / "one", tmp_path / "two"]
    for drive in drives:
        drive.mkdir()
    config = make_config(ON_DISK, precision="bf16")
    models, batches = [GPT.build() for _ in range(3)], GPT.batches(6)
    expected = train_reference(
        GPT.build(), batches, with_micro_batches(config, 3), groups=GPT.groups
    )
    config |= {"nvme_path": [str(drive) for drive in drives], "io": {"weights": [2, 1]}}

    def work(ranks: DistContext) -> Any:
        with make_engine(ranks, models[ranks.rank], config, tmp_path, groups=GPT.groups) as engine:
            for batch in batches[ranks.rank :: 3]:
                engine.backward(batch.call(engine))
                engine.step()
            rank_dirs = [drive / f"rank-{ranks.rank}" for drive in drives]
            assert all(len(list(path.iterdir())) == 1 for path in rank_dirs)
            two, one = (drive["nbytes"] for drive in engine.drives().values())
            assert 1.5 < two / one < 2.5
            return {n: v.clone() for n, v in engine.state_dict(master=True).items()}

    for found in on_ranks(3, work):
        assert all(same_bits(found[name], value) for name, value in expected.masters.items())
    assert [list(drive.iterdir()) for drive in drives] == [[], []]


def test_budgets_are_divided_among_local_ranks() -> None:
    model, device = GPT.build(), CpuDevice()
    config = load_config({"budget": {"host": "2GiB", "disk": "8GiB"}})
    ranks: Any = SimpleNamespace(local_count=4)
    single, shared = limits_for(config, device, model), limits_for(config, device, model, ranks)
    assert single.host is not None
    assert (shared.host, shared.disk) == (single.host // 4, 2 << 30)
    default = [limits_for(Config(), device, model, one).host for one in (SINGLE_PROCESS, ranks)]
    assert default[0] is not None
    assert default[1] == pytest.approx(default[0] / 4, rel=0.05)  # free RAM varies


def test_rank_uses_gpu_visible_through_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks: Any = SimpleNamespace(count=4, local_rank=3)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for visible, number in ((4, 3), (1, 0)):
        monkeypatch.setattr(torch.cuda, "device_count", lambda visible=visible: visible)
        assert _initialize.device_for(None, ranks) == torch.device("cuda", number)


@pytest.mark.parametrize(("masks", "sharing"), [([{0, 1}] * 3, [3] * 3),
                                                ([{0}, {1, 2}, {2, 3}], [1, 2, 2])])  # fmt: skip
def test_threads_follow_processor_affinity(
    masks: list[set[int]], sharing: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    affinity: dict[int, set[int]] = {}
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: affinity.get(threading.get_ident(), {0}))

    def work(ranks: DistContext) -> int:
        affinity[threading.get_ident()] = masks[ranks.rank]
        return ranks.num_sharing_processors()

    assert on_ranks(3, work) == sharing


def test_nodes_with_unequal_rank_counts() -> None:
    def work(ranks: DistContext) -> int:
        ranks.local_rank, ranks.local_count = ((0, 1), (0, 2), (1, 2))[ranks.rank]
        return ranks.num_sharing_processors()

    assert on_ranks(3, work) == [1, 2, 2]


def test_limits_are_minimum_over_ranks() -> None:
    """Each reads its memory at another moment, so what remains for activations differs too."""

    def work(ranks: DistContext) -> Limits:
        rank = ranks.rank
        return run_plan._strictest(Limits(None, 100 - rank, None, rank, rank, 10 * rank), ranks)

    assert on_ranks(3, work) == [Limits(None, 98, None, 2, 2, 20)] * 3


def test_grad_norm_is_independent_of_sharding() -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = [50_000, 3, 4096, 12_289, 200_000, 1, 70_001]
    facts = [
        ParameterFacts(str(i), i, (size,), "float32", size, 4, True, 0)
        for i, size in enumerate(sizes)
    ]
    # Many magnitudes, so that any other order of summation rounds differently.
    scales = [10 ** (8 * torch.rand(size, generator=generator) - 4) for size in sizes]
    values = [torch.randn(size, generator=generator) * scales[i] for i, size in enumerate(sizes)]

    def work(ranks: DistContext) -> dict[int, float]:
        layout = lay_out(0, "all", facts, FP32, ranks=ranks.count)
        shard = layout.of_shard(ranks.rank)
        with CpuKernels(1) as kernels:
            blocks = {}
            for segment in shard.segments:
                first, end = (n - segment.offset for n in segment.within(0, shard.numel))
                shard_values = values[segment.parameter][first:end]
                blocks[segment.parameter] = kernels.square_blocks(shard_values)
            plan: Any = SimpleNamespace(units=(layout,))
            return NormTree(plan, ranks, kernels, lambda *_: None).fold(
                blocks, range(len(sizes)), {}
            )

    with CpuKernels(1) as kernels:
        expected = {index: [kernels.square_sum(value)] for index, value in enumerate(values)}
    for count in (1, 2, 3, 4, 7):
        assert on_ranks(count, work) == [expected] * count


# --- gradients that only some ranks have ---------------------------------------------------------


class SometimesBlock(nn.Module):
    """Block whose second matrix (7 blocks of the norm's tree) is used by some batches only."""

    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Linear(160, 160)
        self.sometimes = nn.Linear(160, 160, bias=False)

    def forward(self, x: Tensor, used: bool) -> Tensor:
        weight = self.sometimes.weight
        return (self.always(x) + x @ (weight if used else weight.detach())).tanh()


class Sometimes(nn.Module):
    """Model of such blocks, with a parameter that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(SometimesBlock() for _ in range(3))
        self.never = nn.Parameter(torch.ones(5))

    def forward(self, x: Tensor, used: tuple[bool, ...]) -> Tensor:
        for block, is_used in zip(self.blocks, used, strict=True):
            x = block(x, is_used)
        return x.square().mean()


def some_batches(count: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(3)
    uses = torch.randint(0, 2, (count, 3), generator=generator).bool().tolist()
    return [Batch((torch.randn(4, 160, generator=generator), tuple(used))) for used in uses]


def test_gradient_missing_on_some_ranks_matches_single_rank() -> None:
    count, micro_batches = 3, 2
    config = make_config(ON_DISK, precision="fp32")
    batches = some_batches(4 * count * micro_batches)
    torch.manual_seed(0)
    start = Sometimes().state_dict()

    def build() -> nn.Module:
        model = Sometimes()
        model.load_state_dict(start)
        return model

    expected = train_reference(build(), batches, with_micro_batches(config, count * micro_batches))
    found = train_ranks(count, build, batches, with_micro_batches(config, micro_batches))
    assert found.differences(expected) == []


# --- divergence between ranks is reported on every rank ------------------------------------------


def messages_of(count: int, work: Callable[[DistContext], Any]) -> dict[int, str]:
    """Run `work` on all ranks, each of which must raise; return the messages."""
    results, errors = together(count, work)
    assert not results, results
    assert all(isinstance(error, InfinityError) for error in errors.values()), errors
    return {rank: str(error) for rank, error in errors.items()}


class Ordered(nn.Module):
    """Model that runs its blocks in the order given."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

    def forward(self, x: Tensor, order: tuple[int, ...]) -> Tensor:
        for index in order:
            x = self.blocks[index](x)
        return x.square().mean()


def same_models(kind: Callable[[], nn.Module], count: int) -> list[nn.Module]:
    found = []
    for _ in range(count):
        torch.manual_seed(0)
        found.append(kind())
    return found


def one_batch(number: int) -> tuple[Tensor, tuple[int, ...]]:
    return torch.full((2, 64), 1.0 + number), (0, 1, 2)


def test_different_unit_order_is_reported(tmp_path: Path) -> None:
    models = same_models(Ordered, 3)

    def work(ranks: DistContext) -> None:
        with make_engine(ranks, models[ranks.rank], make_config(), tmp_path) as engine:
            engine(torch.ones(2, 64), (0, 1, 2))
            engine(torch.ones(2, 64), (0, 2, 1) if ranks.rank == 1 else (0, 1, 2))

    for message in messages_of(3, work).values():
        assert "uses unit 'blocks.1' on ranks 0, 2; uses unit 'blocks.2' on rank 1" in message


@pytest.mark.parametrize("where", ["forward", "loss", "backward", "plain", "batch", "scheduler"])
def test_error_on_one_rank_is_reported_on_all(where: str, tmp_path: Path) -> None:
    models = same_models(Ordered, 3)

    class BadError(Exception):
        pass

    def raise_error(*args: Any) -> Any:
        raise BadError("the data are bad")

    def work(ranks: DistContext) -> None:
        model, is_bad = models[ranks.rank], ranks.rank == 1
        options = {"lr_scheduler": lambda optimizer: SimpleNamespace(step=raise_error)}
        more = options if is_bad and where == "scheduler" else {}
        with make_engine(ranks, model, make_config(), tmp_path, **more) as engine:
            if is_bad and where == "forward":
                model.blocks[1].register_forward_pre_hook(raise_error)
            if is_bad and where == "loss":
                model.register_forward_hook(raise_error)
            if is_bad and where == "plain":  # at the end of a `loss.backward()`
                components(engine).gradients._windows.save = raise_error
            for _ in range(2):
                if where == "batch":
                    engine.train_batch(map(raise_error if is_bad else one_batch, range(9)))
                loss = engine(torch.ones(2, 64), (0, 1, 2))
                if is_bad and where == "backward":
                    loss.register_hook(raise_error)
                (loss if where == "plain" else engine).backward(*() if where == "plain" else [loss])
                engine.step()

    results, errors = together(3, work)
    assert not results
    assert isinstance(errors[1], BadError)
    pattern = r"rank 1 failed \(a (forward|backward|batch|step)\): BadError: the data are bad"
    assert all(re.search(pattern, str(errors[rank])) for rank in (0, 2)), errors


@pytest.mark.parametrize("where", ["forward", "finish", "settle"])
def test_recovered_rank_error_leaves_state_unchanged(where: str, tmp_path: Path) -> None:
    """The error comes where no barrier follows; all ranks then restart the window."""
    config = make_config(gradient_accumulation_steps=2)
    models = [same_models(Ordered, 2) for _ in range(2)]

    def train(ranks: DistContext, model: nn.Module, broken: bool) -> tuple[list[Any], list[str]]:
        raised = []
        with make_engine(ranks, model, config, tmp_path / str(broken)) as engine:
            calls, usual = itertools.count(), getattr(components(engine).gradients, where, print)

            def fail(*args: Any) -> None:
                if where != "forward":
                    usual()
                if next(calls) == 1:
                    raise RuntimeError("it failed")

            if broken and ranks.rank == 1:
                if where == "forward":
                    model.register_forward_hook(fail)
                else:
                    setattr(components(engine).gradients, where, fail)
            while engine.global_steps < 4:
                try:
                    engine.backward(engine(*one_batch(engine.micro_step + 2 * engine.global_steps)))
                    engine.step()
                except Exception as error:
                    raised.append(str(error))
            return [v.clone() for v in engine.state_dict(master=True).values()], raised

    for broken in (False, True):
        (tmp_path / str(broken)).mkdir()
    sound = on_ranks(2, lambda ranks: train(ranks, models[0][ranks.rank], False))
    found = on_ranks(2, lambda ranks: train(ranks, models[1][ranks.rank], True))
    for (masters, raised), (expected, none) in zip(found, sound, strict=True):
        assert (len(raised), none) == (1, [])
        assert "it failed" in raised[0]
        assert all(map(torch.equal, masters, expected))


def set_lr_of_rank(value: Any, rank: int) -> Callable[[Engine], None]:
    """Return a function that sets a learning rate; tensors print four digits of it."""
    return lambda engine: engine.optimizer.param_groups[0].update(lr=value * (1 + rank * 1e-6))


@pytest.mark.parametrize(
    ("differ", "expected_text"),
    [
        (partial(set_lr_of_rank, 1e-3), "(ends a step): values of the optimizer's groups"),
        (
            partial(set_lr_of_rank, torch.tensor(1e-3)),
            "(ends a step): values of the optimizer's groups",
        ),
        (
            lambda rank: lambda engine: setattr(engine, "gradient_clipping", 0.5 + rank),
            "(ends a step): gradient_clipping",
        ),
        (
            lambda rank: lambda engine: engine._window.set_length(2 + rank),
            "(ends a backward): micro-batches of an update",
        ),
    ],
    ids=["rate", "rate as a tensor", "clipping", "window"],
)
def test_settings_changed_on_one_rank_are_reported_on_all(
    differ: Callable[[int], Callable[[Engine], None]], expected_text: str, tmp_path: Path
) -> None:
    models = same_models(Ordered, 2)

    def work(ranks: DistContext) -> None:
        config = with_micro_batches(make_config(), 2)
        with make_engine(ranks, models[ranks.rank], config, tmp_path) as engine:
            differ(ranks.rank)(engine)
            for _ in range(2):
                engine.backward(engine(torch.ones(2, 64), (0, 1, 2)))
                engine.step()

    for message in messages_of(2, work).values():
        assert f"ranks 0 and 1 differ {expected_text}" in message


def edit_in_place(engine: Engine, value: float | None) -> None:
    weight = engine.module.blocks[1].weight
    with engine.materialized(weight), torch.no_grad():
        if value is not None:
            weight.fill_(value)


def edit_by_state_dict(engine: Engine, value: float | None) -> None:
    state = {name: found.clone() for name, found in engine.state_dict(master=True).items()}
    if value is not None:
        state["blocks.1.weight"].fill_(value)
    engine.load_state_dict(state)


def edit_moment(engine: Engine, value: float | None) -> None:
    engine.set_optimizer_state(
        engine.module.blocks[1].weight, "exp_avg", torch.full((64, 64), value or 0.0)
    )


def edit_gradient(engine: Engine, value: float | None) -> None:
    engine.backward(engine(torch.ones(2, 64), (0, 1, 2)))
    engine.set_gradient(engine.module.blocks[1].weight, torch.full((64, 64), value or 0.0))
    engine.step()


def gathered_parameters(engine: Engine) -> Any:
    return zero.GatheredParameters(list(engine.module.parameters()), modifier_rank=0)


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize(
    "edit_context", [lambda engine: engine.materialized(engine.module), gathered_parameters]
)
def test_error_in_edit_is_reported_and_writes_nothing(
    edit_context: Callable[[Engine], Any], failing: int, tmp_path: Path
) -> None:
    models = same_models(Ordered, 2)

    def fill(engine: Engine, rank: int) -> None:
        with edit_context(engine), torch.no_grad():
            for parameter in engine.module.parameters():
                parameter.fill_(7.0)
            if rank == failing:
                raise KeyError("lost")

    def work(ranks: DistContext) -> tuple[BaseException, list[Tensor]]:
        with make_engine(ranks, models[ranks.rank], make_config(ON_DISK), tmp_path) as engine:
            before = [v.clone() for v in engine.state_dict(master=True).values()]
            with pytest.raises((KeyError, TrainingError)) as caught:
                fill(engine, ranks.rank)
            after = list(engine.state_dict(master=True).values())
            assert all(map(torch.equal, after, before))
            engine.backward(engine(torch.ones(2, 64), (0, 1, 2)))
            engine.step()
            return caught.value, [v.clone() for v in engine.state_dict(master=True).values()]

    found = on_ranks(2, work)
    assert isinstance(found[failing][0], KeyError)
    assert f"rank {failing} failed (edits values): KeyError: 'lost'" in str(found[1 - failing][0])
    assert all(map(torch.equal, found[0][1], found[1][1]))


@pytest.mark.parametrize("edit", [edit_in_place, edit_by_state_dict, edit_moment, edit_gradient])
@pytest.mark.parametrize("first", [2.0, None])
def test_differing_edits_across_ranks_are_rejected(
    edit: Callable[[Engine, float | None], None], first: float | None, tmp_path: Path
) -> None:
    """Each rank stores its shard: differing values would be mixed in one weight.

    The first rank may pass none, or the current values.
    """
    models = same_models(Ordered, 2)

    def work(ranks: DistContext) -> tuple[Tensor, Tensor]:
        config = make_config(ON_DISK, precision="bf16", cast_inputs=True)
        with make_engine(ranks, models[ranks.rank], config, tmp_path) as engine:
            before = engine.state_dict(master=True)["blocks.1.weight"].clone()
            with pytest.raises(TrainingError, match="ranks 0 and 1 differ") as caught:
                edit(engine, 1.0 if ranks.rank else first)
            assert "make the same edit on all ranks" in str(caught.value)
            assert torch.equal(engine.state_dict(master=True)["blocks.1.weight"], before)
            edit(engine, 3.0)
            return before, engine.state_dict(master=True)["blocks.1.weight"].clone()

    (before, found), (_, other) = on_ranks(2, work)
    assert torch.equal(found, other)
    if edit in (edit_in_place, edit_by_state_dict):
        assert torch.equal(found, torch.full((64, 64), 3.0))
    elif edit is edit_gradient:
        assert not torch.equal(found, before)


def test_early_ending_rank_does_not_block_others(tmp_path: Path) -> None:
    models = same_models(Ordered, 2)

    def work(ranks: DistContext) -> None:
        with make_engine(ranks, models[ranks.rank], make_config(), tmp_path) as engine:
            for _ in range(2 + (ranks.rank == 0)):
                engine.backward(engine(torch.ones(2, 64), (0, 1, 2)))
                engine.step()

    results, errors = together(2, work)
    assert results == {1: None}
    assert "lost the others" in str(errors[0])


def test_different_calls_on_ranks_are_reported(tmp_path: Path) -> None:
    models = same_models(Ordered, 2)

    def work(ranks: DistContext) -> None:
        with make_engine(ranks, models[ranks.rank], make_config(), tmp_path) as engine:
            loss = engine(torch.ones(2, 64), (0, 1, 2))
            if ranks.rank == 0:
                engine.save_weights(tmp_path / "weights")
            engine.backward(loss)

    for message in messages_of(2, work).values():
        assert "reads weight of unit 'blocks.0' on rank 0" in message
        assert "on rank 1" in message


@pytest.mark.parametrize(
    ("changes", "expected_text"),
    [
        ({"gradient_clipping": 0.25}, "gradient_clipping is 0.5 on rank 0, 0.25 on rank 1"),
        ({"seed": 4}, "seed is None on rank 0, 4 on rank 1"),
        ({"chunk_size": 4096}, "chunk_size is 2048 on rank 0, 4096 on rank 1"),
    ],
)
def test_differing_configurations_are_rejected(
    changes: dict[str, Any], expected_text: str, tmp_path: Path
) -> None:
    models = same_models(Ordered, 2)

    def work(ranks: DistContext) -> None:
        config = make_config() | (changes if ranks.rank == 1 else {})
        make_engine(ranks, models[ranks.rank], config, tmp_path)

    for message in messages_of(2, work).values():
        assert f"ranks 0 and 1 differ in the configuration: {expected_text}" in message


def test_differing_versions_are_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models = same_models(Ordered, 2)
    of_thread: dict[int, str] = {}
    monkeypatch.setattr(_initialize, "version", lambda name: of_thread[threading.get_ident()])

    def work(ranks: DistContext) -> None:
        of_thread[threading.get_ident()] = f"0.{ranks.rank}"
        make_engine(ranks, models[ranks.rank], make_config(), tmp_path)

    for message in messages_of(2, work).values():
        expected_text = "differ in the configuration: infinity is '0.0' on rank 0, '0.1' on rank 1"
        assert f"ranks 0 and 1 {expected_text}" in message


def reseeded() -> nn.Module:
    torch.manual_seed(1)
    return Ordered()


def frozen_in_part() -> nn.Module:
    model = Ordered()
    model.blocks[1].requires_grad_(False)
    return model


def with_table(middle: float) -> nn.Module:
    model = Ordered()
    model.table = nn.Parameter(torch.zeros(100, 64))
    with torch.no_grad():
        model.table[50] = middle
    return model


@pytest.mark.parametrize(
    ("kind", "other", "expected_text"),
    [
        (Ordered, reseeded, "values of blocks.0.weight is"),
        (
            Ordered, frozen_in_part,
            "blocks.1.weight is '(64, 64), float32, trained in group 0' on rank 0",
        ),
        (Ordered, lambda: nn.ModuleList([Ordered()]), "units is ['blocks.0'"),
        (partial(with_table, 0.0), partial(with_table, 1.0), "values of table is"),
    ],
)  # fmt: skip
def test_differing_models_are_rejected(
    kind: Callable[[], nn.Module],
    other: Callable[[], nn.Module],
    expected_text: str,
    tmp_path: Path,
) -> None:
    models = same_models(kind, 2)
    torch.manual_seed(0)
    models.append(other())

    def work(ranks: DistContext) -> None:
        make_engine(ranks, models[ranks.rank], make_config(), tmp_path)

    for message in messages_of(3, work).values():
        assert "ranks 0 and 2 differ in the model: " in message
        assert expected_text in message


def test_differing_weight_files_are_rejected(tmp_path: Path) -> None:
    """As if one machine has an older file."""
    values = {name: p.detach().clone() for name, p in Gpt().named_parameters()}
    last = [name for name in values if name.endswith("weight")][-1]
    for rank in range(2):
        save_file(values, tmp_path / f"{rank}.safetensors")
        values[last] = values[last] + 1

    def work(ranks: DistContext) -> None:
        with torch.device("meta"):
            model = Gpt()
        infinity.load_weights(model, tmp_path / f"{ranks.rank}.safetensors")
        make_engine(ranks, model, make_config(), tmp_path)

    for message in messages_of(2, work).values():
        assert f"ranks 0 and 1 differ in the model: first values of {last} is" in message


@pytest.mark.parametrize(
    ("changes", "expected_text"),
    [
        ({"batch_size": 2}, "the configuration: samples of a micro-batch is 1 on rank 0, 2"),
        ({"samples": 12}, "training_data: number of samples is 8 on rank 0, 12 on rank 1"),
    ],
)
def test_differing_batch_or_dataset_size_is_rejected(
    changes: dict[str, int], expected_text: str, tmp_path: Path
) -> None:
    """Each rank takes every N-th batch of its batch size, from its dataset."""
    models = same_models(Ordered, 2)

    def work(ranks: DistContext) -> None:
        values = {"batch_size": 1, "samples": 8} | (changes if ranks.rank else {})
        data = TensorDataset(torch.zeros(values["samples"], 64))
        more = {"training_data": data, "batch_size": values["batch_size"]}
        make_engine(ranks, models[ranks.rank], make_config(), tmp_path, **more)

    for message in messages_of(2, work).values():
        assert f"ranks 0 and 1 differ in {expected_text}" in message


def test_differing_plans_are_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All inputs are equal; the plans differ as if the machines did."""
    models, original_make_plan = same_models(Ordered, 2), run_plan.make_plan

    def make_plan(*args: Any, rank: int, **options: Any) -> Plan:
        plan = original_make_plan(*args, rank=rank, **options)
        return replace(plan, unsharded=frozenset()) if rank else plan

    monkeypatch.setattr(run_plan, "make_plan", make_plan)
    config = make_config() | {"placement": {"reshard_after_forward": False}}
    for message in messages_of(
        2, lambda r: make_engine(r, models[r.rank], config, tmp_path)
    ).values():
        assert "ranks 0 and 1 differ in the plan: unsharded units is [0, 1, 2] on" in message


def test_initialize_error_on_one_rank_is_reported_on_all(tmp_path: Path) -> None:
    models = same_models(Ordered, 3)

    def broken(done: int, total: int, what: str) -> None:
        raise RuntimeError("no more light")

    def work(ranks: DistContext) -> None:
        progress = broken if ranks.rank == 1 else None
        make_engine(ranks, models[ranks.rank], make_config(ON_DISK), tmp_path, progress=progress)

    results, errors = together(3, work)
    assert not results
    assert str(errors[1]) == "no more light"
    for rank in (0, 2):
        assert "rank 1 failed (initialize()): RuntimeError: no more light" in str(errors[rank])
    assert list(tmp_path.iterdir()) == []


# --- values and other requests of an engine ------------------------------------------------------


def edit_and_read_all(engine: Engine, ranks: DistContext, weights: Path) -> dict[str, Tensor]:
    """Edit everything, and return all values before and after, by name."""
    found: dict[str, Tensor] = {}
    batches = GPT.batches(8)[ranks.rank :: ranks.count]
    for batch in batches[: len(batches) // 2]:
        engine.backward(batch.call(engine))
        engine.step()
    names = {id(p): name for name, p in engine.module.named_parameters()}
    parameters = components(engine).partition.parameters
    for parameter in parameters:
        state = engine.optimizer.read_state(parameter)
        found |= {f"{names[id(parameter)]}.{k}": torch.as_tensor(v) for k, v in state.items()}
    with engine.materialized(engine.module, master=True):
        for parameter in parameters:
            parameter.data.mul_(1.25)
    first = parameters[1]
    moment = engine.optimizer.read_state(first)["exp_avg"] + 1
    engine.set_optimizer_state(first, "exp_avg", moment)
    for batch in batches[len(batches) // 2 :]:
        engine.backward(batch.call(engine))
        if engine.is_gradient_accumulation_boundary():
            found["gradient"] = engine.gradient(first)
            engine.set_gradient(first, engine.gradient(first) * 2)
        engine.step()
    with torch.no_grad():
        found["evaluated"] = GPT.batches(1)[0].call(engine)
    found["reached for"] = engine.module.norm.weight.detach().clone()
    found |= {f"{n} of the module": v for n, v in engine.module.state_dict().items()}
    found |= {f"{n} master": v.clone() for n, v in engine.state_dict(master=True).items()}
    files = engine.save_weights(weights, "fp32")
    found |= {f"a file of {path.stat().st_size} bytes": torch.zeros(()) for path in files}
    state = {n: v + 1 for n, v in engine.state_dict().items()}
    engine.load_state_dict(state)
    found |= {f"{n} loaded": v for n, v in engine.state_dict(master=True).items()}
    return found


@pytest.mark.parametrize("placement", [ON_DISK, IN_RAM])
def test_values_are_unsharded_on_every_rank(
    placement: tuple[str, str, str], tmp_path: Path
) -> None:
    models = [GPT.build() for _ in range(4)]
    config = make_config(placement, precision="bf16")

    def work(ranks: DistContext) -> dict[str, Tensor]:
        model = models.pop()
        rank_config = with_micro_batches(config, 4 // ranks.count)
        with make_engine(ranks, model, rank_config, tmp_path, groups=GPT.groups) as engine:
            return edit_and_read_all(engine, ranks, tmp_path.parent / f"weights-{ranks.count}")

    (expected,) = on_ranks(1, work)
    for found in on_ranks(2, work):
        assert found.keys() == expected.keys()
        different = [n for n, v in found.items() if not same_bits(v, expected[n])]
        assert different == []
    one, two = (tmp_path.parent / f"weights-{n}/model.safetensors" for n in (1, 2))
    assert one.read_bytes() == two.read_bytes()


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_user_backward_and_train_batch_match_single_rank(precision: str, tmp_path: Path) -> None:
    models = [GPT.build() for _ in range(8)]
    batches = GPT.batches(12)
    config = make_config(ON_DISK, precision=precision)

    def work(ranks: DistContext, way: str) -> dict[str, Tensor]:
        rank_config = with_micro_batches(config, 6 // ranks.count)
        rank_batches = batches[ranks.rank :: ranks.count]
        with make_engine(ranks, models.pop(), rank_config, tmp_path, groups=GPT.groups) as engine:
            for first in range(0, len(rank_batches), len(rank_batches) // 2):
                part = rank_batches[first : first + len(rank_batches) // 2]
                if way == "train_batch":
                    engine.train_batch(iter([batch.args for batch in part]))
                for batch in part if way != "train_batch" else ():
                    loss = batch.call(engine)
                    engine.scale(loss).backward() if way == "own" else engine.backward(loss)
                    engine.step()
            return {n: v.clone() for n, v in engine.state_dict(master=True).items()}

    for way in ("own", "train_batch"):
        (expected,) = on_ranks(1, partial(work, way="own" if way == "own" else "engine"))
        for found in on_ranks(2, partial(work, way=way)):
            assert all(same_bits(found[name], value) for name, value in expected.items()), way


def test_deferred_models_are_materialized_by_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config(ON_DISK, precision="bf16", seed=3)
    materialized: dict[int, set[int]] = {}
    lock, value, seed = threading.RLock(), InitialValues.value, torch.manual_seed

    def seeded(number: int) -> torch.Generator:
        with lock:  # not while values of another rank are drawn
            return seed(number)

    def record_value(self: InitialValues, tensor: Tensor) -> Tensor:
        with lock:  # torch's generator, which draws them, is shared by all threads
            materialized.setdefault(threading.get_ident(), set()).add(id(tensor))
            return value(self, tensor)

    def build(*, deferred: bool) -> nn.Module:
        torch.manual_seed(3)
        with infinity.Init(threshold_bytes=1) if deferred else nullcontext():
            return Gpt()

    monkeypatch.setattr(InitialValues, "value", record_value)
    monkeypatch.setattr(torch, "manual_seed", seeded)
    batches = GPT.batches(6)
    expected = train_reference(build(deferred=False), batches, with_micro_batches(config, 2))
    found = train_ranks(2, partial(build, deferred=True), batches, config)
    assert found.differences(expected) == []
    num_parameters = len(list(build(deferred=True).parameters()))
    assert len(materialized) == 2
    # Except a parameter in both shards, and the smallest matrix, which is compared.
    assert all(len(tensors) <= 0.6 * num_parameters for tensors in materialized.values())


@pytest.mark.parametrize("frozen", [False, True])
def test_weight_files_are_read_once_across_ranks(
    frozen: bool, tmp_path: Path, bytes_read: list[int]
) -> None:
    """Except the ends of each parameter, which all ranks compare."""
    path = tmp_path / "model.safetensors"
    values = {name: p.detach().clone() for name, p in Gpt().named_parameters()}
    save_file(values, path)
    ends = sum(2 * min(v.numel(), _initialize._COMPARED) * v.itemsize for v in values.values())

    def build() -> nn.Module:
        with torch.device("meta"):
            model = Gpt()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not frozen or "norm" in name)
        infinity.load_weights(model, path)
        return model

    found = {}
    for count in (1, 2, 3):
        config = with_micro_batches(make_config(ON_DISK, precision="bf16"), 6 // count)
        bytes_read.clear()
        found[count] = train_ranks(count, build, GPT.batches(6), config)
        compared = 0 if count == 1 else count * ends
        assert sum(bytes_read) == sum(v.nbytes for v in values.values()) + compared
    assert found[2].differences(found[1]) == found[3].differences(found[1]) == []


# --- checkpoints do not depend on the number of ranks --------------------------------------------


@pytest.mark.parametrize(("name", "moments"), [("gpt", "8bit"), ("frozen", "fp32")])
def test_checkpoint_resumes_on_other_rank_counts(name: str, moments: str, tmp_path: Path) -> None:
    case, micro_batches, steps = CASES[name], 6, 2
    config = make_config(ON_DISK, precision="bf16", optimizer={"moments": moments}, seed=5)
    counts = (3, 1, 2, 3)
    batches = case.batches(micro_batches * steps * len(counts))
    one = with_micro_batches(config, micro_batches)
    expected = train_reference(case.build(), batches, one, groups=case.groups)

    def config_of(number: int, count: int) -> dict[str, Any]:
        placement = {"weights": ("disk", "host", "device")[number % 3]}
        return with_micro_batches(config, micro_batches // count) | {"placement": placement}

    def build(number: int) -> nn.Module:
        return case.build(seed=number)

    found = train_with_rank_counts(counts, build, batches, config_of, tmp_path, groups=case.groups)
    assert found.differences(expected) == []


def test_open_window_resumes_on_same_rank_count(tmp_path: Path) -> None:
    batches = GPT.batches(8)
    config = with_micro_batches(make_config(IN_RAM, precision="bf16"), 2)
    expected = train_reference(
        GPT.build(), batches, with_micro_batches(config, 4), groups=GPT.groups
    )
    first = train_ranks(2, GPT.build, batches[:6], config, groups=GPT.groups, save=tmp_path)
    with pytest.raises(
        CheckpointError, match=r"2 micro-batches on 2 ranks; this engine has 2 on 1"
    ):
        train_ranks(1, GPT.build, batches[6:], config, groups=GPT.groups, load=tmp_path)
    found = train_ranks(2, GPT.build, batches[6:], config, groups=GPT.groups, load=tmp_path)
    found.losses, found.norms = first.losses + found.losses, first.norms + found.norms
    assert found.differences(expected) == []


def test_failed_save_raises_on_all_and_training_continues(tmp_path: Path) -> None:
    models = [GPT.build() for _ in range(2)]
    nvme, saves = tmp_path / "nvme", tmp_path / "saves"
    nvme.mkdir()
    (saves / "there").mkdir(parents=True)

    def work(ranks: DistContext) -> tuple[str, float | None]:
        config = make_config(ON_DISK, precision="bf16")
        with make_engine(ranks, models[ranks.rank], config, nvme) as engine:
            kind = CheckpointError if ranks.rank == 0 else TrainingError
            with pytest.raises(kind, match="exists already") as caught:
                engine.save_checkpoint(saves, "there")
            engine.backward(GPT.batches(2)[ranks.rank].call(engine))
            engine.step()
            engine.save_checkpoint(saves, "elsewhere")
            return str(caught.value), engine.grad_norm

    found = on_ranks(2, work)
    assert "rank 0 failed (saves a checkpoint): CheckpointError: the checkpoint" in found[1][0]
    assert found[0][1] == found[1][1]
    assert (saves / "elsewhere" / "manifest.json").exists()
