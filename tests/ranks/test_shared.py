"""Tests of weights in RAM shared by the ranks of a node: equal bits, and other bytes moved."""

from __future__ import annotations

import gc
import os
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from support.internals import components
from support.models import CASES
from support.ranks import ThreadRanks, make_engine, on_ranks, train_ranks
from support.trainer import make_config, make_device, train_reference

from infinity.config.schema import load_config
from infinity.distributed import shared_memory
from infinity.distributed.context import CompletedWork, DistContext
from infinity.distributed.shared_memory import SharedWeights, can_share_memory
from infinity.engine import Engine
from infinity.errors import ConfigError, DoesNotFitError, InfinityError, MachineError
from infinity.plan.budget import Limits
from infinity.plan.layout import FP32, ParameterFacts, lay_out
from infinity.plan.plan import Plan
from infinity.plan.planner import make_plan
from infinity.plan.rates import NOMINAL, with_links
from infinity.types import PAGE, Tier

FROZEN = CASES["frozen"]
FACTS = [ParameterFacts("w", 0, (1 << 18,), "float32", 1 << 18, 4, True, 0)]


@pytest.mark.parametrize(
    ("name", "count", "nodes", "device", "placement", "unsharded"),
    [("gpt", 2, 1, "fake", ("host", "host", "host"), False),
     ("frozen", 3, 1, "fake", ("host", "disk", "host"), True),
     ("gpt", 2, 1, "cpu", ("device", "host", "host"), False),
     ("frozen", 4, 2, "fake", ("host", "host", "host"), False),
     ("gpt", 2, 2, "cpu", ("device", "host", "host"), True)],
)  # fmt: skip
def test_shared_weights_bits_and_bytes(
    name: str, count: int, nodes: int, device: str, placement: tuple[str, str, str], unsharded: bool
) -> None:
    """Only the norm's sums are gathered; a device copies the other ranks' shards of a unit as well.

    A node receives the shards of other nodes once after each update, and frozen ones once.
    """
    case = CASES[name]
    config = make_config(placement, precision="bf16", gradient_accumulation_steps=2)
    config["placement"] |= {"reshard_after_forward": not unsharded, "shared": True}
    batches = case.batches(6 * count)
    one = {**config, "gradient_accumulation_steps": 2 * count}
    expected = train_reference(case.build(), batches, one, groups=case.groups)
    found, gathered = (
        train_ranks(
            count, case.build, batches, {**config, "placement": config["placement"] | more},
            groups=case.groups, device=partial(make_device, device), nodes=nodes,
        )
        for more in ({}, {"shared": False})
    )  # fmt: skip
    assert found.differences(expected) == []
    assert found.plan is not None
    assert found.report is not None
    assert gathered.report is not None
    moved, before = found.report.moved, gathered.report.moved
    assert moved == found.forecast == found.plan.predicted_bytes
    units = found.plan.units
    squares = zip(*(unit.num_reported_squares for unit in units if unit.numel), strict=True)
    assert moved["all_gather"] == 8 * (count - 1) * max(map(sum, squares))
    copied = before["all_gather"] - moved["all_gather"]
    assert copied > 0
    assert moved["to_device"] == before["to_device"] + (copied if device == "fake" else 0)
    trained = sum(unit.trained_bytes for unit in found.plan.local_units)
    assert moved["between_hosts"] == (nodes - 1) * trained
    assert "weights are stored in shared RAM" in found.plan.describe()


@pytest.mark.parametrize("nodes", [1, 2])
def test_edits_are_visible_to_all_ranks_and_memory_is_freed(nodes: int, tmp_path: Path) -> None:
    """Also while others may still read; and the memory has no name in any file system."""
    config = make_config(("host", "host", "host"))
    config["placement"]["shared"] = True
    models = [FROZEN.build() for _ in range(2)]

    def changed(engine: Engine, rank: int) -> torch.Tensor:
        batch = FROZEN.batches(2)[rank]
        engine.backward(batch.call(engine))
        engine.step()
        one_of_each = {p.requires_grad: p for p in engine.module.parameters()}
        assert len(one_of_each) == 2
        for parameter in one_of_each.values():
            with torch.no_grad():
                batch.call(engine)  # queues copies of the weights edited next
            with engine.materialized(parameter, master=True):
                parameter.data.mul_(0.5)
        with torch.no_grad():
            return torch.as_tensor(FROZEN.batches(1)[0].call(engine)).clone()

    def work(ranks: DistContext) -> tuple[torch.Tensor, bool]:
        device = make_device("fake", ranks.rank)
        with make_engine(ranks, models[ranks.rank], config, tmp_path, device=device) as engine:
            first = changed(engine, ranks.rank)
            mapped = Path("/proc/self/maps").read_text()
            assert set(re.findall(r"\S*infinity-shared", mapped)) == {"/memfd:infinity-shared"}
            engine.save_checkpoint(tmp_path / "saved", "here")
            second = changed(engine, ranks.rank)
            engine.load_checkpoint(tmp_path / "saved", "here")
            again = changed(engine, ranks.rank)
            assert not torch.equal(first, second)
            assert torch.equal(second, again)
            return second, engine.plan.shared

    found = on_ranks(2, work, nodes=nodes)
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1]
    gc.collect()
    mapped = Path("/proc/self/maps").read_text()
    assert "infinity-shared" not in mapped, "freed with the last tensors"


