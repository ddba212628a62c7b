"""Tests of updates streamed through a device: the CPU's bits, and the bytes that the plan predicts.

The fake accelerator delays copies and kernels and poisons their outputs until then, so a missing
wait shows as NaN, and a slot or buffer reused too early as wrong bits.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from support.fake_accelerator import FakeAccelerator
from support.grids import diagonal
from support.ordered_accelerator import ordered_device
from support.trainer import Result, at_once, cpu_update_share, make_config, train_case

import infinity
from infinity.offload.handover import UpdateHandover
from infinity.offload.transfers import Transfers
from infinity.plan.plan import Plan
from infinity.training.unit_updater import UnitUpdater

IN_RAM = ("host", "host", "host")
# One of each path of a kind of state: from RAM, from disk, and resident on the device.
PLACEMENTS = [
    IN_RAM,
    ("disk", "disk", "disk"),
    ("device", "host", "host"),
    ("device", "disk", "device"),
    ("host", "device", "device"),
    ("device", "device", "host"),
    ("disk", "host", "disk"),
]
MODELS = ("gpt", "encoder_decoder", "frozen", "routed")
STEPS = 4
STREAMED: dict[str, Any] = {"chunk_size": "auto", "update": "device"}


def run(
    device: Any, placement: tuple[str, str, str] = IN_RAM, name: str = "gpt", **changes: Any
) -> Result:
    return train_case(name, device, placement, STEPS, **changes)


def with_kernels(seed: int = 0) -> FakeAccelerator:
    return FakeAccelerator(seed, max_delay_s=0.0005, kernels=True)


def num_chunk_batches(plan: Plan) -> int:
    """Return the number of chunk batches of all streamed units."""
    placed_units = [(unit, plan.placements[unit.index]) for unit in plan.units]
    return sum(streamed for pair in placed_units for _, streamed in plan.chunk_batches(*pair))


@pytest.mark.parametrize(
    ("placement", "formats", "share"),
    diagonal(PLACEMENTS, [("bf16", "fp32"), ("fp16", "fp32"), ("fp32", "8bit")], [0.4, 0.0]),
)
def test_streamed_update_bits_and_forecast_by_placement(
    placement: tuple[str, str, str],
    formats: tuple[str, str],
    share: float,
) -> None:
    """Two chunks travel at once unless some are on disk, with and without a share of the CPU."""
    precision, moments = formats
    changes: dict[str, Any] = {"precision": precision, "gradient_accumulation_steps": 2}
    changes["optimizer"] = {"moments": moments}
    if precision == "fp16":
        changes["loss_scale"] = {"value": 4}  # no step is skipped
    expected = run("cpu", ("device",) * 3, **changes)
    fake = with_kernels()
    with cpu_update_share(share), at_once(2):
        result = run(fake, placement, **STREAMED, **changes)
    assert result.differences(expected) == []
    assert result.plan is not None
    assert result.report is not None
    assert result.plan.chunks_per_batch(result.plan.placements[0]) == (
        1 if "disk" in placement else 2
    )
    assert fake.num_updates == STEPS * num_chunk_batches(result.plan) > 0
    assert result.report.moved == result.forecast


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_streamed_bytes_match_manual_count(micro_batches: int) -> None:
    """AdamW in bf16: 12 bytes of state and the gradient in, 12 out; no weights are copied twice."""
    changes: dict[str, Any] = {"precision": "bf16", "gradient_accumulation_steps": micro_batches}
    streamed = run(with_kernels(), update="device", **changes)
    by_cpu = run(with_kernels(), update="cpu", **changes)
    assert streamed.plan is not None
    assert streamed.report is not None
    assert by_cpu.report is not None
    elements = sum(unit.numel for unit in streamed.plan.units)
    gradient = 2 if micro_batches == 1 else 4
    extra = {
        direction: streamed.report.moved[direction] - by_cpu.report.moved[direction]
        for direction in ("to_device", "from_device")
    }
    # The CPU's new weights, 2 bytes, are copied to slots; streamed ones are updated there.
    assert extra == {"to_device": (12 + gradient - 2) * elements, "from_device": 12 * elements}
    assert streamed.plan.memory["device"]["streaming"] == 3 * 2048 * (12 + gradient)


@pytest.mark.parametrize("placement", [IN_RAM, ("device", "host", "host")])
def test_streamed_updates_of_units_overlap(
    placement: tuple[str, str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a slot is free; else the links would be idle between units."""
    in_flight: set[int] = set()  # units whose update was submitted and has not finished
    max_in_flight = 0
    update, updated = Transfers.update, UpdateHandover.updated

    def record_submit(self: Transfers, pieces: Any, after: Any, unit: int) -> Any:
        nonlocal max_in_flight
        in_flight.add(unit)
        max_in_flight = max(max_in_flight, len(in_flight))
        return update(self, pieces, after, unit)

    def record_finish(self: UpdateHandover, unit: int, ready: Any) -> None:
        in_flight.discard(unit)
        updated(self, unit, ready)

    monkeypatch.setattr(Transfers, "update", record_submit)
    monkeypatch.setattr(UpdateHandover, "updated", record_finish)
    with ordered_device(seed=1, kernels=True) as device, at_once(2):
        result = run(device, placement, **STREAMED)
    assert device.violations == []
    assert result.differences(run("cpu")) == []
    assert max_in_flight > 1


