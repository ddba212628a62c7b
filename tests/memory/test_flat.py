"""Tests that memory, file descriptors, threads and disk space do not grow while training."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from support import forked
from support.fake_accelerator import FakeAccelerator
from support.grids import diagonal
from support.process_memory import SMALL_BYTES, count_held, resident_bytes
from support.small import MIXED, ON_DISK, batch, settings, small_model, train

import infinity
from infinity.common.malloc import return_freed_memory
from infinity.storage.host_arena import HostArena
from infinity.storage.reservations import PROCESS


@dataclass(frozen=True)
class Usage:
    memory: int
    files: frozenset[tuple[str, str]]  # (descriptor, target)
    threads: frozenset[str]
    on_disk: int
    reserved: int

    @classmethod
    def measure(cls, path: Path) -> Usage:
        gc.collect()
        return_freed_memory()
        files = [p.stat() for p in path.rglob("*") if p.is_file()]
        return cls(
            memory=resident_bytes(),
            files=frozenset(open_files()),
            threads=frozenset(str(thread) for thread in threading.enumerate()),
            on_disk=sum(file.st_size for file in files),
            reserved=PROCESS.total("host") + PROCESS.total("device"),
        )


def open_files() -> Iterator[tuple[str, str]]:
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the descriptor of the listing itself
            yield name, os.readlink(f"/proc/self/fd/{name}")


@pytest.mark.parametrize(
    ("steps", "saves"), [(30, 10), pytest.param(200, 20, marks=pytest.mark.big)]
)
@pytest.mark.parametrize(("placement", "device"), diagonal([MIXED, ON_DISK], ["cpu", "fake"]))
def test_steps_and_saves_do_not_leak(
    tmp_path: Path, placement: dict[str, str], device: str, steps: int, saves: int
) -> None:
    before, after = forked.call(usage_of_training, tmp_path, placement, device, steps, saves)
    assert not after.files - before.files
    assert not after.threads - before.threads
    assert after.on_disk == before.on_disk
    assert after.reserved == before.reserved
    assert after.memory - before.memory < SMALL_BYTES
    assert not list((tmp_path / "nvme").iterdir())
    assert len(list((tmp_path / "saved").iterdir())) == 1


def usage_of_training(
    path: Path, placement: dict[str, str], device: str, steps: int, saves: int
) -> tuple[Usage, Usage]:
    count_held()
    reserve = HostArena.__init__

    def reserve_and_touch(arena: HostArena, nbytes: int) -> None:
        reserve(arena, nbytes)
        arena.view(0, arena.nbytes).fill_(0)

    # Otherwise timing decides when a buffer is first touched.
    HostArena.__init__ = reserve_and_touch
    (scratch := path / "nvme").mkdir()
    # A unit has 2 MiB: a leak of one per step or save would be at least 20 MiB.
    model = small_model(width=512, num_blocks=2)
    target = "cpu" if device == "cpu" else FakeAccelerator(1)
    engine, *_ = infinity.initialize(
        model, {**settings(scratch, placement), "chunk_size": 1 << 18}, device=target
    )
    with engine:
        torch_device = engine.device
        train_on(engine, 3, torch_device)
        engine.save_weights(path / "saved")
        with torch.no_grad():
            engine(batch(0, torch_device))
        engine.settle()
        before = Usage.measure(scratch)
        for _ in range(saves):
            train_on(engine, steps // saves, torch_device)
            engine.save_weights(path / "saved")
        engine.settle()
        return before, Usage.measure(scratch)


def train_on(engine: infinity.Engine, steps: int, device: torch.device) -> None:
    for index in range(steps):
        loss = engine(batch(index, device))
        engine.backward(loss)
        engine.step()


@pytest.mark.parametrize("weights", ["host", "disk"])  # stored there, or in slots
def test_closed_engine_holds_no_memory(tmp_path: Path, weights: str) -> None:
    """Also while referenced; the baseline is taken after an engine with one block has closed."""
    grown, remaining = forked.call(memory_of_engine, tmp_path, weights)
    assert grown > 256 << 20
    assert remaining < SMALL_BYTES


def memory_of_engine(path: Path, weights: str) -> tuple[int, int]:
    count_held()
    config = settings(path, {"weights": weights, "optimizer_state": "host", "gradients": "host"})
    for num_blocks in (1, 8):
        start = resident_bytes()
        model = small_model(width=1024, num_blocks=num_blocks)
        engine, *_ = infinity.initialize(model, {**config, "chunk_size": 1 << 20})
        train(engine, 1)
        grown = resident_bytes() - start
        engine.close()
    return grown, resident_bytes() - start
