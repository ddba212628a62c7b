"""Tests of traces of runs: they match step reports and do not affect training."""

from __future__ import annotations

import itertools
import json
import os
import signal
import threading
import time
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from support import fault_injection
from support.fake_accelerator import FakeAccelerator
from support.forked import Program
from support.internals import components
from support.models import CASES, CHECKPOINTINGS, Checkpointing
from support.small import MIXED, ON_DEVICE, ON_DISK, batch, settings, small_engine, small_model
from support.trainer import Run, make_config, make_device
from support.waiting import wait_until

import infinity
from infinity.config.schema import load_config
from infinity.errors import ConfigError, MachineError
from infinity.model.partitioner import OUTSIDE
from infinity.offload.transfers import STALLS
from infinity.profiling.trace_reader import Slice, TraceTimeline, read_timeline
from infinity.profiling.trace_shares import Shares, overlap, union, verdict
from infinity.storage.device import Event

TRACKS = ("disk_read", "disk_write", "to_device", "from_device")
IN_RAM = dict.fromkeys(("weights", "optimizer_state", "gradients"), "host")
PLACEMENTS = {"disk": ON_DISK, "mixed": MIXED, "device": ON_DEVICE}


def traced(
    path: Path,
    *,
    placement: dict[str, str],
    kind: str = "cpu",
    steps: int = 4,
    **overrides: Any,
) -> tuple[TraceTimeline, list[Any]]:
    """Train `steps` steps of two micro-batches; return the trace and the step reports."""
    overrides = {"gradient_accumulation_steps": 2, "trace": str(path / "t.json"), **overrides}
    (path / "nvme").mkdir(exist_ok=True)
    config = settings(path / "nvme", placement, **overrides)
    engine = fault_injection.initialize(
        small_model(), config, poison=None, device=make_device(kind)
    )[0]
    reports = []
    with engine:
        for index in range(2 * steps):
            engine.backward(engine(batch(index)))
            before = engine.last_report
            engine.step()
            if engine.last_report is not before:
                reports.append(engine.last_report)
    return read_timeline(path / "t.json"), reports


def check_nesting(slices: Sequence[Slice]) -> None:
    """Check that any two slices of a track are nested or disjoint."""
    open_until: list[float] = []
    for one in sorted(slices, key=lambda s: (s.begin, -s.end)):
        while open_until and open_until[-1] <= one.begin + 1e-9:
            open_until.pop()
        assert not open_until or one.end <= open_until[-1] + 1e-9, one
        open_until.append(one.end)


def check_sane(timeline: TraceTimeline) -> None:
    assert timeline.complete
    assert timeline.num_dropped == 0
    for slices in timeline.tracks.values():
        for one in slices:
            assert 0 <= one.submitted <= one.begin <= one.end, one
            assert "failed" not in one.args
    for track in ("compute", "stall", "optimizer_pass", "step", "micro_batch"):
        check_nesting(timeline.of(track))
    check_nesting(timeline.of("optimizer_pass", "update"))  # one thread if the host updates


@pytest.mark.parametrize("kind", ["cpu", "fake"])
@pytest.mark.parametrize("where", list(PLACEMENTS))
def test_trace_bytes_and_stalls_match_step_reports(tmp_path: Path, kind: str, where: str) -> None:
    timeline, reports = traced(tmp_path, placement=PLACEMENTS[where], kind=kind)
    check_sane(timeline)
    steps = timeline.of("step")
    assert [s.what for s in steps] == [f"step {r.step}" for r in reports]
    # A report's clock is read before the trace's, and both before the next step's.
    spans, walls = [s.seconds for s in steps], [r.wall_s for r in reports]
    assert sum(walls[1:]) <= sum(spans) + 1e-4
    assert sum(spans[:-1]) <= sum(walls) + 1e-4
    assert all(a.end == pytest.approx(b.begin) for a, b in itertools.pairwise(steps))
    moved_total = dict.fromkeys(TRACKS, 0)
    for step, report in zip(steps, reports, strict=True):
        for track in TRACKS:
            inside = [s for s in timeline.of(track) if step.begin <= s.submitted < step.end]
            assert sum(s.nbytes for s in inside) == report.moved[track], (step.what, track)
            moved_total[track] += report.moved[track]
        assert step.args["moved"] == report.moved
        for cause, seconds in report.stall_s.items():
            durations = [
                s.seconds
                for s in timeline.of("stall")
                if s.what == cause and step.begin <= s.begin < step.end
            ]
            assert sum(durations) == pytest.approx(seconds, abs=2e-6)
    assert (moved_total["disk_read"] > 0) == (where != "device")
    assert (moved_total["to_device"] > 0) == (kind == "fake")