def test_cpu_updates_overlap_streamed_chunks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The CPU updates on a separate thread, so that the optimizer pass can submit other chunks.

    New weights are copied to slots on the stream that brings the state of streamed chunks: a GPU's
    copy engine may serve one stream for as long as it finds work there.
    """
    expected, in_flight_counts, threads = run("cpu"), list[int](), set[str]()
    pass_thread_copies: list[Any] = []
    begin, update = UnitUpdater._submit_cpu_update, UnitUpdater._update_on_cpu
    copy_h2d = Transfers.copy_h2d

    def record_copy(self: Transfers, *arguments: Any) -> Any:
        if threading.current_thread().name == "infinity-optimizer-pass":
            pass_thread_copies.append(arguments[-1])
        return copy_h2d(self, *arguments)

    def record_in_flight(self: UnitUpdater, job: Any, work: Any) -> None:
        in_flight_counts.append(sum(one.streamed for one in self._in_flight))
        begin(self, job, work)

    def slow_update(self: UnitUpdater, job: Any, work: Any) -> None:
        threads.add(threading.current_thread().name)
        time.sleep(0.02)  # exposes a missing wait
        update(self, job, work)

    monkeypatch.setattr(UnitUpdater, "_submit_cpu_update", record_in_flight)
    monkeypatch.setattr(UnitUpdater, "_update_on_cpu", slow_update)
    monkeypatch.setattr(Transfers, "copy_h2d", record_copy)
    with ordered_device(seed=1, kernels=True) as device, cpu_update_share(0.4), at_once(2):
        result = run(device, **STREAMED)
    assert device.violations == []
    assert result.differences(expected) == []
    assert result.plan is not None
    streamed = num_chunk_batches(result.plan)
    placed_units = [(unit, result.plan.placements[unit.index]) for unit in result.plan.units]
    by_cpu = sum(1 for pair in placed_units for _ in result.plan.chunk_batches(*pair)) - streamed
    assert len(in_flight_counts) == STEPS * by_cpu > 0
    assert sum(map(bool, in_flight_counts)) > len(in_flight_counts) / 2
    assert pass_thread_copies == []
    assert {name.rpartition("_")[0] for name in threads} == {"infinity-cpu-update"}


def test_unit_is_updated_after_all_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last chunk, which the CPU updates, finishes before streamed ones do."""
    done: dict[int, list[range]] = {}
    handed_back, finish, updated = [], UnitUpdater._finish, UpdateHandover.updated

    def record_chunk(self: UnitUpdater, work: Any) -> None:
        done.setdefault(work.unit, []).append(work.chunks)
        finish(self, work)

    def hand_back(self: UpdateHandover, unit: int, ready: Any) -> None:
        handed_back.append(done.pop(unit))
        updated(self, unit, ready)

    monkeypatch.setattr(UnitUpdater, "_finish", record_chunk)
    monkeypatch.setattr(UpdateHandover, "updated", hand_back)
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(128, 128, bias=False) for _ in range(2)))
    config = make_config(IN_RAM, update="device", chunk_size=2048)
    with (
        ordered_device(seed=1, kernels=True) as device,
        cpu_update_share(0.2),
        at_once(1),
        infinity.initialize(model, config, device=device)[0] as engine,
    ):
        for _ in range(2):
            engine.backward(engine(torch.ones(1, 128)).square().mean())
            engine.step()
    assert {
        chunk for found in handed_back for chunk_range in found for chunk in chunk_range
    } == set(range(8))
    assert all(sum(map(len, found)) == 8 for found in handed_back), handed_back
    assert any(found[-1].stop < 8 for found in handed_back), handed_back


