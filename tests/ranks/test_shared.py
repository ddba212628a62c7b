"""Weights that ranks of one machine keep in RAM that all of them map: same bits, other bytes."""

from __future__ import annotations

import gc
import os
from functools import partial
from pathlib import Path

import pytest
import torch
from support.models import CASES
from support.ranks import make_engine, on_ranks, train_ranks
from support.trainer import make_config, make_device, train_exactly

from infinity.config.schema import load_config
from infinity.engine import Engine
from infinity.errors import ConfigError, InfinityError
from infinity.plan.budget import Limits
from infinity.plan.cost import NOMINAL, with_links
from infinity.plan.layout import FP32, PAGE, ParameterFacts, lay_out
from infinity.plan.plan import Plan
from infinity.plan.planner import make_plan
from infinity.ranks import Ranks
from infinity.storage import shared
from infinity.storage.shared import can_share

GPT, FROZEN = CASES["gpt"], CASES["frozen"]


@pytest.mark.parametrize("name", ["gpt", "frozen"])
@pytest.mark.parametrize(
    ("count", "device", "placement", "whole"),
    [(2, "fake", ("host", "host", "host"), False), (3, "fake", ("host", "disk", "host"), True),
     (2, "cpu", ("device", "host", "host"), False)],
)  # fmt: skip
def test_the_bits_and_the_bytes(
    name: str, count: int, device: str, placement: tuple[str, str, str], whole: bool
) -> None:
    """Nothing is gathered but the norm's sums; a device gets of each unit what others keep, too."""
    case = CASES[name]
    config = make_config(placement, precision="bf16", gradient_accumulation_steps=2)
    config["placement"] |= {"whole": whole, "shared": True}
    batches = case.batches(6 * count)
    one = {**config, "gradient_accumulation_steps": 2 * count}
    expected = train_exactly(case.build(), batches, one, groups=case.groups)
    found, gathered = (
        train_ranks(
            count, case.build, batches, {**config, "placement": config["placement"] | more},
            groups=case.groups, device=partial(make_device, device),
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
    squares = zip(*(unit.num_told for unit in units if unit.numel), strict=True)
    assert moved["all_gather"] == 8 * (count - 1) * max(map(sum, squares))
    copied = before["all_gather"] - moved["all_gather"]
    assert copied > 0
    assert moved["to_device"] == before["to_device"] + (copied if device == "fake" else 0)
    assert "weights rest in shared RAM" in found.plan.describe()


def test_edits_are_seen_by_every_rank_and_nothing_is_left(tmp_path: Path) -> None:
    """Values, loads and edits while others may still read; the memory has no name anywhere."""
    config = make_config(("host", "host", "host"))
    config["placement"]["shared"] = True
    models, there = [GPT.build() for _ in range(2)], set(os.listdir("/dev/shm"))

    def changed(engine: Engine, rank: int) -> torch.Tensor:
        batch = GPT.batches(2)[rank]
        engine.backward(batch.call(engine))
        engine.step()
        parameter = next(engine.module.parameters())
        with torch.no_grad():
            batch.call(engine)  # copies what is edited next
        with engine.materialized(parameter, master=True):
            parameter.data.mul_(0.5)
        with torch.no_grad():
            return torch.as_tensor(GPT.batches(1)[0].call(engine)).clone()

    def work(ranks: Ranks) -> tuple[torch.Tensor, bool]:
        device = make_device("fake", ranks.rank)
        with make_engine(ranks, models[ranks.rank], config, tmp_path, device=device) as engine:
            first = changed(engine, ranks.rank)
            engine.save_checkpoint(tmp_path / "saved", "here")
            second = changed(engine, ranks.rank)
            engine.load_checkpoint(tmp_path / "saved", "here")
            again = changed(engine, ranks.rank)
            assert not torch.equal(first, second)
            assert torch.equal(second, again)
            return second, engine.plan.shared

    found = on_ranks(2, work)
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1]
    assert set(os.listdir("/dev/shm")) == there
    gc.collect()
    mapped = Path("/proc/self/maps").read_text()
    assert "infinity-shared" not in mapped, "the last tensors are gone, and the memory with them"


def test_memory_that_is_not_rank_0_s_is_not_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where its process has that number in a container of its own only."""
    other = os.memfd_create("other")
    os.ftruncate(other, PAGE)
    assert on_ranks(2, can_share) == [True, True]
    monkeypatch.setattr(shared.os, "open", lambda *_: os.dup(other))
    try:
        assert on_ranks(2, can_share) == [False, False]
        with pytest.raises(InfinityError, match="is not rank 0 here"):
            on_ranks(2, partial(shared.SharedArena, PAGE))
    finally:
        os.close(other)


# --- the plan ------------------------------------------------------------------------------------


def planned(link: float, *, may_share: bool = True, **placement: object) -> Plan:
    facts = [ParameterFacts("w", 0, (1 << 18,), "float32", 1 << 18, 4, True, 0)]
    units = tuple(lay_out(i, f"unit {i}", facts, FP32, ranks=4) for i in range(10))
    config = load_config({"precision": "fp32", "placement": {"whole": False, **placement}})
    rates, _ = with_links(NOMINAL, 4, unified=False)
    rates = NOMINAL.of({**rates.numbers(), "all_gather": link, "all_to_all": link})
    limits = Limits(8 << 20, None, None)
    return make_plan(units, config, limits, unified=False, rates=rates, may_share=may_share)


def test_ranks_share_where_links_are_slow() -> None:
    assert planned(1e9).shared
    assert not planned(400e9).shared
    assert not planned(1e9, shared=False).shared
    assert planned(400e9, shared=True, weights="host").shared
    assert not planned(1e9, may_share=False).shared
    with pytest.raises(ConfigError, match="the ranks cannot share RAM"):
        planned(1e9, may_share=False, shared=True)
