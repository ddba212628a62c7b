"""Tests on a real GPU of transfers that overlap compute: exact results, few host synchronizations.

`tests/overlap` and `tests/parity` test the same on the fake accelerators.
"""

from __future__ import annotations

import gc
import threading
import traceback
from collections import Counter
from collections.abc import Sequence
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from support.internals import components
from support.small import VOCABULARY, small_model
from torch import Tensor

import infinity
from infinity.errors import ResidencyError
from infinity.plan.plan import UpdatePlace, update_place
from infinity.profiling.trace_reader import read_timeline
from infinity.profiling.trace_shares import Shares
from infinity.storage.cuda_events import CudaEvent
from infinity.storage.devices import resolve_device

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]
KINDS = ("weights", "moments", "gradients")
ON_DEVICE, IN_RAM, ON_DISK = (dict.fromkeys(KINDS, tier) for tier in ("device", "host", "disk"))
PLACEMENTS = {"ram": IN_RAM, "disk": ON_DISK, "weights_on_device": {**IN_RAM, "weights": "device"}}
STEPS = 8


def make(path: Path, placement: dict[str, str], **options: Any) -> infinity.Engine:
    config = {
        "nvme_path": str(path),
        "precision": "bf16",
        "placement": placement,
        "chunk_size": 16384,
        "prefetch_units": 1,
    }
    model = small_model(num_blocks=6, width=128)
    engine, *_ = infinity.initialize(model, {**config, **options}, device="cuda")
    return engine


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randint(0, VOCABULARY, (4, 32), generator=generator).cuda() for _ in range(2 * STEPS)
    ]