def test_repeated_broadcast_waits_for_previous() -> None:
    """Two transfers of one unit in flight would write to the same memory."""
    unit = lay_out(0, "unit", FACTS, FP32, ranks=2)

    def work(ranks: DistContext) -> tuple[list[int], list[tuple[str, str | int]]]:
        weights = SharedWeights({0: unit.of_shard(ranks.rank)}, ranks, lambda arena: None)
        for value in (1, 2):
            weights.written(0)
            weights.shards[0][ranks.rank].fill_(10 * ranks.rank + value)
            ranks.synchronize("wrote")
            weights.fetch_stale(0)
        weights.settle(0)
        assert isinstance(weights._peers, ThreadRanks)
        log, found = weights._peers.log, [int(shard[0]) for shard in weights.shards[0]]
        weights.close()
        return found, [what for what in log if what[0] != "meets"]

    order = [("all_gather", 0), ("over", 0), ("all_gather", 1), ("over", 1)]
    assert on_ranks(2, work, nodes=2) == [([2, 12], order)] * 2


def test_failed_broadcast_raises_in_is_up_to_date() -> None:
    """torch's work object then is complete, too, and raises only in `wait`."""

    class Failed(CompletedWork):
        def wait(self) -> None:
            raise MachineError("lost")

    unit = lay_out(0, "unit", FACTS, FP32, ranks=2)

    def work(ranks: DistContext) -> str:
        weights = SharedWeights({0: unit.of_shard(ranks.rank)}, ranks, lambda arena: None)
        assert weights._peers is not None
        weights._peers.all_gather = lambda *_, **__: Failed()  # type: ignore[method-assign]
        weights.fetch_stale(0)
        with pytest.raises(MachineError) as caught:
            weights.is_up_to_date(0)
        weights.close()
        return str(caught.value)

    assert on_ranks(2, work, nodes=2) == ["lost", "lost"]


def test_device_copies_finish_before_norm_reduction(tmp_path: Path) -> None:
    """Copies queued by the last forward may read what others write once they know the norm."""
    config = make_config(("host", "host", "host"))
    config["placement"]["shared"] = True
    models = [FROZEN.build() for _ in range(2)]

    class PendingCopies(CompletedWork):
        def __init__(self, log: list[tuple[str, str | int]]) -> None:
            self.log = log

        def wait(self) -> None:
            self.log.append(("copies", "are over"))

    def work(ranks: DistContext) -> list[str]:
        assert isinstance(ranks, ThreadRanks)
        with make_engine(ranks, models[ranks.rank], config, tmp_path) as engine:
            engine.backward(FROZEN.batches(2)[ranks.rank].call(engine))
            components(engine).store._shared_copies = PendingCopies(ranks.log)
            before = len(ranks.log)
            engine.step()
            return [what for what, _ in ranks.log[before:]]

    for log in on_ranks(2, work):
        assert log[-2:] == ["copies", "meets"], log


def test_memory_not_of_rank_0_is_not_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if its process has that PID only in another container."""
    other = os.memfd_create("other")
    os.ftruncate(other, PAGE)
    assert on_ranks(2, can_share_memory) == [True, True]
    monkeypatch.setattr(shared_memory.os, "open", lambda *_: os.dup(other))
    try:
        assert on_ranks(2, can_share_memory) == [False, False]
        with pytest.raises(InfinityError, match="is not rank 0 here"):
            on_ranks(2, partial(shared_memory.SharedArena, PAGE))
    finally:
        os.close(other)


# --- the plan ------------------------------------------------------------------------------------


def planned(
    link: float,
    *,
    nodes: int = 1,
    may_share: bool = True,
    host: int | None = None,
    **placement: object,
) -> Plan:
    units = tuple(lay_out(i, f"unit {i}", FACTS, FP32, ranks=4) for i in range(10))
    config = load_config(
        {"precision": "fp32", "placement": {"reshard_after_forward": True, **placement}}
    )
    rates, _ = with_links(NOMINAL, 4, unified=False)
    rates = NOMINAL.of({**rates.numbers(), "all_gather": link, "all_to_all": link})
    rates = replace(rates, between_hosts=link)
    return make_plan(
        units, config, Limits(8 << 20, host, None), unified=False, rates=rates, nodes=nodes,
        may_share=may_share,
    )  # fmt: skip


def test_plan_shares_weights_on_slow_links() -> None:
    assert planned(1e9).shared
    assert not planned(400e9).shared
    assert not planned(1e9, shared=False).shared
    assert planned(400e9, shared=True, weights="host").shared
    assert not planned(1e9, may_share=False).shared
    with pytest.raises(ConfigError, match="the ranks cannot share RAM"):
        planned(1e9, may_share=False, shared=True)


def test_plan_stores_full_weights_on_each_node() -> None:
    """Twice the RAM, for half of the bytes gathered per step, which are transferred once."""
    one, two = (planned(1e9, nodes=nodes, weights="host") for nodes in (1, 2))
    assert one.shared
    assert two.shared
    assert two.memory[Tier.HOST]["weights"] == 2 * one.memory[Tier.HOST]["weights"]
    assert two.shared_bytes == 2 * one.shared_bytes
    gathered = planned(1e9, nodes=2, weights="host", shared=False).predicted_bytes["all_gather"]
    shards = sum(unit.shard_bytes for unit in one.local_units)
    assert two.predicted_bytes["between_hosts"] == shards
    assert gathered > 3 * shards > 3 * two.predicted_bytes["all_gather"]
    with pytest.raises(DoesNotFitError, match=r"placement\.shared: false \(2 nodes hold copies\)"):
        planned(1e9, nodes=2, host=two.tier_bytes[Tier.HOST] - 1, weights="host", shared=True)
