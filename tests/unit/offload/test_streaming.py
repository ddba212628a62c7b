"""Tests of streamed updates during saving, durable steps and an early close.

`parity/test_streamed_updates.py` tests what they compute and transfer.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
from support.durable import PLACEMENTS, equal, gated, state_of, undisturbed
from support.fake_accelerator import FakeAccelerator
from support.grids import diagonal
from support.internals import components
from support.ordered_accelerator import ordered_device
from support.small import (
    MIXED,
    ON_DEVICE,
    ON_DISK,
    batch,
    masters,
    same,
    settings,
    small_engine,
    small_model,
    train,
)
from support.trainer import cpu_update_share
from unit.checkpoint.test_saving import SlowWriter, saved_masters

import infinity
from infinity.profiling.trace_reader import read_timeline

IN_RAM = dict.fromkeys(("weights", "optimizer_state", "gradients"), "host")
TIERS = {"ram": IN_RAM, "mixed": MIXED, "disk": ON_DISK, "ram, CPU share": IN_RAM}
SHARE = {"ram, CPU share": 0.4}


def model_of(tiers: str) -> Any:
    """Return a model; its units have several chunks if the CPU updates a share of them."""
    return small_model(width=64) if tiers in SHARE else small_model()


def kernel_device(seed: int = 0, max_delay_s: float = 0.002) -> FakeAccelerator:
    return FakeAccelerator(seed, max_delay_s=max_delay_s, kernels=True)


def has_cpu_chunks(engine: infinity.Engine) -> bool:
    """Return True if the CPU updates a share of the chunks while others are streamed."""
    plan = engine.plan
    batches_by_unit = (
        plan.chunk_batches(*pair) for pair in zip(plan.units, plan.placements, strict=True)
    )
    return any(not streamed for batches in batches_by_unit for _, streamed in batches)


# --- saving ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("tiers", TIERS)
def test_checkpoint_holds_state_at_time_of_call(
    tmp_path: Path, tiers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No updated chunk is written back before the copier has read the previous state."""
    nvme, saved = tmp_path / "nvme", tmp_path / "saved"
    nvme.mkdir()
    slow = SlowWriter(monkeypatch)
    slow.go.set()
    arguments = {"device": kernel_device()}
    more: dict[str, Any] = {"precision": "bf16", "update": "device", "arguments": arguments}
    with (
        cpu_update_share(SHARE.get(tiers, 0.0)),
        small_engine(nvme, TIERS[tiers], model_of(tiers), **more) as engine,
    ):
        assert has_cpu_chunks(engine) == (tiers in SHARE)
        train(engine, 2)
        before = masters(engine)
        slow.go.clear()
        engine.save_checkpoint(saved)
        threading.Timer(0.3, slow.go.set).start()
        train(engine, 3, first=6)
        engine.finish_saving()
        found = saved_masters(saved, "global_step2")
        assert same({name: before[name] for name in found}, found)
        assert not same(before, masters(engine))


# --- durable steps --------------------------------------------------------------------------------


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_durable_run_resumes_with_same_state(tmp_path: Path, placement: str) -> None:
    more = {"nvme_path": str(tmp_path), "durable": True, "commit_every": 2, "resume": "auto"}
    for step in (0, 2):
        fake = kernel_device(step)
        config = settings(tmp_path, PLACEMENTS[placement], update="device", **more)
        engine, *_ = infinity.initialize(gated(), config, device=fake)
        with engine:
            assert equal(state_of(engine), undisturbed(step))
            train(engine, 2, first=step)
            assert equal(state_of(engine), undisturbed(step + 2))
        assert fake.num_updates > 0
        assert not fake.violations


@pytest.mark.parametrize(
    ("placement", "update"),
    diagonal(
        [ON_DEVICE, {**ON_DEVICE, "weights": "disk"}, {**IN_RAM, "weights": "device"}, IN_RAM],
        ["cpu", "device"],
    ),
)
def test_commit_reads_after_queued_updates_and_copies(
    tmp_path: Path, placement: dict[str, str], update: str
) -> None:
    """Updates and write-backs may be queued but not finished on the device."""
    with ordered_device(seed=1, kernels=True) as device:
        config = settings(tmp_path, placement, durable=True, commit_every=1, update=update)
        engine, *_ = infinity.initialize(small_model(), config, device=device)
        with engine:
            train(engine, 3)
            engine.settle()
        assert device.violations == []


# --- early close ----------------------------------------------------------------------------------


@pytest.mark.parametrize("tiers", TIERS)
def test_close_waits_for_in_flight_chunks(tmp_path: Path, tiers: str) -> None:
    """In-flight chunks read and write memory that close frees."""
    fake = kernel_device(max_delay_s=0.2)
    more: dict[str, Any] = {"update": "device", "arguments": {"device": fake}}
    share = SHARE.get(tiers, 0.0)
    with (
        cpu_update_share(share),
        small_engine(tmp_path, TIERS[tiers], model_of(tiers), **more) as engine,
    ):
        engine.backward(engine(batch(0)))
        engine.step()
        in_flight = components(engine).optimizer_pass.updates._in_flight
        while not len(in_flight):
            time.sleep(0.0005)
    assert len(in_flight) == 0
    assert not fake.violations


# --- trace ----------------------------------------------------------------------------------------


def test_trace_records_every_streamed_chunk(tmp_path: Path) -> None:
    fake, nvme = kernel_device(), tmp_path / "nvme"
    nvme.mkdir()
    config = settings(nvme, IN_RAM, update="device", trace=str(tmp_path / "t.json"))
    with infinity.initialize(small_model(), config, device=fake)[0] as engine:
        train(engine, 3)
        engine.settle()
        moved = engine.counters()
    timeline = read_timeline(tmp_path / "t.json")
    assert timeline.complete
    assert len(timeline.of("update")) == fake.num_updates > 0
    for direction in ("to_device", "from_device"):
        slices = timeline.of(direction)
        assert {"weight", "moment1", "moment2", "gradient"} == {one.what for one in slices}
        assert sum(one.nbytes for one in slices) == moved[direction]
