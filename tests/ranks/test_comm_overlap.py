"""Tests that communication overlaps compute, and that timing does not decide what is sent."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.internals import components
from support.models import CASES
from support.ranks import ThreadRanks, make_engine, on_ranks, together, train_ranks
from support.trainer import make_config, make_device, same_bits, train_reference
from torch import Tensor, nn

from infinity.config.schema import load_config
from infinity.distributed.context import DistContext
from infinity.errors import InfinityError
from infinity.plan.budget import Limits
from infinity.plan.layout import FP32, ParameterFacts, lay_out
from infinity.plan.plan import Plan
from infinity.plan.planner import make_plan

GPT = CASES["gpt"]
WIDTH, DEPTH = 64, 6


class Chain(nn.Module):
    """Model of consecutive blocks; with `more` each has a parameter that nothing uses."""

    def __init__(self, *, with_unused: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))
        for block in self.blocks if with_unused else ():
            block.never = nn.Parameter(torch.zeros(3))
        generator = torch.Generator().manual_seed(0)  # torch's own is shared by threads
        for parameter in self.parameters():
            parameter.data.normal_(std=0.1, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x).tanh()
        return x.square().mean()


def log_of_last_micro_batch(ranks: DistContext, folder: Path, config: dict[str, Any]) -> list[Any]:
    """Return the log of the last micro-batch, with ("computes", n) where the n-th block computes.

    This micro-batch is the second of its step: no update is in flight, which would publish units at
    any time.
    """
    assert isinstance(ranks, ThreadRanks)
    model = Chain()

    def log_compute(number: int, output: Tensor) -> None:
        ranks.log.append(("computes", number))
        if output.requires_grad:
            output.register_hook(lambda _: ranks.log.append(("computes", number)))

    for number, block in enumerate(model.blocks):
        block.register_forward_hook(lambda _, __, output, n=number: log_compute(n, output))
    config = {**config, "gradient_accumulation_steps": 2}
    with make_engine(ranks, model, config, folder) as engine:
        for micro_batch in range(4):
            if micro_batch == 3:
                ranks.log.clear()
            engine.backward(engine(torch.full((2, WIDTH), 1.0 + ranks.rank)))
            engine.step()
        return list(ranks.log)


def logged_during(log: list[Any], kind: str) -> list[list[Any]]:
    """Return, for each operation of a kind, what was logged while it was in flight."""
    found = []
    for position, (what, number) in enumerate(log):
        if what == kind:
            found.append(log[position + 1 : log.index(("over", number))])
    return found


def test_all_gather_overlaps_compute(tmp_path: Path) -> None:
    config = make_config(("host", "host", "host"), prefetch_units=1)
    for log in on_ranks(2, partial(log_of_last_micro_batch, folder=tmp_path, config=config)):
        gathers = logged_during(log, "all_gather")
        # All blocks but the three in slots: for the forward, and, except the first, for backward.
        assert len(gathers) == 2 * (DEPTH - 3) - 1
        barriers = [[doing for what, doing in during if what == "meets"] for during in gathers]
        assert all(barriers), "no gather is waited for where it starts"
        assert all(any(what == "computes" for what, _ in during) for during in gathers)


@pytest.mark.parametrize("slices", [1, 2])
def test_gradient_exchange_overlaps_compute(slices: int, tmp_path: Path) -> None:
    config = make_config(("host", "host", "host"), activations={"slices": slices})
    for log in on_ranks(2, partial(log_of_last_micro_batch, folder=tmp_path, config=config)):
        exchanges = logged_during(log, "all_to_all")
        assert len(exchanges) == DEPTH
        overlapped = [any(what == "computes" for what, _ in during) for during in exchanges]
        assert sum(overlapped) == DEPTH - 2, (
            "all but the last two, for which the end of backward waits"
        )
        concurrent = [sum(what == "all_to_all" for what, _ in during) for during in exchanges]
        assert max(concurrent) <= 2 - slices, "limited by the number of buffers to two, or one"


def test_one_synchronization_per_unit_use(tmp_path: Path) -> None:
    for log in on_ranks(2, partial(log_of_last_micro_batch, folder=tmp_path, config=make_config())):
        barriers = Counter(str(doing).split()[0] for what, doing in log if what == "meets")
        assert barriers["uses"] == 2 * DEPTH - 2, (
            "one use of the last unit, no second use of the first"
        )
        assert barriers["ends"] <= 4


@pytest.mark.parametrize("unsharded", [False, True])
@pytest.mark.parametrize("tier", ["host", "disk", "device"])
def test_unsharded_weights_are_gathered_once_per_step(
    unsharded: bool, tier: str, tmp_path: Path
) -> None:
    config = make_config((tier, "host", "host"), gradient_accumulation_steps=2, prefetch_units=1)
    config["placement"]["reshard_after_forward"] = not unsharded
    batches = GPT.batches(12)
    expected = train_reference(
        GPT.build(), batches, {**config, "gradient_accumulation_steps": 4}, groups=GPT.groups
    )
    found = train_ranks(
        2, GPT.build, batches, config, groups=GPT.groups, device=partial(make_device, "fake")
    )
    assert found.differences(expected) == []
    assert found.plan is not None
    assert found.report is not None
    assert found.report.moved == found.forecast
    assert found.plan.zero_stage == 3 - unsharded
    shards = sum(unit.shard_bytes for unit in found.plan.local_units)
    blocks = 8 * max(
        map(sum, zip(*(u.num_reported_squares for u in found.plan.units), strict=True))
    )
    gathers = (found.report.moved["all_gather"] - blocks) / shards
    assert (gathers == 1) if unsharded else (gathers > 1)


def test_unit_evicted_on_one_rank_is_gathered_on_all(tmp_path: Path) -> None:
    """As if its optimizer pass had taken other slots, which depends on timing."""
    x = torch.ones(2, WIDTH)

    def work(ranks: DistContext) -> tuple[int, bool]:
        with make_engine(ranks, Chain(), make_config(), tmp_path) as engine, torch.no_grad():
            first, prefetcher, num_evicted = engine(x), components(engine).prefetcher, 0
            for slot in prefetcher.ledger.slots if ranks.rank else ():
                assert slot.slot_class is not None
                if slot.owner in prefetcher._slots.evictable(slot.slot_class):
                    with prefetcher.ledger.changed:
                        prefetcher._slots.try_evict(slot.owner)
                    slot.memory.fill_(255)
                    num_evicted += 1
            return num_evicted, torch.equal(engine(x), first)

    (none_evicted, equal), (num_evicted, equal_after_eviction) = on_ranks(2, work)
    assert (none_evicted, equal, equal_after_eviction) == (0, True, True)
    assert num_evicted > 1


def test_frozen_weights_are_gathered_once(tmp_path: Path) -> None:
    case, config = CASES["frozen"], make_config()
    config["placement"]["reshard_after_forward"] = False
    found = train_ranks(2, case.build, case.batches(8), config, groups=case.groups)
    assert found.report is not None
    assert found.plan is not None
    only_frozen = [u for u in found.plan.units if not u.numel]
    assert only_frozen
    blocks = 8 * max(
        map(sum, zip(*(u.num_reported_squares for u in found.plan.units if u.numel), strict=True))
    )
    trained = sum(u.shard_bytes for u in found.plan.units if u.numel)
    assert found.report.moved["all_gather"] == trained + blocks


# --- the plan ------------------------------------------------------------------------------------


def planned(device: int | None, unsharded: bool | None = None, **placement: str) -> Plan:
    facts = [ParameterFacts("w", 0, (1 << 18,), "float32", 1 << 18, 4, True, 0)]
    units = tuple(
        replace(lay_out(i, f"unit {i}", facts, FP32, ranks=4), index=i) for i in range(10)
    )
    reshards = None if unsharded is None else not unsharded
    placement_config = {"reshard_after_forward": reshards, **placement}
    config = load_config({"precision": "fp32", "prefetch_units": 1, "placement": placement_config})
    return make_plan(units, config, Limits(device, None, None), unified=False)


def test_plan_keeps_fitting_units_unsharded() -> None:
    host = {"weights": "host", "optimizer_state": "host", "gradients": "host"}
    unlimited, unit = planned(None, **host), 1 << 20
    assert unlimited.zero_stage == 2
    assert "one all-gather after each update" in unlimited.describe()
    sharded = planned(None, unsharded=False, **host)
    assert sharded.zero_stage == 3
    (slots,) = sharded.slot_classes
    assert (slots.slot_bytes, slots.count) == (unit, 3)
    exchange = sharded.memory[next(iter(sharded.memory))]["exchange"]
    needed = exchange + 8 * unit  # for 8 units, out of a share of the device
    limited = planned(int(needed / 0.7) + 1024, **host)
    assert limited.unsharded == frozenset(range(5))
    assert sorted(c.count for c in limited.slot_classes) == [3, 5]
    assert limited.zero_stage == 3
    assert "weights of 5 units stay gathered" in limited.describe()
    assert limited.predicted_bytes["all_gather"] < sharded.predicted_bytes["all_gather"]


# --- errors during a gather ----------------------------------------------------------------------


class BadError(Exception):
    pass


@pytest.mark.parametrize("how", ["raises", "leaves"])
@pytest.mark.parametrize("when", ["forward", "backward"])
def test_rank_ending_during_gather_ends_all_ranks(how: str, when: str, tmp_path: Path) -> None:
    config = make_config(("host", "host", "host"))

    def work(ranks: DistContext) -> None:
        assert isinstance(ranks, ThreadRanks)
        model = Chain()
        with make_engine(ranks, model, config, tmp_path) as engine:

            def raise_error(*_: Any) -> None:
                in_flight = [e.gathering for e in components(engine).prefetcher.ledger.entries]
                assert any(in_flight), "a gather is in flight"
                raise BadError("no more")

            engine.backward(engine(torch.ones(2, WIDTH)))
            engine.step()
            components(engine).optimizer_pass.finish()  # else it publishes units at any time
            if ranks.rank == 1 and how == "raises":
                block = model.blocks[2]
                if when == "forward":
                    block.register_forward_hook(raise_error)
                else:
                    block.register_full_backward_hook(raise_error)
            loss = engine(torch.ones(2, WIDTH))
            if ranks.rank == 1 and how == "leaves":
                return
            engine.backward(loss)

    results, errors = together(3, work)
    if how == "leaves":
        assert set(results) == {1}, errors
        assert all("lost the others" in str(errors[rank]) for rank in (0, 2))
        return
    assert isinstance(errors[1], BadError), errors
    for rank in (0, 2):
        assert isinstance(errors[rank], InfinityError)
        assert f"rank 1 failed (a {when}): BadError: no more" in str(errors[rank])


@pytest.mark.parametrize("at_the_end", [False, True])
def test_accumulation_error_is_reported_to_all_ranks(at_the_end: bool, tmp_path: Path) -> None:
    def work(ranks: DistContext) -> None:
        model = Chain(with_unused=at_the_end)  # then no unit ever completes
        with make_engine(ranks, model, make_config(), tmp_path) as engine:
            exchange = components(engine).gradients.exchange
            assert exchange is not None
            accumulate, calls = exchange._accumulate, []

            def fail_on_third_call(*args: Any, **options: Any) -> Any:
                calls.append(args)
                if ranks.rank == 1 and len(calls) == 3:
                    raise BadError("the drive is full")
                return accumulate(*args, **options)

            exchange._accumulate = fail_on_third_call
            for _ in range(2):
                engine.backward(engine(torch.ones(2, WIDTH)))
                engine.step()

    results, errors = together(3, work)
    assert not results
    assert isinstance(errors[1], BadError)
    for rank in (0, 2):
        assert "BadError: the drive is full" in str(errors[rank])


def test_abandoned_forward_leaves_state_unchanged(tmp_path: Path) -> None:
    config = make_config(("host", "host", "host"), precision="bf16")
    batches = GPT.batches(6)
    expected = train_reference(
        GPT.build(), batches, {**config, "gradient_accumulation_steps": 2}, groups=GPT.groups
    )
    models = [GPT.build() for _ in range(2)]

    def work(ranks: DistContext) -> dict[str, Tensor]:
        model = models[ranks.rank]
        with make_engine(ranks, model, config, tmp_path, groups=GPT.groups) as engine:
            entries = components(engine).prefetcher.ledger.entries
            for number, batch in enumerate(batches[ranks.rank :: 2]):
                if number == 1:  # all ranks abandon it: what is in flight is dropped
                    components(engine).optimizer_pass.finish()
                    with pytest.raises(BadError):
                        abandon_forward(engine, batch, model)
                    assert not any(e.gathering for e in entries)
                engine.backward(batch.call(engine))
                engine.step()
            return {n: v.clone() for n, v in engine.state_dict(master=True).items()}

    def abandon_forward(engine: Any, batch: Any, model: nn.Module) -> None:
        def raise_error(*_: Any) -> None:
            assert any(e.gathering for e in components(engine).prefetcher.ledger.entries)
            raise BadError("not this one")

        handle = model.blocks[0].register_forward_hook(raise_error)
        try:
            batch.call(engine)
        finally:
            handle.remove()

    for found in on_ranks(2, work):
        assert all(same_bits(found[name], value) for name, value in expected.masters.items())