def train(
    path: Path,
    placement: dict[str, str],
    autocast: bool = False,
    streams: Sequence[torch.cuda.Stream | None] = (None, None),
    **options: Any,
) -> tuple[list[float], dict[str, Tensor]]:
    """Train with forward and backward on two `streams`; return losses and final master weights."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    losses = []
    with make(path, placement, **options) as engine:
        token_batches = batches()[: STEPS * engine.plan.micro_batches]
        torch.cuda.synchronize()
        for tokens in token_batches:
            cast = torch.autocast("cuda", torch.bfloat16) if autocast else nullcontext()
            with torch.cuda.stream(streams[0]), cast:
                loss = engine(tokens)
            with torch.cuda.stream(streams[1]):
                if streams[0] is not None:  # ordering the user's streams is the user's task
                    torch.cuda.current_stream().wait_stream(streams[0])
                engine.backward(loss)
            engine.step()
            losses.append(loss.item() if streams[0] is None else loss.detach())
        torch.cuda.synchronize()
        losses = [float(loss) for loss in losses]
        assert not components(engine).device.warnings
        return losses, {n: v.clone() for n, v in engine.state_dict(master=True).items()}


def assert_same(one: Any, other: Any) -> None:
    assert one[0] == other[0]
    assert one[1].keys() == other[1].keys()
    assert [name for name, value in one[1].items() if not torch.equal(value, other[1][name])] == []


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_streamed_updates_match_on_device_updates(
    tmp_path: Path, placement: str, micro_batches: int
) -> None:
    options = {"gradient_accumulation_steps": micro_batches}
    expected = train(tmp_path, ON_DEVICE, **options)
    for update in ("cpu", "device"):
        assert_same(train(tmp_path, PLACEMENTS[placement], update=update, **options), expected)
    with make(tmp_path, PLACEMENTS[placement], update="device") as engine:
        update_places = {update_place(engine.plan, unit.index) for unit in engine.plan.units}
    assert update_places == {UpdatePlace.STREAMED}


@pytest.mark.parametrize("offload", ["none", "host", "disk"])
def test_offloaded_recomputation_inputs_do_not_change_results(tmp_path: Path, offload: str) -> None:
    expected = train(tmp_path, ON_DEVICE)
    activations = {"checkpoint": "units", "offload": offload, "tokens": 4 * 32}
    assert_same(train(tmp_path, IN_RAM, activations=activations), expected)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"activations": {"slices": 2}}, id="slices"),
        pytest.param({"compile": True}, id="compiled", marks=pytest.mark.timeout(150)),
        pytest.param({"precision": "fp32", "autocast": True}, id="autocast"),
    ],
)
def test_placement_does_not_change_results(tmp_path: Path, options: dict[str, Any]) -> None:
    assert_same(train(tmp_path, IN_RAM, **options), train(tmp_path, ON_DEVICE, **options))


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("update", ["cpu", "device"])
def test_side_streams_do_not_change_results(tmp_path: Path, placement: str, update: str) -> None:
    streams = [torch.cuda.Stream() for _ in range(2)]
    found = train(tmp_path, PLACEMENTS[placement], streams=streams, update=update)
    assert_same(found, train(tmp_path, ON_DEVICE))


@pytest.mark.parametrize("placement", ["ram", "disk"])
def test_forwards_on_alternating_streams(tmp_path: Path, placement: str) -> None:
    """Weights are copied into slots that another stream may still read."""
    token_batches, streams = batches(), [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    with make(tmp_path, PLACEMENTS[placement]) as engine, torch.no_grad():
        engine.eval()
        found = []
        for index, tokens in enumerate(token_batches):
            with torch.cuda.stream(streams[index % 2]):
                found.append(engine(tokens))
        torch.cuda.synchronize()
        assert [loss.item() for loss in found] == [
            engine(tokens).item() for tokens in token_batches
        ]


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_backward_called_on_the_loss(tmp_path: Path, placement: str) -> None:
    """The backward runs on an autograd thread; nothing it leaves may keep weights resident."""
    expected = train(tmp_path, PLACEMENTS[placement])[0]
    gc.disable()
    try:
        with make(tmp_path, PLACEMENTS[placement]) as engine:
            losses = []
            for tokens in batches()[:STEPS]:
                loss = engine(tokens)
                loss.backward()
                del loss
                engine.zero_grad()
                loss = engine(tokens)
                loss.backward()
                engine.step()
                losses.append(loss.item())
    finally:
        gc.enable()
    assert losses == expected


def test_copy_streams_are_not_handed_out_to_users() -> None:
    """torch hands out 32 streams per priority, in rotation."""
    with closing(resolve_device("cuda")) as device:
        copy_streams = [
            device._h2d_stream,
            device._d2h_stream,
            device._unordered_h2d_stream,
            device._unordered_d2h_stream,
            device._comm_stream,
        ]
        found = {torch.cuda.Stream().cuda_stream for _ in range(70)}
        assert len(found) == 32
        assert found.isdisjoint(stream.cuda_stream for stream in copy_streams)


def test_graph_capture_is_refused_and_training_continues(tmp_path: Path) -> None:
    tokens = batches()[0]
    with make(tmp_path, IN_RAM) as engine:
        for _ in range(2):
            engine.backward(engine(tokens))
            engine.step()
            engine.settle()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph), pytest.raises(ResidencyError, match="being captured"):
                engine(tokens)


def test_step_waits_once_and_allocates_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights, state and gradients in RAM; waits of the engine's own threads are not counted.

    All other threads are counted, because autograd runs the backward on threads of its own.
    """
    waits: Counter[str] = Counter()
    wait, synchronize = CudaEvent.wait, torch.cuda.synchronize

    def counted_wait(self: CudaEvent) -> None:
        is_copy_wait = any(frame.name == "send" for frame in traceback.extract_stack())
        if not threading.current_thread().name.startswith("infinity") and not is_copy_wait:
            waits["event"] += 1
        wait(self)

    def counted_synchronize(*arguments: Any) -> None:
        waits["synchronize"] += 1
        synchronize(*arguments)

    monkeypatch.setattr(CudaEvent, "wait", counted_wait)
    monkeypatch.setattr(torch.cuda, "synchronize", counted_synchronize)
    token_batches = batches()
    with make(tmp_path, IN_RAM) as engine:
        allocated = []
        try:
            for index in range(STEPS):
                if index == 3:
                    waits.clear()
                    torch.cuda.set_sync_debug_mode("error")  # raise on synchronizing operations
                engine.backward(engine(token_batches[index]))
                engine.step()
                allocated.append(torch.cuda.memory_stats()["num_device_alloc"])
        finally:
            torch.cuda.set_sync_debug_mode("default")
        found = dict(waits)
    assert found.get("event", 0) <= STEPS - 3
    assert "synchronize" not in found
    # Waits for copies (also in `GradientCopies.send`) depend on how far ahead the host is, so the
    # first steps may allocate more.
    assert allocated[-1] == allocated[-2]


def test_trace_has_gpu_times(tmp_path: Path) -> None:
    (tmp_path / "nvme").mkdir()
    with make(tmp_path / "nvme", IN_RAM, trace=str(tmp_path / "t.json"), update="device") as engine:
        for tokens in batches()[:STEPS]:
            engine.backward(engine(tokens))
            engine.step()
        engine.settle()  # the last update transfers bytes too
        moved = engine.counters()
    timeline = read_timeline(tmp_path / "t.json")
    assert timeline.complete
    assert timeline.num_dropped == 0
    for direction in ("to_device", "from_device"):
        slices = timeline.of(direction)
        assert 0 < sum(one.nbytes for one in slices) <= moved[direction]
        assert all(0 <= one.begin <= one.end for one in slices)
    units = {one.unit for one in timeline.of("compute")}
    assert {one.unit for one in timeline.of("update")} == units
    total = Shares(timeline).total
    assert total is not None
    assert 0 < total.busy["compute"] < total.seconds
