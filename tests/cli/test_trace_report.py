"""Tests of trace shares and verdicts against a slow reference on synthetic traces."""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from infinity.cli.main import app
from infinity.profiling.trace_reader import TraceTimeline, read_timeline
from infinity.profiling.trace_recorder import NO_UNIT, Trace
from infinity.profiling.trace_shares import (
    CAUSES,
    Interval,
    Shares,
    binds,
    clip,
    length,
    overlap,
    report_data,
    union,
    verdict,
    without,
)

TICK_S = 0.001
SPAN = 4000  # ticks


def ticks(intervals: list[Interval]) -> set[int]:
    """Return all integers inside the intervals, as a slow reference."""
    return {t for begin, end in intervals for t in range(int(begin), int(end))}


def test_interval_set_operations() -> None:
    draw = random.Random(1)

    def random_intervals(count: int) -> list[Interval]:
        begins = [draw.randrange(200) for _ in range(count)]
        return [(float(b), float(b + draw.randrange(12))) for b in begins]

    for _ in range(300):
        one, other = random_intervals(draw.randrange(12)), random_intervals(draw.randrange(12))
        a, b = union(one), union(other)
        window = (float(draw.randrange(100)), float(100 + draw.randrange(100)))
        for times, expected in (
            (a, ticks(one)),
            (overlap(a, b), ticks(one) & ticks(other)),
            (without(a, b), ticks(one) - ticks(other)),
            (clip(a, window), ticks(one) & ticks([window])),
        ):
            assert ticks(times) == expected
            assert length(times) == len(expected)
            assert all(begin < end for begin, end in times)
            assert all(x[1] <= y[0] for x, y in itertools.pairwise(times))


Spans = dict[str, list[tuple[int, int]]]  # track (or "stall:cause") -> spans in ticks


def write_trace(
    path: Path, spans: Spans, steps: list[tuple[int, int]], **facts: Any
) -> TraceTimeline:
    """Write a trace file with these slices and read it back."""
    trace = Trace(path, ["unit"], facts)

    def at(tick: float) -> int:
        return trace.start_ns + round(tick * TICK_S * 1e9)

    for number, (begin, end) in enumerate(steps, start=1):
        trace.add("step", f"step {number}", NO_UNIT, at(begin), at(end))
    for name, ranges in spans.items():
        track, _, cause = name.partition(":")
        for begin, end in ranges:
            submitted = at(begin - 5) if track.startswith("disk") else None  # queued for 5 ticks
            trace.add(track, cause or "what", 0, at(begin), at(end), 1, submitted=submitted)
    trace.close()
    return read_timeline(path)


