"""Tests of the thread that sums the gradients of a device with separate memory."""

from __future__ import annotations

import errno
import gc
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.fake_accelerator import FakeAccelerator
from support.internals import components
from support.ordered_accelerator import ordered_device
from support.small import (
    MIXED,
    ON_DEVICE,
    ON_DISK,
    batch,
    masters,
    same,
    small_engine,
    small_model,
    train,
)
from torch import Tensor

from infinity.errors import EngineFailedError, TransferError
from infinity.offload import gradient_sums, gradient_worker
from infinity.offload.gradient_copies import Copy
from infinity.offload.gradient_sums import GradientWindows
from infinity.offload.gradient_worker import GradientWorker
from infinity.offload.transfers import Transfers
from infinity.profiling.trace_reader import read_timeline
from infinity.storage.device import HAPPENED, CpuDevice, Event

THREAD = "infinity-gradients"
IN_RAM = {"weights": "host", "optimizer_state": "host", "gradients": "host"}
SUMMED = {"weights": "device", "optimizer_state": "host", "gradients": "host"}


class ManualEvent:
    """Event set by the test."""

    def __init__(self) -> None:
        self._set = threading.Event()

    def done(self) -> bool:
        return self._set.is_set()

    def wait(self) -> None:
        assert self._set.wait(60)

    def set(self) -> None:
        self._set.set()


@contextmanager
def open_worker(nbytes: int = 1000) -> Iterator[GradientWorker]:
    worker = GradientWorker(Transfers(CpuDevice(), None), torch.zeros(nbytes, dtype=torch.uint8))
    worker.open()
    try:
        yield worker
    finally:
        worker.close()
        assert THREAD not in {thread.name for thread in threading.enumerate()}


