"""Tests of the ordering of compute on user streams and on the threads of autograd.

See [Note: one chain of compute] in `storage/cuda.py`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from support.backward_thread import NAME, backward_on_a_thread
from support.bare_cuda import bare_cuda_device
from support.fake_accelerator import FakeAccelerator
from support.models import CASES
from support.ordered_accelerator import OrderedAccelerator, Past, ordered_device, watched
from support.small import MIXED, ON_DEVICE, ON_DISK, batch, masters, same, small_engine, train
from support.trainer import Run, make_config
from torch import Tensor

from infinity.errors import ResidencyError
from infinity.optim import cuda as kernels_module

CASE = CASES["gpt"]
LATE_S = 60.0  # copies start only when waited for
IN_RAM = {"weights": "host", "optimizer_state": "host", "gradients": "host"}
TRIPLES = {"ram": ("host",) * 3, "device": ("device",) * 3, "mixed": ("disk", "device", "host")}


def violations_on_many_streams(placement: tuple[str, str, str], **more: Any) -> list[str]:
    """Train on many streams, one block on two of them, and return the ordering violations."""
    more["gradient_accumulation_steps"] = 2
    model, config = CASE.build(), make_config(placement, prefetch_units=0, **more)
    with (
        ordered_device(seed=1, kernels="update" in more, max_delay_s=LATE_S) as device,
        Run(model, config, device=device, poison=None) as r,
    ):
        block = r.engine.module.blocks[1]
        plain = block.forward

        def forward_on_two_streams(x: Tensor) -> Any:
            with device.stream("side"), torch.no_grad():
                plain(torch.ones_like(x))  # independent of the other stream
            return plain(x)

        block.forward = forward_on_two_streams
        for index, one in enumerate(CASE.batches(4)):
            with device.stream(f"forward {index % 2}"):
                loss = one.call(r.engine)
            with device.stream(f"backward {index // 2}"):
                r.engine.backward(loss)
            r.engine.step()
        r.engine.settle()
        del block.forward
        return list(device.violations)


@pytest.mark.parametrize("more", [{}, {"update": "cpu"}, {"update": "device"}], ids=str)
@pytest.mark.parametrize("placement", TRIPLES.values(), ids=TRIPLES)
def test_compute_on_many_streams_ordered(
    placement: tuple[str, str, str], more: dict[str, Any]
) -> None:
    assert violations_on_many_streams(placement, **more) == []


def skip_sync(self: OrderedAccelerator) -> None:
    """The engine does not announce compute with parameters that are bound already."""


def unchained(self: OrderedAccelerator) -> Past:
    """A stream does not wait for the previous one."""
    self._seen = self._current
    return self._streams[self._seen]


@pytest.mark.parametrize(
    ("name", "mistake"), [("sync_compute_stream", skip_sync), ("_chain", unchained)]
)
def test_unchained_streams_detected(
    name: str, mistake: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OrderedAccelerator, name, mistake)
    with pytest.raises(AssertionError, match="is not ordered after"):
        assert violations_on_many_streams(TRIPLES["ram"], update="device") == []


class Stream:
    """Stream that records which streams it waits for."""

    def __init__(self, name: str, waits: list[tuple[str, str]]) -> None:
        self.name = name
        self._waits = waits

    def wait_stream(self, other: Stream) -> None:
        self._waits.append((self.name, other.name))


def test_new_compute_stream_waits_for_previous(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[tuple[str, str]] = []
    one, other = Stream("one", waits), Stream("other", waits)
    current, capturing = [one], [False]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current[0])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    device: Any = bare_cuda_device(monkeypatch)
    device._last_compute_stream = one
    device.sync_compute_stream()
    assert waits == []
    current[0] = other
    for _ in range(2):
        assert device._compute_stream() is other
    assert waits == [("other", "one")]
    found: list[Any] = []

    def attach_and_compute() -> None:
        device.attach_worker_thread()
        current[0] = one
        found.append(device._compute_stream())

    thread = threading.Thread(target=attach_and_compute)
    thread.start()
    thread.join()
    assert (found, waits) == ([other], [("other", "one")])
    device.sync_compute_stream()
    assert waits[1:] == [("one", "other")]
    capturing[0] = True
    with pytest.raises(ResidencyError, match="while a CUDA graph is being captured"):
        device.sync_compute_stream()


def test_cuda_graph_capture_rejected_engine_usable(tmp_path: Path) -> None:
    """Around or inside a call; during a capture CUDA forbids synchronizing with the device."""

    class Capturing(FakeAccelerator):
        now = False

        @contextmanager
        def graph(self) -> Iterator[None]:
            self.now = True
            try:
                yield
            finally:
                self.now = False

        def sync_compute_stream(self) -> None:
            if self.now:
                raise ResidencyError("a graph is captured")

        def synchronize(self) -> None:
            assert not self.now
            super().synchronize()

    device = Capturing(1)
    with small_engine(tmp_path, IN_RAM, arguments={"device": device}) as engine:
        expected = train(engine, 1)
        loss = engine(batch(0))
        for called in (engine, engine.module, lambda _: engine.backward(loss), engine.module.norm):
            with device.graph(), pytest.raises(ResidencyError, match="captured"):
                called(batch(0))
        block = engine.module.blocks[1]
        plain = block.up.forward

        def captured(x: Tensor) -> Any:
            with device.graph():
                return block.down.weight.sum() + plain(x)

        block.up.forward = captured
        with pytest.raises(ResidencyError, match="captured"):
            engine(batch(0))
        del block.up.forward
        assert train(engine, 1, first=1)[0] < 2 * expected[0]


# --- backward on another thread -------------------------------------------------------------------


@pytest.mark.parametrize("placement", [IN_RAM, MIXED, ON_DISK], ids=["ram", "mixed", "disk"])
@pytest.mark.parametrize("checkpoint", ["none", "units"])
def test_backward_on_another_thread_gives_same_results(
    tmp_path: Path,
    placement: dict[str, str],
    checkpoint: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    more: dict[str, Any] = {
        "gradient_accumulation_steps": 2, "activations": {"checkpoint": checkpoint},
    }  # fmt: skip
    with small_engine(tmp_path, ON_DEVICE, **more) as engine:
        expected = train(engine, 4), masters(engine)
    ran = backward_on_a_thread(monkeypatch)
    device = FakeAccelerator(3, max_delay_s=0.005, kernels=True, on_demand=True)
    with small_engine(tmp_path, placement, arguments={"device": device}, **more) as engine:
        assert train(engine, 4) == expected[0]
        assert same(masters(engine), expected[1])
    assert ran == [NAME] * 8


@pytest.mark.parametrize("placement", TRIPLES.values(), ids=TRIPLES)
def test_backward_on_another_thread_ordered(
    placement: tuple[str, str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with ordered_device(seed=1, kernels=True, max_delay_s=LATE_S) as device:
        backward_on_a_thread(monkeypatch, lambda: watched(device))
        with Run(CASE.build(), make_config(placement), device=device, poison=None) as r:
            for one in CASE.batches(3):
                r.engine.backward(one.call(r.engine))
                r.engine.step()
        assert device.violations == []


# --- kernels rejected by the driver ---------------------------------------------------------------


class RejectedLauncher:
    """Launcher whose code compiles but is rejected when loaded."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __call__(self, launch: object, stream: object) -> None:
        raise RuntimeError("CUDA_ERROR_NO_BINARY_FOR_GPU")

    def load(self, variant: object) -> None:
        """Compilation succeeds."""

    def scratch(self, num_elements: int, stream: object) -> Tensor:
        return torch.zeros(num_elements, dtype=torch.float64)


class IdleLauncher(RejectedLauncher):
    def __call__(self, launch: object, stream: object) -> None:
        """Compute nothing."""


@pytest.mark.parametrize(
    ("launcher", "reason"),
    [
        (RejectedLauncher, "CUDA_ERROR_NO_BINARY_FOR_GPU"),
        (IdleLauncher, "10 ones squared are 0, and 1 - 0.25 is 1"),
    ],
)
def test_failed_kernel_launch_disables_kernels(
    launcher: type[RejectedLauncher], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels_module, "CudaLauncher", launcher)
    device = bare_cuda_device(monkeypatch)
    assert [device.why_no_kernels() for _ in range(2)] == [reason] * 2
    (warning,) = device.warnings  # emitted once
    assert "so the CPU updates" in warning
    assert reason in warning