def test_streaming_uses_few_copies_per_batch() -> None:
    """Each call costs host time: at most ten per chunk batch, and few batches."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(2700, 2700, bias=False) for _ in range(2)))
    config = make_config(IN_RAM, update="device", chunk_size="auto", precision="bf16")
    with (
        ordered_device(seed=1, kernels=True) as device,
        infinity.initialize(model, config, device=device)[0] as engine,
    ):
        for _ in range(2):
            engine.backward(engine(torch.ones(1, 2700, dtype=torch.bfloat16)).square().mean())
            engine.settle()
            before = device.num_copies, sum(engine.counters().values())
            engine.step()
            engine.settle()
        calls = device.num_copies - before[0]
        nbytes = sum(engine.counters().values()) - before[1]
        assert nbytes == 26 * sum(unit.numel for unit in engine.plan.units)
        chunk_batches = num_chunk_batches(engine.plan)
        assert chunk_batches <= 2 * len(engine.plan.units)  # of 7 chunks each
        assert calls <= 10 * chunk_batches  # four kinds in and out, a gradient in, a kernel


def test_reserved_device_memory_matches_plan() -> None:
    fake = with_kernels()
    before = fake.memory_bytes()
    result = run(fake, ("disk", "host", "disk"), precision="bf16", update="device")
    assert before is not None
    assert result.plan is not None
    assert before - (fake.memory_bytes() or 0) == result.plan.tier_bytes["device"]


def test_update_auto_streams_if_links_beat_cpu() -> None:
    """As they do with the nominal rates that are used if nothing was measured."""
    weights = {}
    for update in ("auto", "cpu"):
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(1000, 1000) for _ in range(3)))
        fake, config = with_kernels(), make_config(IN_RAM, update=update, chunk_size="auto")
        engine, *_ = infinity.initialize(model, config, device=fake)
        with engine:
            for _ in range(STEPS):
                engine.backward(engine(torch.ones(2, 1000)).square().mean())
                engine.step()
            weights[update] = engine.state_dict(master=True)["1.weight"].clone()
            plan = engine.plan
        streams = "updates               streamed through the device" in plan.describe()
        assert streams == (update == "auto")
        assert fake.num_updates == STEPS * num_chunk_batches(plan)
        assert bool(fake.num_updates) == streams
    assert torch.equal(weights["auto"], weights["cpu"])


def test_unstreamable_update_falls_back_to_cpu_with_note() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(40, 40) for _ in range(3)))
    config = make_config(IN_RAM, update="device")
    no_kernels = run(FakeAccelerator(max_delay_s=0.0005), update="device")
    del config["optimizer"]
    fake = with_kernels()
    engine, *_ = infinity.initialize(
        model, config, optimizer=lambda g: torch.optim.RMSprop(g, lr=1e-3), device=fake
    )
    with engine:
        engine.backward(engine(torch.ones(2, 40)).square().mean())
        engine.step()
        engine.settle()
        assert fake.num_updates == 0
        text = engine.plan.describe()
    assert "by the CPU: torch.optim.RMSprop is not one of our kernels" in text
    assert "note: update: device is not used" in text
    assert no_kernels.plan is not None
    assert "by the CPU: the device has no kernels" in no_kernels.plan.describe()
    assert no_kernels.differences(run("cpu")) == []