def test_windows_read_in_expected_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Windows of ranks fill late; one read for a later unit is not dropped for an earlier one."""
    reads: list[int] = []
    slow, quick = ManualEvent(), HAPPENED

    def read(pieces: Any, label: tuple[int, str]) -> Event:
        reads.append(label[0])
        return HAPPENED

    monkeypatch.setattr(gradient_sums, "num_gradient_windows", lambda plan: 2)
    monkeypatch.setattr(gradient_sums, "gradient_window_bytes", lambda plan: 4096)
    plan: Any = SimpleNamespace(
        local_units=[SimpleNamespace(trained_segments=[0])] * 5, ranks=1,
        gradient_bytes=lambda unit: 4096, unified=False,
    )  # fmt: skip
    extents: Any = {unit: SimpleNamespace(nbytes=4096) for unit in range(5)}
    transfers: Any = SimpleNamespace(read=read, write=lambda pieces, label: tickets.pop(0))
    windows = GradientWindows(plan, transfers, torch.float32, extents)
    tickets: list[Event] = [quick, quick, quick, slow, slow]
    for micro_batch in range(2):
        for unit in (4, 3, 2, 1, 0):
            if micro_batch:  # the first two are expected while both windows are being written
                windows.expect(unit)
                if unit == 3:
                    slow.set()
        for unit in (4, 3, 2, 1, 0):
            windows.range(unit)
            windows.count(unit)
        tickets += [quick] * 5
    assert reads == [4, 3, 2, 1, 0]


@pytest.mark.parametrize("seed", range(8))
def test_tasks_run_in_order_with_their_bytes(seed: int) -> None:
    """Copies complete in any order; no byte is reused before its task has run."""
    rng = random.Random(seed)
    count, size = 400, 1000
    events = [ManualEvent() for _ in range(count)]
    seen: list[int] = []
    wrong: list[int] = []

    def release() -> None:
        """Complete the copies in random order, with at most 20 in flight."""
        waiting = list(range(20))
        for following in range(20, count + 20):
            events[waiting.pop(rng.randrange(len(waiting)))].set()
            waiting += [following] if following < count else []
            time.sleep(rng.random() * 1e-4)

    def check(number: int, data: Tensor) -> None:
        seen.append(number)
        if not bool((data == number % 251).all()):
            wrong.append(number)

    with open_worker(size) as worker:
        releaser = threading.Thread(target=release)
        releaser.start()
        for number, event in enumerate(events):
            allocation = worker.allocate(rng.choice([1, 63, 64, 65, 200, 500]))
            assert allocation[0] % 64 == 0
            assert allocation[0] + allocation[1].numel() <= size
            allocation[1].fill_(number % 251)
            worker.put(
                lambda n=number, p=allocation[1]: check(n, p), [HAPPENED, event], None, allocation
            )
        worker.drain()
        releaser.join()
        assert worker._transfers.stalled_s()["gradient"] > 0  # the buffer was full at times
    assert seen == list(range(count))
    assert wrong == []


def test_buffer_allocated_to_last_byte() -> None:
    with open_worker(256) as worker:
        gate = ManualEvent()
        for expected in (0, 64, 128, 192):
            allocation = worker.allocate(64)
            assert allocation[0] == expected
            worker.put(lambda: None, [gate], None, allocation)
        assert worker._free_offset(1) is None
        gate.set()
        worker.drain()
        assert worker.allocate(256)[0] == 0


def test_task_error_raised_until_reset() -> None:
    ran: list[str] = []

    def fail() -> None:
        raise TransferError("lost", path="p", offset=0, length=1, errno=errno.EIO)

    with open_worker() as worker:
        worker.put(lambda: ran.append("before"))
        worker.put(fail)
        worker.put(lambda: ran.append("behind"))
        for call in (worker.drain, worker.check, worker.drain):
            with pytest.raises(TransferError, match="lost") as raised:
                call()
            frames = [entry.name for entry in raised.traceback]
            assert "fail" not in frames  # the stored error keeps no frame alive
        worker.reset()
        worker.put(lambda: ran.append("after"))
        worker.drain()
    assert ran == ["before", "after"]


@pytest.mark.parametrize("end", ["reset", "close"])
def test_reset_and_close_drop_queue_after_copies(end: str) -> None:
    ran: list[int] = []
    begun, gate, last = ManualEvent(), ManualEvent(), ManualEvent()

    class BlockingEvent:
        """Event that is set when the thread waits for the first task."""

        def done(self) -> bool:
            return False

        def wait(self) -> None:
            begun.set()
            gate.wait()

    with open_worker() as worker:
        events: list[Event] = [BlockingEvent(), gate, last]
        for number, event in enumerate(events):
            worker.put(lambda n=number: ran.append(n), [event], None, worker.allocate(300))
        begun.wait()
        ending = threading.Thread(target=getattr(worker, end))
        ending.start()
        gate.set()
        ending.join(0.05)
        assert ending.is_alive()  # a copy into the buffer is in flight
        last.set()
        ending.join(60)
        assert not ending.is_alive()
        if end == "reset":
            worker.put(lambda: ran.append(9))
            worker.drain()
    assert ran == ([9] if end == "reset" else [])


def test_ended_thread_ends_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient_worker, "_ALIVE_CHECK_S", 0.01)
    with open_worker() as worker:
        worker.close()
        worker.put(lambda: None)
        for wait in (worker.drain, worker.reset):
            with pytest.raises(EngineFailedError, match=f"1 gradients wait for thread '{THREAD}'"):
                wait()


def test_close_before_open_or_twice() -> None:
    worker = GradientWorker(Transfers(CpuDevice(), None), torch.zeros(0, dtype=torch.uint8))
    worker.close()
    worker.close()
    with open_worker() as other:
        other.close()


# --- engines -----------------------------------------------------------------------------------


class GatedAccelerator(FakeAccelerator):
    """Accelerator whose copies to the host, after the first `num_free`, wait for the gate."""

    def __init__(self, num_free: int = 0, *, kernels: bool = False) -> None:
        super().__init__(3, max_delay_s=0.0, kernels=kernels)
        self.num_free = num_free
        self.gate = ManualEvent()
        self.sent = 0

    def copy_d2h(self, target: Tensor, source: Tensor, after: Event = HAPPENED) -> Event:
        self.sent += 1
        if after.done() and self.sent > self.num_free:
            after = self.gate
        return super().copy_d2h(target, source, after)


def train_masters(path: Path, device: FakeAccelerator | None, **more: object) -> dict[str, Tensor]:
    arguments = {} if device is None else {"device": device}
    with small_engine(path, model=small_model(num_blocks=1), arguments=arguments, **more) as engine:
        for index in range(4):
            loss = engine(batch(index))
            engine.backward(loss)
            if isinstance(device, GatedAccelerator) and index == 0:
                assert device.sent == 9  # all gradient copies are pending
                assert not device.gate.done()
                engine(batch(9)).item()  # nor does the next forward wait
                device.gate.set()
            engine.step()
        return masters(engine)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_backward_returns_before_first_copy(tmp_path: Path, precision: str) -> None:
    more = {"precision": precision, "gradient_accumulation_steps": 2}
    expected = train_masters(tmp_path, None, placement=ON_DEVICE, **more)
    assert same(train_masters(tmp_path, GatedAccelerator(), placement=SUMMED, **more), expected)


@pytest.mark.parametrize("update", ["cpu", "device"])
def test_step_returns_before_gradient_copies(tmp_path: Path, update: str) -> None:
    """The optimizer pass waits for the copies, one unit at a time, and then frees the gradients."""
    num_parameters = sum(1 for _ in small_model().parameters())
    device = GatedAccelerator(num_parameters - 1, kernels=True)
    more: dict[str, Any] = {"update": update, "arguments": {"device": device}}
    with small_engine(tmp_path, ON_DEVICE) as engine:
        train(engine, 3)
        expected = masters(engine)
    with small_engine(tmp_path, IN_RAM, **more) as engine:
        engine.backward(engine(batch(0)))
        engine.step()
        sent = device.sent
        device.gate.set()  # the last copy was pending, so step cannot have waited for it
        assert sent == num_parameters
        train(engine, 2, first=1)
        engine.settle()
        assert same(masters(engine), expected)
        assert not [held for held in gc.get_objects() if type(held) is Copy]
    assert not device.violations


@pytest.mark.parametrize("kernels", [False, True], ids=["no_kernels", "kernels"])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_training_thread_never_waits_for_gradients(
    tmp_path: Path, kernels: bool, micro_batches: int
) -> None:
    """No wait for copies; at most one for compute per step, if the device sums squares."""
    steps = 5
    with ordered_device(seed=1, kernels=kernels, memory=1 << 24) as device:
        with small_engine(
            tmp_path,
            SUMMED,
            arguments={"device": device},
            precision="bf16",
            gradient_accumulation_steps=micro_batches,
        ) as engine:
            device.host_waits.clear()  # drop the waits of the initial write
            components(engine).gradients._copies._limit = 1 << 30  # or late copies are waited for
            for index in range(steps * micro_batches):
                engine.backward(engine(batch(index)))
                engine.step()
            assert device.host_waits["copy"] == device.host_waits["synchronize"] == 0
            assert device.host_waits["compute"] <= steps
        assert device.violations == []


def num_gradient_threads(
    path: Path, device: FakeAccelerator | str, placement: dict[str, str]
) -> int:
    with small_engine(path, placement, arguments={"device": device}) as engine:
        engine.backward(engine(batch(0)))
        engine.step()
        return [thread.name for thread in threading.enumerate()].count(THREAD)


def test_gradient_thread_started_only_if_needed(tmp_path: Path) -> None:
    for placement in (ON_DISK, MIXED, ON_DEVICE):
        assert num_gradient_threads(tmp_path, "cpu", placement) == 0
    assert num_gradient_threads(tmp_path, FakeAccelerator(1), ON_DEVICE) == 0
    for placement in (ON_DISK, MIXED):
        assert num_gradient_threads(tmp_path, FakeAccelerator(1), placement) == 1


def test_gradient_thread_error_restarts_window(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After any exception of the thread, the repeated window gives the same bits."""
    more = {"gradient_accumulation_steps": 2, "placement": SUMMED}
    expected = train_masters(tmp_path, None, **more)
    with small_engine(
        tmp_path, model=small_model(num_blocks=1), arguments={"device": FakeAccelerator(2)}, **more
    ) as engine:
        sums = components(engine).gradients._sums
        accumulate, calls = sums._kernels.accumulate, []

        def fail_once(target: Tensor, source: Tensor) -> None:
            calls.append(target)
            if len(calls) == 3:
                raise RuntimeError("made by the test")
            accumulate(target, source)

        monkeypatch.setattr(sums._kernels, "accumulate", fail_once)
        errors = []
        while engine.global_steps < 2:
            try:
                engine.backward(engine(batch(2 * engine.global_steps + engine.micro_step)))
                engine.step()
            except RuntimeError as error:
                errors.append((str(error), engine.micro_step))
        assert errors == [("made by the test", 0)]
        assert same(masters(engine), expected)


def test_trace_has_gradient_sums(tmp_path: Path) -> None:
    (tmp_path / "nvme").mkdir()
    found = {}
    for name, device in (("cpu", "cpu"), ("fake", FakeAccelerator(2))):
        trace = tmp_path / f"{name}.json"
        more = {"gradient_accumulation_steps": 2, "trace": str(trace)}
        with small_engine(tmp_path / "nvme", MIXED, arguments={"device": device}, **more) as engine:
            for index in range(4):
                engine.backward(engine(batch(index)))
                engine.step()
            trained_bytes = 4 * sum(p.numel() for p in engine.module.parameters())
        found[name] = read_timeline(trace).of("sums")
    assert found["cpu"] == ()  # on the CPU sums are part of compute
    # In fp32 the first of two gradients is copied to RAM; the second is summed. Two steps.
    assert sum(one.nbytes for one in found["fake"]) == 2 * trained_bytes
