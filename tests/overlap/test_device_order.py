"""Everything that touches device memory is ordered, and the host waits for almost nothing.

See `support/ordered_accelerator.py`: an access that a GPU would not have ordered is a violation,
even where the bytes were right.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.models import CASES
from support.ordered_accelerator import OrderedAccelerator, ordered_device
from support.trainer import PLACEMENTS, Run, make_config, train
from torch import Tensor

from infinity.errors import InfinityWarning
from infinity.memory import slots as slots_module
from infinity.memory.cuda_device import CudaDevice
from infinity.memory.device import HAPPENED
from infinity.memory.gradients import GradientStore
from infinity.memory.host import HostArena
from infinity.memory.lanes import Lanes
from infinity.training import streams as streams_module
from infinity.training.streams import Streams
from infinity.training.updates import Updates

CASE = CASES["gpt"]
IN_RAM = ("host", "host", "host")


def run(placement: tuple[str, str, str], *, kernels: bool, steps: int = 3, **changes: Any) -> Any:
    """Train with few slots; poisoning would order everything. Returns the device."""
    config = make_config(placement, look_ahead=0, **changes)
    batches = CASE.batches(steps * config.get("gradient_accumulation_steps", 1))
    with ordered_device(seed=1, kernels=kernels) as device:
        result = train(CASE.build(), batches, config, device=device, poison=None)
    return SimpleNamespace(device=device, result=result)


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("update", ["no_kernels", "cpu", "device"])
def test_every_access_is_ordered(update: str, micro_batches: int) -> None:
    found = {}
    expected = None
    kernels = update != "no_kernels"
    changes: dict[str, Any] = {"update": update} if kernels else {}
    changes["gradient_accumulation_steps"] = micro_batches
    for placement in PLACEMENTS:
        done = run(placement, kernels=kernels, **changes)
        expected = expected or done.result
        found[placement] = done.device.violations + done.result.differences(expected)
    assert {key: value for key, value in found.items() if value} == {}


def forget_the_readers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots_module, "after_all", lambda ready, compute: ready)


def publish_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    publish = Updates._publish

    def too_early(self: Updates, *arguments: Any) -> None:
        assert self._target is not None
        self._target[0].free_after = HAPPENED
        publish(self, *arguments)

    monkeypatch.setattr(Updates, "_publish", too_early)


def compute_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OrderedAccelerator, "compute_wait", lambda self, event: event.wait)


def update_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel does not wait for what comes in."""
    monkeypatch.setattr(streams_module, "after_all", lambda after, *brought: after)


def go_home_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What goes back does not wait for the kernel."""
    copy = Lanes.copy_back

    def too_early(self: Lanes, target: Any, source: Any, after: Any, label: Any) -> Any:
        return copy(self, target, source, HAPPENED, label)

    monkeypatch.setattr(Lanes, "copy_back", too_early)


def reuse_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A buffer is filled again before its last chunk is home."""
    begin = Streams.begin

    def too_early(self: Streams, work: Any) -> Any:
        self._turn = 0
        return begin(self, work)

    monkeypatch.setattr(Streams, "begin", too_early)


def forget_what_is_landing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sweep takes gradients that are still on their way to RAM."""
    hand_over = GradientStore.hand_over

    def nothing(self: GradientStore) -> dict[int, Any]:
        hand_over(self)
        return {}

    monkeypatch.setattr(GradientStore, "hand_over", nothing)


def land_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Units are lent out while their state is on its way home."""
    monkeypatch.setattr(Streams, "land", lambda self: self._under_way.popleft().work)


