"""Recorder of a timeline into a Chrome trace-event file, with a writer thread.

[Note: bounded queue]
A recording thread appends one tuple to a bounded queue and never blocks: if the queue is full, the
event is dropped and counted, and the count is written to the file. The writer thread empties the
queue every `FLUSH_S`, so a killed process loses the events of that time. The recorded steps are
selected by `profiling/step_tracer.py` (`trace_steps`).

[Note: always valid JSON]
Every flush writes the closing bracket, which the next flush overwrites, with one call each. So the
file is valid JSON at any time, also after `kill -9`; the reader also accepts a truncated file.

[Note: deferred times]
If compute or copies are asynchronous, an event is recorded with `Stamp` objects; the writer thread
polls them until the times are known. No thread waits for the device.
"""

from __future__ import annotations

import json
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from infinity.common.files import atomic_write, write_at
from infinity.errors import MachineError

FLUSH_S = 0.1
CAPACITY = 1 << 16  # queued events; about 15 MB
MAX_ROWS = 16  # maximum rows of a track with overlapping events
CLOSE_S = 10.0
NO_UNIT = -1

# Track -> name in the file, in the order of display.
TRACKS = {
    "step": "steps",
    "micro_batch": "micro-batches",
    "compute": "compute",
    "stall": "stalls",
    "to_device": "copy to device",
    "from_device": "copy from device",
    "disk_read": "disk read",
    "disk_write": "disk write",
    "sums": "sums of gradients",
    "optimizer_pass": "optimizer_pass",
    "update": "update",
    "saving": "saving and commits",
}
# Tracks whose events may overlap without nesting: they get several rows.
SPREAD = ("to_device", "from_device", "disk_read", "disk_write", "update", "saving")
# Tracks that draw an event from its submission; others from its beginning.
FROM_SUBMISSION = ("disk_read", "disk_write")


class Stamp(Protocol):
    """A point in the order of compute, or of copies."""

    def time_ns(self) -> int | None:
        """Return the time on `time.perf_counter_ns`; None if it is not known yet."""


class Watched(Protocol):
    """A request that records itself when it has ended."""

    def note(self) -> None:
        """Record the request if it has ended and was not recorded yet."""


When: TypeAlias = int | Stamp
# track, name, unit, submitted, begin, end, bytes, further arguments
_Event: TypeAlias = tuple[str, str, int, int | None, When, When, int, Mapping[str, Any] | None]
_TimedEvent: TypeAlias = tuple[str, str, int, int | None, int, int, int, Mapping[str, Any] | None]


