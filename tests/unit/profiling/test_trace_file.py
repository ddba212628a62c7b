"""Tests of trace files: valid at any time, bounded memory, and truncated files."""

from __future__ import annotations

import errno
import itertools
import json
import os
import threading
import time
import tracemalloc
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from support.forked import HANG_S
from support.waiting import wait_until

from infinity.errors import MachineError
from infinity.profiling import trace_recorder
from infinity.profiling.trace_reader import TraceError, parse_events, read_timeline
from infinity.profiling.trace_recorder import NO_UNIT, SPREAD, Trace


class PendingStamp:
    """Time stamp that is pending until `at` is set."""

    def __init__(self) -> None:
        self.at: int | None = None

    def time_ns(self) -> int | None:
        return self.at


def make_trace(path: Path, count: int = 50) -> Trace:
    trace = Trace(path, ["first", 'with "quotes"'], {"device": "cpu"})
    for i in range(count):
        begin = trace.start_ns + 1000 * i
        trace.add("disk_read", "weight", i % 2, begin + 300, begin + 900, i, submitted=begin)
    return trace


def test_trace_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "made" / "here.json"
    trace = make_trace(path)
    trace.add("stall", "norm", NO_UNIT, trace.start_ns, trace.start_ns + 5, args={"more": 1})
    trace.close()
    trace.close()
    assert trace.num_dropped == 0
    timeline = read_timeline(path)
    assert timeline.complete
    assert timeline.facts["device"] == "cpu"
    reads = timeline.of("disk_read")
    assert [s.nbytes for s in reads] == list(range(50))
    assert {s.unit for s in reads} == {"first", 'with "quotes"'}
    for i, s in enumerate(reads):
        expected = [1e-6 * i, 1e-6 * i + 3e-7, 1e-6 * i + 9e-7]
        assert [s.submitted, s.begin, s.end] == pytest.approx(expected, abs=2e-9)
    (stall,) = timeline.of("stall")
    assert (stall.what, stall.unit, stall.args["more"]) == ("norm", "", 1)