@pytest.mark.parametrize("kind", ["cpu", "fake"])
def test_trace_has_compute_and_update_of_every_unit(tmp_path: Path, kind: str) -> None:
    timeline, reports = traced(tmp_path, placement=ON_DISK, kind=kind)
    units = {"embedding", "blocks.0", "blocks.1", "blocks.2", OUTSIDE}
    batches = timeline.of("micro_batch")
    assert [b.what for b in batches] == ["micro-batch 0", "micro-batch 1"] * len(reports)
    for one in batches:
        inside = [s for s in timeline.of("compute") if one.begin <= s.begin < one.end]
        for phase in ("forward", "backward"):
            assert {s.unit for s in inside if s.what == phase} == units
        backward = [s.unit for s in inside if s.what == "backward"]
        forward_end = max(s.end for s in inside if s.what == "forward")
        assert all(s.begin >= forward_end for s in inside if s.what == "backward")
        assert backward.index("blocks.2") < backward.index("blocks.1") < backward.index("blocks.0")
    first, *later = timeline.of("step")
    assert not [s for s in timeline.of("update") if s.begin < first.end]
    for step in later:  # the update of a step overlaps the next forward
        updated = [s for s in timeline.of("update") if step.begin <= s.begin < step.end]
        assert {s.unit for s in updated} == units
    assert {s.what for s in timeline.of("disk_read")} == {"state", "weight", "gradient"}
    assert {s.unit for s in timeline.of("disk_write")} == units


@pytest.mark.clock
def test_verdict_of_slow_disk_is_disk(tmp_path: Path) -> None:
    timeline, _ = traced(tmp_path, placement=ON_DISK, io={"slow_bytes_per_s": "1MiB"})
    shares = Shares(timeline)
    total = shares.total
    assert total is not None
    assert total.share("disk") > 0.8
    assert total.waits > 0.5 * total.seconds
    verdicts = [verdict(step) for step in [*shares.steps[1:], total]]
    assert all("disk" in text and "binds" in text for text in verdicts), verdicts
    queued = [s.begin - s.submitted for s in timeline.of("disk_read", "disk_write")]
    assert max(queued) > 0  # some requests were queued


def test_trace_records_accelerator_copies(tmp_path: Path) -> None:
    device = FakeAccelerator(3, max_delay_s=0.004)
    config = settings(tmp_path, MIXED, trace=str(tmp_path / "t.json"))
    with infinity.initialize(small_model(), config, device=device)[0] as engine:
        for index in range(3):
            engine.backward(engine(batch(index)))
            engine.step()
        before = device.num_copies
    assert before > 0
    timeline = read_timeline(tmp_path / "t.json")
    check_sane(timeline)
    copies = timeline.of("to_device", "from_device")
    assert {s.what for s in copies} >= {"weight", "gradient"}
    delayed = [s for s in copies if s.begin - s.submitted > 0.0005]
    assert len(delayed) > len(copies) / 4  # copies are asynchronous
    total = Shares(timeline).total
    assert total is not None
    assert total.busy["to_device"] > 0
    compute, copied = (
        union((s.begin, s.end) for s in timeline.of(track)) for track in ("compute", "from_device")
    )
    assert overlap(compute, copied)


@pytest.mark.parametrize("checkpointing", CHECKPOINTINGS, ids=str)
def test_recomputed_forwards_are_inside_backwards(
    tmp_path: Path, checkpointing: Checkpointing
) -> None:
    case = CASES["gpt"]
    config = make_config(("disk", "disk", "disk"), trace=str(tmp_path / "t.json"))
    with Run(case.build(checkpointing), config) as run:
        for index in range(3):
            run.engine.backward(case.batch(index).call(run.engine))
            run.engine.step()
    timeline = read_timeline(tmp_path / "t.json")
    check_sane(timeline)
    backward = [s for s in timeline.of("compute") if s.what == "backward"]
    recomputed = [
        s
        for s in timeline.of("compute")
        if s.what == "forward" and any(b.begin <= s.begin and s.end <= b.end for b in backward)
    ]
    assert bool(recomputed) == (checkpointing.mode != "none" and checkpointing.place == "block")
    for one in recomputed:
        enclosing = next(b for b in backward if b.begin <= one.begin and one.end <= b.end)
        assert enclosing.unit == one.unit