@pytest.mark.parametrize(
    "mistake",
    [update_at_once, go_home_at_once, reuse_at_once, forget_what_is_landing, land_at_once],
)
def test_a_missing_wait_of_a_streamed_update_is_seen(
    mistake: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mistake(monkeypatch)
    with pytest.raises(AssertionError, match=r"is not ordered after|overlaps an earlier one"):
        run(IN_RAM, kernels=True, update="device")


@pytest.mark.parametrize("mistake", [forget_the_readers, publish_at_once, compute_at_once])
def test_a_missing_wait_is_seen_though_the_bytes_are_right(
    mistake: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mistake(monkeypatch)
    with pytest.raises(AssertionError, match="is not ordered after"):
        run(IN_RAM, kernels=False, gradient_accumulation_steps=2)


@pytest.mark.parametrize("update", ["cpu", "device"])
def test_the_host_waits_once_a_step_for_the_norm(update: str) -> None:
    """Weights, state and gradients in RAM: no copy is waited for, only the sums of squares."""
    steps = 6
    done = run(IN_RAM, kernels=True, steps=steps, precision="bf16", update=update)
    waits = done.device.host_waits
    assert (done.device.num_updates > 0) == (update == "device")
    assert waits["copy"] == 0
    assert waits["synchronize"] == 1  # of close()
    assert waits["compute"] <= steps  # fewer where another thread saw the end first


def test_a_wait_of_the_host_is_counted() -> None:
    with (
        ordered_device(seed=1, kernels=True, max_delay_s=0.05) as device,
        Run(CASE.build(), make_config(IN_RAM), device=device, poison=None) as r,
    ):
        (one,) = CASE.batches(1)
        r.engine.backward(one.call(r.engine))
        before = device.host_waits["copy"]
        for parameter in r.engine.module.parameters():  # their copies begin up to 50 ms late
            r.engine.gradient(parameter)
        assert device.host_waits["copy"] > before


def test_compute_through_an_alias_of_stale_weights_is_waited_for() -> None:
    """The slot is reused when the alias dies, but what was computed with it may not be over."""
    config = make_config(IN_RAM, look_ahead=0)
    with (
        ordered_device(seed=1) as device,
        Run(CASE.build(), config, device=device, poison=None) as r,
    ):
        engine = r.engine
        kept: list[Tensor] = []
        for batch in CASE.batches(4):
            loss = batch.call(engine)
            weights = next(p for p in engine.module.parameters() if p.ndim == 2)
            kept.append(weights.detach())
            engine.backward(loss)
            engine.step()  # the weights are given up, the alias keeps their slot
            with torch.no_grad():
                kept[-1].sum()  # compute over the stale weights
            kept.clear()
        engine.settle()
        assert device.violations == []


def bare_cuda_device() -> CudaDevice:
    """One without a GPU: only what needs none may be called."""
    device = CudaDevice.__new__(CudaDevice)
    device._pinned = []
    device._node = 0
    device.warnings = []
    return device


def test_a_copy_does_not_cross_from_one_registration_into_the_next() -> None:
    device = bare_cuda_device()
    device._pinned = [(1000, 2000), (2000, 3000), (5000, 6000)]
    assert list(device._registered_parts(1200, 300)) == [(0, 300)]
    assert list(device._registered_parts(1200, 800)) == [(0, 800)]
    assert list(device._registered_parts(1200, 801)) == [(0, 800), (800, 801)]
    assert list(device._registered_parts(1500, 1500)) == [(0, 500), (500, 1500)]
    assert list(device._registered_parts(7000, 10)) == [(0, 10)]
    assert list(device._registered_parts(4990, 20)) == [(0, 10), (10, 20)]


@pytest.mark.parametrize("allowed", [0, 1])
def test_memory_that_cannot_be_pinned_is_told_and_used_all_the_same(
    allowed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver refuses, after `allowed` slices."""
    calls: list[tuple[int, int]] = []

    def register(address: int, size: int, flags: int) -> int:
        calls.append((address, size))
        return 0 if len(calls) <= allowed else 2

    freed: list[int] = []
    runtime = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=freed.append)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(CudaDevice, "_PIN_SLICE", 4096)
    device = bare_cuda_device()
    device.pin(HostArena(3 * 4096))
    assert len(calls) == allowed + 1
    (warning,) = device.warnings
    assert f"{4 * (3 - allowed)} KiB" in warning.replace(".00", "")
    assert "CUDA error 2" in warning
    device.close()
    assert freed == [address for address, _ in calls[:allowed]]


def test_what_a_device_warns_of_is_told_at_the_start() -> None:
    with ordered_device(seed=1) as device:
        device.warnings = ["not pinned, slow"]
        config = make_config(IN_RAM)
        with (
            pytest.warns(InfinityWarning, match="not pinned, slow"),
            Run(CASE.build(), config, device=device, poison=None) as r,
        ):
            assert r.engine.warnings == ("not pinned, slow",)
