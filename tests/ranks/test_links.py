"""Tests of link rates: measured jointly by all ranks, cached, and used in the plan of each."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.ranks import ThreadRanks, on_ranks
from support.small import settings, small_model
from unit.profiling.test_rates import folder  # noqa: F401  (a fixture)

import infinity
from infinity.config.schema import Config
from infinity.distributed.context import DistContext
from infinity.plan.plan import LINKS
from infinity.plan.rates import Rates, nominal, with_links
from infinity.profiling import link_rates
from infinity.profiling.calibration import KnownRates, cached_or_nominal_rates
from infinity.profiling.link_rates import cached_links, read_cached_links
from infinity.storage.device import CpuDevice
from infinity.training import run_plan
from infinity.training.run_plan import rates_per_rank

NAMES = set(LINKS)


def set_call_times(monkeypatch: pytest.MonkeyPatch, slow_rank: int) -> ContextVar[int]:
    """Let timed calls take one second, on `slow_rank` two; the threads of ranks set the result."""
    rank: ContextVar[int] = ContextVar("rank")

    def timed(once: Callable[[], Any]) -> float:
        once()
        return 2.0 if rank.get() == slow_rank else 1.0

    monkeypatch.setattr(link_rates, "timed", timed)
    return rank


def test_links_are_measured_jointly_and_cached_per_rank_count(
    folder: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(link_rates, "_LINK_BYTES", 3 << 20)
    device = CpuDevice()
    assert read_cached_links(device, 3, 1) is None

    def work(ranks: DistContext) -> tuple[Any, ...]:
        assert isinstance(ranks, ThreadRanks)
        first = cached_links(ranks, device, seconds=0.01)
        sent = dict(ranks.sent)
        assert sent["all_to_all"] % (3 << 20) == 0
        cached = cached_links(ranks, device)
        assert ranks.sent["all_to_all"] == sent["all_to_all"], "cached: nothing is measured"
        cached_links(ranks, device, refresh=True, seconds=0.01)
        assert ranks.sent["all_to_all"] > sent["all_to_all"]
        return first, cached

    found = on_ranks(3, work)
    assert all(one == found[0] for one in found), "ranks must agree"
    (first, _), (cached, _) = found[0]
    assert first == cached
    assert set(first) == NAMES
    assert all(rate > 0 for rate in first.values())
    known = cached_or_nominal_rates((), device, gpus=3)
    assert not NAMES & set(known.nominal)
    assert known.measured is not None
    for gpus, nodes in ((2, 1), (3, 2)):
        other = cached_or_nominal_rates((), device, gpus=gpus, nodes=nodes)
        assert set(other.nominal) >= NAMES, "another number of ranks"
    assert cached_or_nominal_rates((), device).rates.all_gather is None, "one rank has no links"


def test_links_within_and_between_nodes_are_cached(
    folder: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """For plans with other numbers of nodes, too. The slowest rank of all sets counts."""
    monkeypatch.setattr(link_rates, "_LINK_BYTES", 3 << 20)
    device, measured = CpuDevice(), link_rates.measure_links

    def measure(ranks: DistContext, device: CpuDevice, seconds: float) -> dict[str, float]:
        sizes.append(ranks.count)
        return measured(ranks, device, seconds)

    sizes: list[int] = []
    rank = set_call_times(monkeypatch, slow_rank=5)
    monkeypatch.setattr(link_rates, "measure_links", measure)

    def work(ranks: DistContext) -> Any:
        rank.set(ranks.rank)
        ranks.local_rank, ranks.local_count = ranks.rank % 2, 2
        return cached_links(ranks, device, seconds=0.01)

    found = on_ranks(6, work)
    assert all(one == found[0] for one in found)
    assert sorted(sizes) == [2] * 6 + [3] * 6 + [6] * 6, (
        "ranks of a node, one rank of each node, all ranks"
    )
    rates, day = found[0]
    mib = 2.0**19  # per second: a call takes two
    between = {"between_nodes": 4 * mib, "between_hosts": 2 * mib}
    assert rates == {"all_gather": 2.5 * mib, "all_to_all": 2.5 * mib, **between}
    assert read_cached_links(device, 2, 3) == found[0]
    inside = dict.fromkeys(LINKS, 1.5 * mib)
    assert read_cached_links(device, 2, 1) == (inside, day)
    assert read_cached_links(device, 2, 8) == (inside | between, day)
    assert read_cached_links(device, 1, 8) == (between, day)
    assert read_cached_links(device, 4, 1) is None
    known = cached_or_nominal_rates((), device, gpus=2, nodes=8)
    assert not {*NAMES, *between} & set(known.nominal)
    known = cached_or_nominal_rates((), device, gpus=1, nodes=8)
    assert set(known.nominal) > NAMES
    assert not between.keys() & set(known.nominal)


def test_link_rate_counts_bytes_received_by_slowest_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank receives half of the message in a call."""
    rank = set_call_times(monkeypatch, slow_rank=1)

    def work(ranks: DistContext) -> dict[str, float]:
        rank.set(ranks.rank)
        return link_rates.measure_links(ranks, CpuDevice(), seconds=4.0)

    monkeypatch.setattr(link_rates, "_LINK_BYTES", 1 << 20)
    assert on_ranks(2, work) == [dict.fromkeys(LINKS, 2.0**19 / 2)] * 2