def test_tracing_does_not_change_results(tmp_path: Path) -> None:
    values = []
    for trace in (None, str(tmp_path / "t.json")):
        with Run(small_model(), make_config(("disk", "host", "disk"), trace=trace)) as run:
            for index in range(3):
                run.engine.backward(run.engine(batch(index)))
                run.engine.step()
            values.append(run.masters())
    assert all(torch.equal(values[0][name], values[1][name]) for name in values[0])


def test_trace_steps_selects_recorded_steps(tmp_path: Path) -> None:
    config = make_config(("disk", "disk", "disk"), trace=str(tmp_path / "t.json"))
    with Run(small_model(), config | {"trace_steps": [2, 3]}) as run:
        engine = run.engine
        tracks, hooks = components(engine).transfers, components(engine).hooks
        seen = []
        for index in range(6):
            seen.append((tracks.trace is not None, hooks.saved.timeline is not None))
            engine.backward(engine(batch(index)))
            engine.step()
            alive = [t for t in threading.enumerate() if t.name == "infinity-trace"]
            assert bool(alive) == (index < 3)  # closed one step after the last
        assert seen == [(i in (1, 2),) * 2 for i in range(6)]
        timeline = read_timeline(tmp_path / "t.json")
        assert timeline.complete
        assert [s.what for s in timeline.of("step")] == ["step 2", "step 3"]
        begin, end = timeline.of("step")[0].begin, timeline.of("step")[1].end
        for track in ("compute", "stall", "micro_batch"):
            assert all(begin <= s.begin and s.end <= end for s in timeline.of(track))


def test_trace_steps_accepted_values() -> None:
    assert load_config({}).trace_steps == (1, 100)
    assert load_config({"trace_steps": 7}).trace_steps == (1, 7)
    assert load_config({}, ["trace_steps=[5, 6]"]).trace_steps == (5, 6)
    assert load_config(load_config({"trace_steps": [5, 6]})).trace_steps == (5, 6)
    for wrong in (0, [0, 3], [4, 3], [1], "all", 1.5, True, [1, 2, 3], None):
        with pytest.raises(ConfigError, match="trace_steps: should be"):
            load_config({"trace_steps": wrong})


def test_no_trace_without_configuration(tmp_path: Path) -> None:
    with small_engine(tmp_path, ON_DISK) as engine:
        assert components(engine).transfers.trace is None
        assert components(engine).hooks.saved.timeline is None
        assert components(engine).timeline is None
        assert not [t for t in threading.enumerate() if t.name == "infinity-trace"]