def test_trace_file_is_valid_json_at_any_time(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    trace = make_trace(path, 1)
    seen = set()

    def is_valid_json() -> bool:
        with suppress(json.JSONDecodeError):
            seen.add(len(json.loads(path.read_text())))
            return True
        return False

    for i in range(200):
        trace.add("update", "update", 0, trace.start_ns + i, trace.start_ns + i + 1, 7)
        assert wait_until(is_valid_json)  # retries if read in the middle of a write
        if i % 50 == 49:  # the file has grown
            assert wait_until(lambda flushes=i // 50 + 1: is_valid_json() and len(seen) > flushes)
    trace.close()
    assert sum(e.get("cat") == "update" for e in json.loads(path.read_text())) == 200


def test_truncated_trace_is_read_partially(tmp_path: Path) -> None:
    make_trace(tmp_path / "t.json", 20).close()
    text = (tmp_path / "t.json").read_text()
    events = list(parse_events(text))
    assert len(events) == len(json.loads(text))
    sizes = set()
    for end in range(0, len(text), 7):
        prefix = list(parse_events(text[:end]))
        assert prefix == events[: len(prefix)]
        sizes.add(len(prefix))
    assert max(sizes) >= len(events) - 1
    torn = tmp_path / "torn.json"
    torn.write_text(text[: len(text) * 3 // 4])
    timeline = read_timeline(torn)
    assert not timeline.complete
    assert 0 < len(timeline.of("disk_read")) < 20
    named = list(parse_events('{"other": 1, "traceEvents": [{"ph": "X"}, {"ph": "i"}]}'))
    assert named == [{"ph": "X"}, {"ph": "i"}]


def test_read_non_trace_file_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    for text in ("", "[]", '[{"ph": "X", "ts": 1, "dur": 1}]', "no json", "\0"):
        other.write_text(text)
        with pytest.raises(TraceError, match="not a trace"):
            read_timeline(other)
    with pytest.raises(MachineError, match="cannot be read"):
        read_timeline(tmp_path / "none.json")
    with pytest.raises(MachineError, match="cannot be opened"):
        Trace(other / "below" / "a file.json")


def test_full_queue_drops_and_reports_events(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_recorder, "FLUSH_S", 60.0)
    trace = Trace(tmp_path / "t.json", capacity=100)
    for i in range(1000):
        trace.add("stall", "norm", NO_UNIT, i, i + 1)
    assert len(trace._queue) == 100
    assert trace.num_dropped == 900
    trace.close()
    timeline = read_timeline(trace.path)
    assert timeline.num_dropped == 900
    assert len(timeline.of("stall")) == 100


def test_long_trace_memory_is_bounded(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "t.json", ["unit"], capacity=2000)
    pending, flush, flushed = PendingStamp(), trace._flush, threading.Event()
    trace._flush = lambda: (flush(), flushed.set())  # type: ignore[method-assign]

    def settle() -> None:
        for _ in range(2):  # the second flush begins after this call
            flushed.clear()
            assert flushed.wait(HANG_S)

    def record(rounds: int) -> None:
        for _ in range(rounds):
            for i in range(500):
                now = trace.start_ns + i
                trace.add("disk_write", "state", 0, now, now + 900, 4096, submitted=now)
                trace.add(
                    "to_device", "weight", 0, now, pending, 64
                )  # a track that never completes
            assert wait_until(lambda: not trace._queue)

    record(5)
    tracemalloc.start()
    record(5)
    settle()
    before, _ = tracemalloc.get_traced_memory()
    record(12)
    settle()
    after, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert after - before < 200_000
    assert peak - before < 2_000_000
    assert len(trace._pending["to_device"]) <= 2000
    trace.close()
    # Every event is in the file or counted as dropped.
    timeline = read_timeline(trace.path)
    assert len(timeline.of("disk_write")) + timeline.num_dropped == 22 * 1000


def test_pending_events_are_written_in_track_order(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "t.json", ["unit"])
    at = trace.start_ns
    one, end_of_one, other, end_of_other = (PendingStamp() for _ in range(4))
    trace.add("to_device", "weight", 0, one, end_of_one, 10, submitted=at)
    trace.add("to_device", "weight", 0, other, end_of_other, 20, submitted=at)
    trace.add("compute", "forward", 0, one, other)
    trace.add("compute", "backward", 0, at + 1, at + 2)
    other.at, end_of_other.at = at + 500, at + 600
    time.sleep(3 * trace_recorder.FLUSH_S)
    assert not read_timeline(trace.path).of("to_device", "compute")
    one.at, end_of_one.at = at + 100, at + 300
    assert wait_until(lambda: len(read_timeline(trace.path).of("to_device", "compute")) == 4)
    trace.add("to_device", "weight", 0, at, PendingStamp(), 30)
    trace.close()
    timeline = read_timeline(trace.path)
    copies = [
        (s.nbytes, round(s.begin * 1e9), round(s.end * 1e9)) for s in timeline.of("to_device")
    ]
    assert copies == [(10, 100, 300), (20, 500, 600)]
    compute = {s.what: (round(s.begin * 1e9), round(s.end * 1e9)) for s in timeline.of("compute")}
    assert compute == {"forward": (100, 500), "backward": (1, 2)}
    assert timeline.num_dropped == 1  # the copy that never completed


def test_failing_device_event_is_dropped(tmp_path: Path) -> None:
    class Broken:
        def time_ns(self) -> int | None:
            raise RuntimeError("device lost")

    trace = Trace(tmp_path / "t.json", ["unit"])
    trace.add("to_device", "weight", 0, Broken(), trace.start_ns + 5, 1)
    trace.add("to_device", "weight", 0, trace.start_ns, trace.start_ns + 5, 2)
    trace.close()
    timeline = read_timeline(trace.path)
    assert [s.nbytes for s in timeline.of("to_device")] == [2]
    assert timeline.num_dropped == 1
    assert "device lost" in str(trace.failure)


def test_trace_thread_calls_follow_before_querying_events(tmp_path: Path) -> None:
    """Otherwise querying events would break a CUDA graph capture of the user."""
    seen: list[str] = []

    class Event:
        def time_ns(self) -> int | None:
            seen.append(f"asked by {threading.current_thread().name}")
            return time.perf_counter_ns()

    def follow() -> None:
        seen.append(f"follows on {threading.current_thread().name}")
        raise RuntimeError("no driver")

    trace = Trace(tmp_path / "t.json", ["unit"], follow=follow)
    trace.add("to_device", "weight", 0, trace.start_ns, Event())
    trace.close()
    assert seen == ["follows on infinity-trace", "asked by infinity-trace"]
    assert "no driver" in str(trace.failure)
    assert len(read_timeline(trace.path).of("to_device")) == 1


def test_overlapping_slices_are_spread_over_tracks(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "t.json", ["unit"])
    for i in range(40):
        begin = trace.start_ns + 100 * i
        for track in SPREAD:
            trace.add(track, "what", 0, begin, begin + 100 * (1 + i % 4), 1, submitted=begin)
    trace.close()
    events = [e for e in json.loads(trace.path.read_text()) if e["ph"] == "X"]
    assert len(events) == 40 * len(SPREAD)
    tracks: dict[int, list[tuple[float, float]]] = {}
    for event in events:
        tracks.setdefault(event["tid"], []).append((event["ts"], event["ts"] + event["dur"]))
    assert len(SPREAD) < len(tracks) <= 4 * len(SPREAD)
    for spans in tracks.values():
        spans.sort()
        assert all(a[1] <= b[0] + 1e-6 for a, b in itertools.pairwise(spans))
    named = {e["tid"] for e in json.loads(trace.path.read_text()) if e["name"] == "thread_name"}
    assert set(tracks) <= named


def test_disk_full_is_not_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(trace_recorder, "write_at", full)
    trace = make_trace(tmp_path / "t.json")
    trace.close()
    assert trace.failure is not None
    assert trace.num_dropped == 50


def open_paths() -> set[str]:
    """Return the paths of open files of this process."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the descriptor of this listing
            found.add(os.readlink(f"/proc/self/fd/{name}"))
    return found


def test_trace_from_threads_and_forked_child(tmp_path: Path) -> None:
    trace = make_trace(tmp_path / "t.json", 0)
    assert str(trace.path) in open_paths()
    workers = [
        threading.Thread(
            target=lambda: [trace.add("stall", "norm", NO_UNIT, i, i + 1) for i in range(3000)]
        )
        for _ in range(4)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    child = os.fork()
    if child == 0:
        trace.add("stall", "child", NO_UNIT, 0, 1)
        trace.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    trace.close()
    assert {s.what for s in read_timeline(trace.path).of("stall")} == {"norm"}
    assert len(read_timeline(trace.path).of("stall")) == 12000
    assert not [t for t in threading.enumerate() if t.name == "infinity-trace"]
    assert str(trace.path) not in open_paths()
    trace.add("stall", "late", NO_UNIT, 0, 1)  # nothing happens


VALID_EVENT = {"name": "a", "ph": "X", "ts": 1, "dur": 1, "args": {}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ts": "a"}, "its 'ts' is 'a', not a finite number"),
        ({"ts": None}, "its 'ts' is None"),
        ({"ts": float("nan")}, "its 'ts' is nan"),
        ({"ts": 10**400}, "not a finite number"),
        ({"ts": 1.7e308, "dur": 1.7e308}, "out of range"),
        ({"dur": None}, "its 'dur' is None"),
        ({"args": 5}, "its 'args' are 5"),
        ({"args": {"bytes": float("inf")}}, "its 'bytes' is inf"),
        ({"args": {"dropped": "x"}}, "its 'dropped' is 'x'"),
        ({"name": "trace begins", "args": None}, "its 'args' are None"),
        ({"name": "trace ends", "args": {"dropped": []}}, "its 'dropped' is []"),
    ],
    ids=str,
)
def test_malformed_event_is_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    events = [
        {"name": "trace begins", "ph": "i", "ts": 0, "args": {}},
        VALID_EVENT,
        VALID_EVENT | changes,
    ]
    (tmp_path / "t.json").write_text(json.dumps(events))
    with pytest.raises(TraceError) as caught:
        read_timeline(tmp_path / "t.json")
    assert "event 3 of" in str(caught.value)
    assert message in str(caught.value)


def test_unreadable_trace_error_has_remedy(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match=r"(?s)nosuch\.json cannot be read.*try: pass the file"):
        read_timeline(tmp_path / "nosuch.json")
    (tmp_path / "deep.json").write_text("[" * 100_000)
    with pytest.raises(TraceError, match="not a trace of infinity"):
        read_timeline(tmp_path / "deep.json")
