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
from support.inside import components
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
from support.trainer import cpu_beside
from unit.checkpoint.test_saving import SlowWriter, saved_masters

import infinity
from infinity.profiling.trace_reader import read_timeline

IN_RAM = dict.fromkeys(("weights", "optimizer_state", "gradients"), "host")
PLACES = {"ram": IN_RAM, "mixed": MIXED, "disk": ON_DISK, "ram, the CPU beside": IN_RAM}
SHARE = {"ram, the CPU beside": 0.4}


def model_of(place: str) -> Any:
    """Return a model; its units have several chunks if the CPU updates a share of them."""
    return small_model(width=64) if place in SHARE else small_model()


def with_kernels(seed: int = 0, max_delay_s: float = 0.002) -> FakeAccelerator:
    return FakeAccelerator(seed, max_delay_s=max_delay_s, kernels=True)


def by_cpu(engine: infinity.Engine) -> bool:
    """Return True if the CPU updates a share of the chunks while others are streamed."""
    plan = engine.plan
    each = (plan.chunk_batches(*pair) for pair in zip(plan.units, plan.placements, strict=True))
    return any(not streamed for passages in each for _, streamed in passages)


# --- saving ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", PLACES)
def test_checkpoint_holds_state_at_time_of_call(
    tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No updated chunk is written back before the copier has read the previous state."""
    nvme, saved = tmp_path / "nvme", tmp_path / "saved"
    nvme.mkdir()
    slow = SlowWriter(monkeypatch)
    slow.go.set()
    arguments = {"device": with_kernels()}
    more: dict[str, Any] = {"precision": "bf16", "update": "device", "arguments": arguments}
    with (
        cpu_beside(SHARE.get(place, 0.0)),
        small_engine(nvme, PLACES[place], model_of(place), **more) as engine,
    ):
        assert by_cpu(engine) == (place in SHARE)
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
    for at in (0, 2):
        fake = with_kernels(at)
        given = settings(tmp_path, PLACEMENTS[placement], update="device", **more)
        engine, *_ = infinity.initialize(gated(), given, device=fake)
        with engine:
            assert equal(state_of(engine), undisturbed(at))
            train(engine, 2, first=at)
            assert equal(state_of(engine), undisturbed(at + 2))
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
        given = settings(tmp_path, placement, durable=True, commit_every=1, update=update)
        engine, *_ = infinity.initialize(small_model(), given, device=device)
        with engine:
            train(engine, 3)
            engine.settle()
        assert device.violations == []


# --- early close ----------------------------------------------------------------------------------


@pytest.mark.parametrize("place", PLACES)
def test_close_waits_for_in_flight_chunks(tmp_path: Path, place: str) -> None:
    """In-flight chunks read and write memory that close frees."""
    fake = with_kernels(max_delay_s=0.2)
    more: dict[str, Any] = {"update": "device", "arguments": {"device": fake}}
    share = SHARE.get(place, 0.0)
    with (
        cpu_beside(share),
        small_engine(tmp_path, PLACES[place], model_of(place), **more) as engine,
    ):
        engine.backward(engine(batch(0)))
        engine.step()
        streams = components(engine).optimizer_pass.updates._in_flight
        while not len(streams):
            time.sleep(0.0005)
    assert len(streams) == 0
    assert not fake.violations


# --- trace ----------------------------------------------------------------------------------------


def test_trace_records_every_streamed_chunk(tmp_path: Path) -> None:
    fake, nvme = with_kernels(), tmp_path / "nvme"
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
