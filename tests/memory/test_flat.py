"""After the second step nothing grows: memory, descriptors, threads, space on disk."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import torch
from support.fake_accelerator import FakeAccelerator
from support.small import MIXED, ON_DISK, batch, settings, small_model, train

import infinity
from infinity.heap import return_freed_memory
from infinity.storage.device import PROCESS

MIB = 1 << 20


@dataclass(frozen=True)
class Held:
    rss: int
    files: frozenset[tuple[str, str]]  # descriptors, and what they are open on
    threads: frozenset[threading.Thread]
    on_disk: int
    reserved: int

    @classmethod
    def now(cls, path: Path) -> Held:
        gc.collect()  # what earlier tests left in cycles must not end between two looks
        return_freed_memory()
        files = [p.stat() for p in path.rglob("*") if p.is_file()]
        return cls(
            rss=psutil.Process().memory_info().rss,
            files=frozenset(open_files()),
            threads=frozenset(threading.enumerate()),
            on_disk=sum(f.st_blocks * 512 for f in files),
            reserved=PROCESS.total("host") + PROCESS.total("device"),
        )


def open_files() -> Iterator[tuple[str, str]]:
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the one that lists them
            yield name, os.readlink(f"/proc/self/fd/{name}")


@pytest.mark.parametrize(
    ("steps", "saves"), [(30, 10), pytest.param(200, 20, marks=pytest.mark.big)]
)
@pytest.mark.parametrize("device", ["cpu", "fake"])
@pytest.mark.parametrize("placement", [ON_DISK, MIXED], ids=["disk", "mixed"])
def test_many_steps_and_saves(
    tmp_path: Path, placement: dict[str, str], device: str, steps: int, saves: int
) -> None:
    scratch, saved = tmp_path / "nvme", tmp_path / "saved"
    scratch.mkdir()
    # A unit is 2 MiB: one that leaked with every step or save would be 20 MiB at least.
    model = small_model(width=512, num_blocks=2)
    target = "cpu" if device == "cpu" else FakeAccelerator(1)
    engine, *_ = infinity.initialize(
        model, {**settings(scratch, placement), "chunk_size": 1 << 18}, device=target
    )
    with engine:
        place = engine.device
        train_on(engine, 3, place)
        engine.save_weights(saved)
        with torch.no_grad():
            engine(batch(0, place))
        engine.settle()
        before = Held.now(scratch)
        for _ in range(saves):
            train_on(engine, steps // saves, place)
            engine.save_weights(saved)
        engine.settle()
        after = Held.now(scratch)
    assert not after.files - before.files
    assert not after.threads - before.threads
    assert after.on_disk == before.on_disk
    assert after.reserved == before.reserved
    assert after.rss - before.rss < 16 * MIB
    assert not list(scratch.iterdir())
    assert len(list(saved.iterdir())) == 1


def train_on(engine: infinity.Engine, steps: int, place: torch.device) -> None:
    for index in range(steps):
        loss = engine(batch(index, place))
        engine.backward(loss)
        engine.step()


@pytest.mark.parametrize("weights", ["host", "disk"])  # at rest, or in slots
def test_a_closed_engine_holds_no_memory(tmp_path: Path, weights: str) -> None:
    """Even while somebody still has the object."""
    model = small_model(width=1024, num_blocks=8)
    config = settings(tmp_path, {"weights": weights, "moments": "host", "gradients": "host"})
    config["chunk_size"] = 1 << 20
    engine, *_ = infinity.initialize(model, config)
    train(engine, 1)
    state = sum(engine.plan.tier_bytes[t] for t in ("device", "host"))
    state -= engine.plan.memory["host"]["process"]
    assert state > 256 * MIB
    before = psutil.Process().memory_info().rss
    engine.close()
    assert before - psutil.Process().memory_info().rss > 0.9 * state
    assert engine.plan.num_trained