@pytest.mark.parametrize("seed", range(6))
def test_shares_match_counting_ticks(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)

    def busy(count: int, longest: int) -> list[tuple[int, int]]:
        begins = [draw.randrange(10, SPAN) for _ in range(count)]
        return [(b, b + draw.randrange(1, longest)) for b in begins]

    cuts = sorted(draw.sample(range(100, SPAN, 10), 30))  # stalls do not overlap each other
    stalls = list(zip(cuts[::2], cuts[1::2], strict=True))
    spans: Spans = {track: busy(40, 120) for track in ("disk_read", "disk_write", "to_device")}
    spans |= {"update": busy(10, 200), "compute": busy(25, 150)}
    spans |= {"stall:update": stalls[::2], "stall:norm": stalls[1::2]}
    steps = [(10, 1200), (1200, 2222), (2222, SPAN)]
    timeline = write_trace(tmp_path / "t.json", spans, steps)
    assert len(timeline.of("step")) == 3

    sets = {name: ticks([(float(b), float(e)) for b, e in r]) for name, r in spans.items()}
    sets["disk"] = sets["disk_read"] | sets["disk_write"]
    waits = sets["stall:update"] | sets["stall:norm"]
    sets["compute"] -= waits
    shares = Shares(timeline)
    for step, (begin, end) in zip(shares.steps, steps, strict=True):
        window = set(range(begin, end))
        for track in ("disk", "disk_read", "disk_write", "to_device", "update", "compute"):
            assert step.busy[track] == pytest.approx(len(sets[track] & window) * TICK_S, abs=1e-6)
        assert step.waits == pytest.approx(len(waits & window) * TICK_S, abs=1e-6)
        remaining = window - waits - sets["compute"]
        assert step.other == pytest.approx(len(remaining) * TICK_S, abs=1e-6)
        for track in ("disk", "to_device", "update"):
            inside = sets[track] & waits & window
            assert step.covered[track] == pytest.approx(len(inside) * TICK_S, abs=1e-6)
        for cause in ("update", "norm"):
            inside = sets[f"stall:{cause}"] & window
            assert step.causes[cause] == pytest.approx(len(inside) * TICK_S, abs=1e-6)
    total = shares.total
    assert total is not None
    for track in ("disk", "compute", "update"):
        busy_of_steps = sum(step.busy[track] for step in shares.steps)
        assert total.busy[track] == pytest.approx(busy_of_steps, abs=1e-6)

    longest = sorted((e - b for b, e in stalls), reverse=True)[:5]
    found = shares.largest_stalls(5)
    assert report_data(shares, 5)["largest_stalls"] == [asdict(stall) for stall in found]
    assert [s.seconds for s in found] == pytest.approx([n * TICK_S for n in longest], abs=1e-6)
    for stall in found:
        span = set(
            range(round(stall.begin / TICK_S), round((stall.begin + stall.seconds) / TICK_S))
        )
        most = max(len(sets.get(track, set()) & span) for track in CAUSES)
        assert stall.resource_seconds == pytest.approx(most * TICK_S, abs=1e-6)


# (spans of a step of 1000 ticks, the binding track, start of the verdict)
BY_HAND: dict[str, tuple[Spans, str, str]] = {
    "a disk that reads": (
        {"compute": [(0, 1000)], "stall:update": [(100, 700)], "disk_read": [(20, 950)]},
        "disk_read",
        "disk read binds (busy 93 %); compute waits 0.60 s of 1.00 s for it",
    ),
    "a disk that writes": (
        {"compute": [(0, 1000)], "stall:gradient": [(0, 600)], "disk_write": [(0, 800)]},
        "disk_write",
        "disk write binds (busy 80 %); compute waits 0.60 s of 1.00 s for it",
    ),
    "a disk that does both": (
        {
            "compute": [(0, 1000)],
            "stall:update": [(0, 600)],
            "disk_write": [(0, 500)],
            "disk_read": [(100, 600)],
            "update": [(0, 100)],
        },
        "disk",
        "the disk binds (busy 60 %: read 50 %, write 50 %); compute waits 0.60 s of 1.00 s",
    ),
    "the update": (
        {
            "compute": [(0, 1000)],
            "stall:update": [(0, 900)],
            "update": [(10, 890)],
            "disk_read": [(10, 100), (500, 600)],
        },
        "update",
        "the optimizer update binds (busy 88 %); compute waits 0.88 s",
    ),
    "copies": (
        {"compute": [(0, 1000)], "stall:copy": [(200, 600)], "to_device": [(0, 700)]},
        "to_device",
        "copying to the device binds (busy 70 %)",
    ),
    "one request after the other": (
        {"compute": [(0, 1000)], "stall:disk_read": [(0, 300)], "disk_read": [(0, 300)]},
        "disk_read",
        "disk read is waited for, but does not bind (busy 30 %)",
    ),
    "compute": (
        {"compute": [(0, 990)], "stall:norm": [(500, 520)], "disk_read": [(0, 1000)]},
        "compute",
        "compute binds (busy 97 %); it waits 20 ms of 1.00 s",
    ),
    "the loop": (
        {"compute": [(0, 300)], "stall:norm": [(200, 220)]},
        "other",
        "the training loop's own code binds: 0.70 s of 1.00 s",
    ),
    "nobody knows": (
        {"compute": [(0, 1000)], "stall:slot": [(0, 500)], "disk_read": [(0, 50)]},
        "unknown",
        "compute waits 0.50 s of 1.00 s, most of it for 'slot'",
    ),
}