def test_unwritable_trace_path_leaves_model_unchanged(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    config = settings(tmp_path, ON_DISK, trace=str(tmp_path / "file" / "t.json"))
    model = small_model()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    with pytest.raises(MachineError, match="trace"):
        infinity.initialize(model, config)
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
    assert os.listdir(tmp_path) == ["file"]


def test_trace_continues_after_exceptions(tmp_path: Path) -> None:
    config = make_config(("disk", "disk", "disk"), trace=str(tmp_path / "t.json"))
    with Run(small_model(), config) as run:
        engine, block = run.engine, run.model.blocks[1]  # type: ignore[index,union-attr]

        def refuse(*args: Any) -> None:
            raise ValueError("the user's own")

        # Raise inside the block, so that the hook of the engine after it is not called.
        for moment in (block.down.register_forward_hook, block.register_full_backward_hook):
            engine.backward(engine(batch(0)))
            engine.step()
            handle = moment(refuse)
            with pytest.raises(ValueError, match="own"):
                engine.backward(engine(batch(1)))
            handle.remove()
            engine.backward(engine(batch(1)))
            engine.step()
    timeline = read_timeline(tmp_path / "t.json")
    check_sane(timeline)
    assert len(timeline.of("step")) == 4
    last = timeline.of("step")[-1]
    inside = [s for s in timeline.of("compute") if last.begin <= s.begin < last.end]
    assert len({(s.what, s.unit) for s in inside}) == 10


class WaitRecordingDevice(FakeAccelerator):
    """Device with a separate compute clock, as on CUDA; records its waits."""

    host_clock = False

    def __init__(self) -> None:
        super().__init__(1)
        self.waits: list[tuple[int, int]] = []

    def compute_wait(self, event: Event) -> None:
        begin = time.perf_counter_ns()
        super().compute_wait(event)
        self.waits.append((begin, time.perf_counter_ns()))


@pytest.mark.parametrize("checkpoint", ["none", "units"])
def test_compute_slices_exclude_waits_for_weights(tmp_path: Path, checkpoint: str) -> None:
    """No wait is inside a compute slice, however long it takes."""
    (tmp_path / "nvme").mkdir()
    overrides = {
        "activations": {"checkpoint": checkpoint},
        "prefetch_units": 0,
        "precision": "bf16",
    }
    config = settings(tmp_path / "nvme", IN_RAM, trace=str(tmp_path / "t.json"), **overrides)
    device = WaitRecordingDevice()
    with infinity.initialize(small_model(), config, device=device)[0] as engine:
        trace = components(engine).transfers.trace
        assert trace is not None
        for index in range(3):
            engine.backward(engine(batch(index)))
            engine.step()
    waits = [[(at - trace.start_ns) * 1e-9 for at in wait] for wait in device.waits]
    compute = read_timeline(tmp_path / "t.json").of("compute")
    assert len(compute) > 10 < len(waits)
    inside = [(s, w) for s in compute for w in waits if s.begin <= w[0] and w[1] <= s.end]
    assert not inside


def test_trace_records_saving_and_commits(tmp_path: Path) -> None:
    durable = {"durable": True, "trace": str(tmp_path / "t.json"), "cpu": {"num_threads": 1}}
    (tmp_path / "nvme").mkdir()
    config = settings(tmp_path / "nvme", ON_DISK, **durable)
    with infinity.initialize(small_model(), config)[0] as engine:
        for index in range(3):
            engine.backward(engine(batch(index)))
            engine.step()
        engine.save_checkpoint(tmp_path / "saved", wait=True)
    timeline = read_timeline(tmp_path / "t.json")
    assert timeline.complete
    seen = {s.what for s in timeline.of("saving")}
    assert seen >= {"commit: sync", "commit: record", "save: write", "publish the checkpoint"}
    assert all(0 <= s.begin <= s.end for s in timeline.of("saving"))


def train_forever(nvme: Path, trace: Path) -> None:
    config = settings(nvme, ON_DISK, trace=str(trace))
    engine = infinity.initialize(small_model(), config)[0]
    for index in count():
        engine.backward(engine(batch(index)))
        engine.step()


def test_killed_run_leaves_valid_trace(tmp_path: Path) -> None:
    (tmp_path / "nvme").mkdir()
    trace = tmp_path / "t.json"
    with Program(train_forever, tmp_path / "nvme", trace) as child:
        state = Path(f"/proc/{child.process.pid}/stat")
        assert wait_until(lambda: trace.is_file() and trace.read_text().count('"cat":"step"') > 1)
        child.signal(signal.SIGSTOP)  # completes a write in progress, which SIGKILL may not
        assert wait_until(lambda: state.read_text().rpartition(")")[2].split()[0] == "T")
        assert json.loads(trace.read_text())
        child.signal(signal.SIGKILL)
    timeline = read_timeline(trace)
    assert not timeline.complete
    assert timeline.num_dropped == 0
    assert len(timeline.of("step")) >= 2
    assert Shares(timeline).total is not None


# --- stalls ---------------------------------------------------------------------------------------


def test_stall_table_in_docs_matches_code() -> None:
    document = Path(__file__).parents[3] / "docs" / "ARCHITECTURE.md"
    rows = [f"| `{name}` | {stall.meaning} | {stall.remedy} |" for name, stall in STALLS.items()]
    lines = document.read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if line in rows] == rows
