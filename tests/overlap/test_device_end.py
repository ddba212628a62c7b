"""Tests of the lifetime of device memory: no copy uses memory that has been freed."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from support.fake_accelerator import FakeAccelerator, Range
from support.internals import components
from support.small import ON_DEVICE, ON_DISK, batch, small_engine, train
from torch import Tensor

from infinity.errors import EngineFailedError
from infinity.storage.device import HAPPENED, Event
from infinity.types import Kind

IN_RAM = {"weights": "host", "optimizer_state": "host", "gradients": "host"}


class CountingAccelerator(FakeAccelerator):
    """Accelerator that counts copies in flight at close and threads using the compute stream."""

    def __init__(self, **more: Any) -> None:
        self.num_in_flight = -1
        self.bytes_to_host = 0
        self.mapped_at_return: list[Range] | None = None
        self.worker_threads: set[int] = set()
        self.compute_threads: set[str] = set()
        super().__init__(1, kernels=True, **more)

    def attach_worker_thread(self) -> None:
        self.worker_threads.add(threading.get_ident())

    def copy_d2h(self, target: Tensor, source: Tensor, after: Event = HAPPENED) -> Event:
        if threading.get_ident() not in self.worker_threads:
            self.compute_threads.add(threading.current_thread().name)
        return super().copy_d2h(target, source, after)

    def copy_d2h_unordered(self, target: Tensor, source: Tensor, after: Event = HAPPENED) -> Event:
        self.bytes_to_host += target.numel()
        return super().copy_d2h_unordered(target, source, after)

    def close(self) -> None:
        self.num_in_flight = sum(not event.done() for event in set(self._writing.values()))
        super().close()

    def return_freed_memory(self) -> None:
        self.mapped_at_return = [one for one in self.reserved if one.mapping() is not None]


@pytest.mark.parametrize("update", ["cpu", "device"])
@pytest.mark.parametrize("placement", [IN_RAM, ON_DEVICE, ON_DISK], ids=["ram", "device", "disk"])
@pytest.mark.parametrize("last_call", ["backward", "step"])
def test_no_copy_in_flight_when_memory_freed(
    tmp_path: Path, placement: dict[str, str], update: str, last_call: str
) -> None:
    device = CountingAccelerator(max_delay_s=0.05)
    with small_engine(tmp_path, placement, arguments={"device": device}, update=update) as engine:
        engine.backward(engine(batch(0)))
        if last_call == "step":
            engine.step()
    assert device.num_in_flight == 0
    assert device.mapped_at_return == []  # when the allocator returns freed memory


@pytest.mark.parametrize("placement", [ON_DEVICE, ON_DISK], ids=["device", "disk"])
def test_only_training_thread_uses_compute_stream(
    tmp_path: Path, placement: dict[str, str]
) -> None:
    """A worker thread that copies waits for the training thread's stream, not for its own."""
    device, scratch = CountingAccelerator(max_delay_s=0.001), tmp_path / "nvme"
    scratch.mkdir()
    with small_engine(scratch, placement, arguments={"device": device}) as engine:
        for index in range(3):
            engine.backward(engine(batch(index)))
            engine.step()
            engine.save_checkpoint(tmp_path / "saved", f"s{index}", wait=False)
    assert device.compute_threads <= {threading.main_thread().name}
    assert len(device.worker_threads) >= 2  # at least the optimizer pass and a copier


def test_gradients_released_after_their_copies(tmp_path: Path) -> None:
    """Only the first micro-batch of a window copies gradients directly to RAM."""
    device = FakeAccelerator(1, max_delay_s=0.001)
    more: dict[str, Any] = {"precision": "fp32", "gradient_accumulation_steps": 2}
    with small_engine(tmp_path, IN_RAM, arguments={"device": device}, **more) as engine:
        copies = components(engine).gradients._copies
        engine.backward(engine(batch(0)))
        engine.step()
        assert copies._sent
        device.synchronize()
        engine.backward(engine(batch(1)))
        assert not copies._in_flight
        assert copies._nbytes == 0


def test_cpu_update_copies_state_unordered(tmp_path: Path) -> None:
    """Compute uses only weights and gradients on the device, so other state needs no ordering."""
    device, placement = (
        CountingAccelerator(max_delay_s=0.001),
        {**IN_RAM, "optimizer_state": "device"},
    )
    more: dict[str, Any] = {"arguments": {"device": device}, "update": "cpu", "precision": "bf16"}
    with small_engine(tmp_path, placement, **more) as engine:
        train(engine, 2)
        engine.settle()
        plan, kinds = engine.plan, (Kind.RESIDUAL, Kind.MOMENT1, Kind.MOMENT2)
        assert device.bytes_to_host == 2 * sum(
            plan.range_bytes(u, k) for u in plan.local_units for k in kinds
        )


class FailingWorkers(FakeAccelerator):
    """Accelerator on which worker threads fail to start."""

    def attach_worker_thread(self) -> None:
        raise RuntimeError("the driver is not to be found")


@pytest.mark.parametrize("micro_batches", [1, 2])  # with two, a worker thread sums the gradients
def test_worker_thread_start_failure_raises(tmp_path: Path, micro_batches: int) -> None:
    device, message = FailingWorkers(1, kernels=True), "the driver is not to be found"
    config = {"precision": "fp32", "gradient_accumulation_steps": micro_batches}
    options: dict[str, Any] = {"arguments": {"device": device}, **config}
    with (
        small_engine(tmp_path, IN_RAM, **options) as engine,
        pytest.raises((EngineFailedError, RuntimeError), match=message),
    ):
        train(engine, 3)