@pytest.mark.parametrize("name", list(BY_HAND))
def test_verdict_of_handmade_traces(tmp_path: Path, name: str) -> None:
    spans, track, start = BY_HAND[name]
    (step,) = Shares(write_trace(tmp_path / "t.json", spans, [(0, 1000)])).steps
    assert binds(step) == track
    assert verdict(step).startswith(f"step 1: {start}")


def test_device_clock_waits_are_gaps_between_slices(tmp_path: Path) -> None:
    spans: Spans = {
        "compute": [(0, 300), (700, 1000)],
        "stall:update": [(100, 200)],  # a host wait during device compute does not count
        "to_device": [(250, 680)],
    }
    (step,) = Shares(write_trace(tmp_path / "t.json", spans, [(0, 1000)], host_clock=False)).steps
    assert step.busy["compute"] == pytest.approx(0.6)
    assert step.waits == pytest.approx(0.38)
    assert step.other == pytest.approx(0.02)
    assert binds(step) == "to_device"


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["trace", *arguments])
    return result.exit_code, result.stdout, result.stderr


def test_trace_command(tmp_path: Path) -> None:
    spans = BY_HAND["a disk that reads"][0]
    write_trace(tmp_path / "t.json", spans, [(0, 1000)])
    trace, other = str(tmp_path / "t.json"), str(tmp_path / "other.json")
    Path(other).write_text("[]")
    code, out, error = run(trace)
    assert (code, error) == (0, "")
    assert "step 1: disk read binds (busy 93 %)" in out
    assert "600.00 ms  update     unit" in out
    for arguments, expected, part in (
        ([str(tmp_path / "none.json")], 4, "cannot be read"),
        ([other], 2, "is not a trace of infinity"),
    ):
        code, out, error = run(*arguments)
        assert (code, out) == (expected, "")
        assert part in error
    torn = tmp_path / "torn.json"
    events = json.loads(Path(trace).read_text())
    without_steps = [e for e in events if e.get("cat") != "step"]
    torn.write_text(json.dumps(without_steps)[:-3])
    code, out, _ = run(str(torn))
    assert code == 0
    assert "no step was completed" in out
    data = json.loads(run(str(torn), "--json")[1])
    assert (data["steps"], data["total"]) == ([], None)
    assert data["notes"] == ["the trace was not closed: the run was killed, or is still running"]


def test_trace_command_json(tmp_path: Path) -> None:
    """The JSON object has the numbers of the text report."""
    steps = [(0, 400), (400, 1000)]
    spans: Spans = {"compute": [(0, 300), (500, 900)], "stall:slot": [(500, 600)]}
    spans["disk_read"] = [(480, 640)]
    write_trace(tmp_path / "t.json", spans, steps, device="cuda:0")
    code, out, error = run(str(tmp_path / "t.json"), "--json", "--stalls", "1")
    assert (code, error) == (0, "")
    data = json.loads(out)
    assert data["device"] == "cuda:0"
    first, second = data["steps"]
    assert first["busy_share"]["compute"] == pytest.approx(0.75)
    assert first["idle_share"] == pytest.approx(0.25)
    assert second["busy_share"]["compute"] == pytest.approx(300 / 600)
    assert data["total"]["idle_share"] == pytest.approx(0.4)
    assert data["total"]["busy_share"]["disk"] == pytest.approx(0.16)
    (stall,) = data["largest_stalls"]
    assert (stall["cause"], stall["track"]) == ("slot", "disk")
    text = run(str(tmp_path / "t.json"))[1]
    for step in (first, second, data["total"]):
        assert step["verdict"] in text