class Trace:
    """Writer of one trace file, replacing an existing one. Any thread may record.

    `names` are the names of units. `follow` is called once on the writer thread, before it queries
    a device for times. Creates missing directories; raises `MachineError` if the file cannot be
    written or the path is not a file.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        names: Sequence[str] = (),
        facts: Mapping[str, Any] | None = None,
        capacity: int = CAPACITY,
        follow: Callable[[], object] = bool,
    ) -> None:
        self.path = Path(path).expanduser()
        self.names = tuple(names)
        self.num_dropped = 0
        """Number of events not written: the queue was full, or writing failed."""
        self.failure: Exception | None = None
        """The first error of writing, or of querying times."""
        self.start_ns = time.perf_counter_ns()
        self._capacity = capacity
        self._follow = follow
        self._queue: deque[_Event] = deque()
        self._pending: dict[str, deque[_Event]] = {track: deque() for track in TRACKS}
        self._watched: weakref.WeakSet[Watched] = weakref.WeakSet()
        self._rows: dict[str, list[int]] = {track: [] for track in TRACKS}
        self._lock = threading.RLock()  # garbage collection of a ticket may record
        self._owner_pid = os.getpid()
        self._closed = False
        self._wake = threading.Event()
        self._end = 0  # offset of the closing bracket
        self._file = -1
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_write(self.path) as file:  # a writer of an older file is not affected
                self._file = os.dup(file.fileno())
                self._write_events(self._header(facts or {}), 0)
        except OSError as error:
            if self._file >= 0:
                os.close(self._file)
            raise MachineError(
                f"the trace {self.path} cannot be opened",
                because=error.strerror,
                remedy="give trace a path that can be written",
            ) from error
        self._thread = threading.Thread(target=self._run, name="infinity-trace", daemon=True)
        self._thread.start()

    # --- recording: any thread, never blocks ---------------------------------------------------

    def add(
        self,
        track: str,
        name: str,
        unit: int,
        begin: When,
        end: When,
        nbytes: int = 0,
        *,
        submitted: int | None = None,
        args: Mapping[str, Any] | None = None,
    ) -> None:
        """Record an event from `begin` to `end`, in nanoseconds of `time.perf_counter_ns`.

        The event is written when both times are known.
        """
        if len(self._queue) >= self._capacity or self._closed:
            with self._lock:
                self.num_dropped += not self._closed
            return
        self._queue.append((track, name, unit, submitted, begin, end, nbytes, args))

    def watch(self, request: Watched) -> None:
        """Record a request in `close` at the latest, even if no thread waits for it."""
        self._watched.add(request)

    def close(self) -> None:
        """Write queued events, close the file, stop the thread. Idempotent; no-op in a child."""
        if self._closed or os.getpid() != self._owner_pid:
            return
        for request in list(self._watched):
            request.note()
        self._closed = True
        self._wake.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(CLOSE_S)

    # --- writing: writer thread ----------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._follow()
        except Exception as error:  # of a device: the thread must continue
            self.failure = error
        while not self._closed:
            self._wake.wait(FLUSH_S)
            self._flush()
        self._flush()
        with self._lock:
            self.num_dropped += sum(map(len, self._pending.values()))
        end = {"dropped": self.num_dropped}
        self._write_events([self._instant("trace ends", time.perf_counter_ns(), end)], 0)
        os.close(self._file)

    def _flush(self) -> None:
        events: list[_TimedEvent] = []
        for _ in range(len(self._queue)):
            event = self._queue.popleft()
            self._pending[event[0]].append(event)
        for waiting in self._pending.values():  # events of a track end in order
            while waiting and self._resolve(waiting[0], events):
                waiting.popleft()
            while len(waiting) > self._capacity:
                waiting.popleft()
                with self._lock:
                    self.num_dropped += 1
        if events:
            events.sort(key=lambda e: (e[4], -e[5]))
            self._write_events(
                [line for event in events for line in self._lines(event)], len(events)
            )

    def _resolve(self, event: _Event, events: list[_TimedEvent]) -> bool:
        """Append the event with its times to `events`; return False if they are not known yet."""
        track, name, unit, submitted, begin, end, nbytes, args = event
        try:
            begin_ns, end_ns = (t if isinstance(t, int) else t.time_ns() for t in (begin, end))
        except Exception as error:  # of a closed device: the thread must continue
            self.failure = self.failure or error
            with self._lock:
                self.num_dropped += 1
            return True
        if begin_ns is None or end_ns is None:
            return False
        events.append((track, name, unit, submitted, begin_ns, end_ns, nbytes, args))
        return True

    def _write_events(self, lines: Iterable[str], num_events: int) -> None:
        text = ",\n".join(lines)
        data = (("[\n" if not self._end else ",\n") + text + "\n]\n").encode()
        try:
            write_at(self._file, data, self._end)
            self._end += len(data) - len("\n]\n")
        except OSError as error:
            self.failure = self.failure or error
            with self._lock:
                self.num_dropped += num_events

    def _lines(self, event: _TimedEvent) -> Iterable[str]:
        track, name, unit, submitted, begin, end, nbytes, args = event
        arguments: dict[str, Any] = {"unit": self.names[unit]} if unit >= 0 else {}
        label = f"{name} {self.names[unit]}" if unit >= 0 else name
        if nbytes:
            arguments["bytes"] = nbytes
        start = begin
        if submitted is not None:
            arguments["queued_us"] = round((begin - submitted) / 1e3, 3)
            start = submitted if track in FROM_SUBMISSION else begin
        arguments |= {"what": name, **(args or {})}
        row, is_new = self._row(track, start, end)
        if is_new:
            yield from self._track(track, row)
        yield (
            f'{{"ph":"X","cat":"{track}","name":{json.dumps(label)},"pid":1,'
            f'"tid":{_tid(track, row)},"ts":{(start - self.start_ns) / 1e3:.3f},'
            f'"dur":{max(end - start, 0) / 1e3:.3f},"args":{_json(arguments)}}}'
        )

    def _row(self, track: str, start: int, end: int) -> tuple[int, bool]:
        """Return the first row of a track without overlap, and True if the row is new."""
        rows = self._rows[track]
        if track not in SPREAD:
            rows[:] = [end]
            return 0, False
        for row, busy_until in enumerate(rows):
            if busy_until <= start:
                rows[row] = end
                return row, False
        if len(rows) < MAX_ROWS:
            rows.append(end)
            return len(rows) - 1, len(rows) > 1
        row = rows.index(min(rows))
        rows[row] = max(end, rows[row])
        return row, False

    def _header(self, facts: Mapping[str, Any]) -> list[str]:
        process = {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": "infinity"}}
        lines = [_json(process)]
        for track in TRACKS:
            lines += self._track(track, 0)
        metadata = {"format": 1, "unix_s": round(time.time(), 3), "pid": os.getpid(), **facts}
        return [*lines, self._instant("trace begins", self.start_ns, metadata)]

    def _track(self, track: str, row: int) -> list[str]:
        tid = _tid(track, row)
        name = TRACKS[track] + (f" ({row + 1})" if row else "")
        fields = {"ph": "M", "pid": 1, "tid": tid}
        return [
            _json(fields | {"name": "thread_name", "args": {"name": name}}),
            _json(fields | {"name": "thread_sort_index", "args": {"sort_index": tid}}),
        ]

    def _instant(self, name: str, at_ns: int, args: Mapping[str, Any]) -> str:
        fields = {"ph": "i", "s": "g", "pid": 1, "tid": 0}
        ts = (at_ns - self.start_ns) / 1e3
        return _json(fields | {"name": name, "ts": ts, "args": args})


class Laps:
    """Timer of consecutive phases in one thread; each begins at the end of the last.

    No effect if `trace` is None.
    """

    def __init__(self, trace: Trace | None, unit: int = NO_UNIT) -> None:
        self._trace = trace
        self._unit = unit
        self._begin = time.perf_counter_ns()

    def lap(self, track: str, name: str, nbytes: int = 0) -> None:
        """Record the phase that has just ended."""
        if self._trace is None:
            return
        now = time.perf_counter_ns()
        self._trace.add(track, name, self._unit, self._begin, now, nbytes)
        self._begin = now


def _tid(track: str, row: int) -> int:
    return (list(TRACKS).index(track) + 1) * 100 + row


def _json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"), default=str)