def test_rank_plans_with_its_share_of_the_lowest_rates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base_rates, _ = with_links(nominal(unified=True), 2, unified=True)

    def known(config: Config, device: CpuDevice, ranks: DistContext) -> KnownRates:
        slower = {"disk_read": 1e9} if ranks.rank else {"all_gather": 7e6}
        nodes = Rates.of(base_rates.numbers() | slower)
        return KnownRates(nodes, f"2026-01-0{ranks.rank + 1}", ("disk_write",) * ranks.rank)

    monkeypatch.setattr(run_plan, "machine_rates", known)
    found = on_ranks(2, lambda ranks: rates_per_rank(Config(), CpuDevice(), ranks))
    assert found[0] == found[1], "differing rates could give differing plans"
    rates = found[0].rates
    assert rates.disk_read == 1e9 / 2
    assert rates.update["fp32"] == base_rates.update["fp32"] / 2
    assert rates.compute["fp32"] == base_rates.compute["fp32"] / 2, "ranks share the cores"
    assert base_rates.logits is not None
    assert rates.logits == base_rates.logits / 2
    assert (rates.all_gather, rates.all_to_all) == (7e6, base_rates.all_to_all)
    assert (found[0].measured, found[0].nominal) == ("2026-01-01", ("disk_write",))
    models = [small_model() for _ in range(2)]

    def origin(ranks: DistContext) -> str:
        config = settings(
            tmp_path, {"weights": "auto", "optimizer_state": "auto", "gradients": "auto"}
        )
        with infinity.initialize(models[ranks.rank], config, ranks=ranks)[0] as engine:
            return engine.plan.rates_origin

    assert on_ranks(2, origin) == ["measured 2026-01-01; nominal, not measured: disk_write"] * 2


def test_gpu_rank_has_full_device_rates_and_shared_host_rates() -> None:
    rates, guessed = with_links(nominal(unified=False), 4, nodes=2, unified=False)
    assert set(guessed) == NAMES | {"between_nodes", "between_hosts"}
    rank_rates = rates.of_rank(4, 2, unified=False)
    assert rank_rates.disk_mixed == rates.disk_mixed / 4
    assert (rank_rates.compute, rank_rates.to_device, rank_rates.device_update) == (
        rates.compute, rates.to_device, rates.device_update,
    )  # fmt: skip
    assert rates.between_nodes is not None
    # Four ranks each receive the shards of 4 of the 7 other ranks through the node's port.
    fast = replace(rates, all_gather=1e12, all_to_all=1e12).of_rank(4, 2, unified=False)
    assert fast.all_gather == rates.between_nodes
    assert fast.all_to_all == pytest.approx(rates.between_nodes * 7 / (4 * 4))
    measured, guessed = with_links(rates, 4, nodes=2, unified=False, across=True)
    assert guessed == ()
    assert measured == rates
