"""Reader of trace files, complete or truncated."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from infinity.errors import InfinityError, MachineError
from infinity.profiling.trace_recorder import FROM_SUBMISSION

_SEPARATOR = re.compile(r"[\s,]*")


class TraceError(InfinityError):
    """The file is not a trace of an engine."""

    exit_code = 2


@dataclass(frozen=True, slots=True)
class Slice:
    """One event; times are seconds since the trace began.

    The event was requested at `submitted` and ran from `begin` to `end`; `what` is a phase or a
    kind of state, `unit` a name or "", `args` the arguments in the file.
    """

    track: str
    what: str
    unit: str
    submitted: float
    begin: float
    end: float
    nbytes: int
    args: Mapping[str, Any] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """Duration."""
        return self.end - self.begin


@dataclass(frozen=True)
class TraceTimeline:
    """A trace: slices by track, in the order of their begin, and metadata.

    `complete` is True if the trace was closed; `num_dropped` is the number of missing events.
    """

    path: str
    facts: Mapping[str, Any]
    tracks: Mapping[str, tuple[Slice, ...]]
    num_dropped: int
    complete: bool

    def of(self, *tracks: str) -> tuple[Slice, ...]:
        """Return the slices of one or several tracks."""
        return tuple(s for track in tracks for s in self.tracks.get(track, ()))


def read_timeline(path: str | os.PathLike[str]) -> TraceTimeline:
    """Read a trace written with `trace: path`; it may be truncated.

    Raises `MachineError` if the file cannot be read, and `TraceError` if it is not a trace.
    """
    file = Path(path)
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise MachineError(
            f"the trace {file} cannot be read",
            because=error.strerror,
            remedy="pass the file that `trace:` of the configuration names",
        ) from error
    tracks: dict[str, list[Slice]] = {}
    facts: Mapping[str, Any] | None = None
    dropped, complete = 0, False
    for number, event in enumerate(parse_events(text), start=1):
        try:
            name, args = event.get("name"), _arguments(event)
            if name == "trace begins":
                facts = args
            elif name == "trace ends":
                dropped, complete = int(_number(args, "dropped", 0)), True
            elif event.get("ph") == "X":
                event_slice = _slice(event)
                tracks.setdefault(event_slice.track, []).append(event_slice)
                dropped = max(dropped, int(_number(args, "dropped", 0)))
        except ValueError as error:
            raise TraceError(
                f"event {number} of {file} is not an event of infinity",
                because=str(error),
                remedy="pass the unmodified file that `trace:` wrote",
            ) from error
    if facts is None:
        raise TraceError(
            f"{file} is not a trace of infinity",
            because="it has no event that marks the beginning of the trace",
            remedy="train with trace: path.json in the config, and give that path",
        )
    ordered = {
        track: tuple(sorted(s, key=lambda x: (x.begin, -x.end))) for track, s in tracks.items()
    }
    return TraceTimeline(str(file), facts, ordered, dropped, complete)


def parse_events(text: str) -> Iterator[dict[str, Any]]:
    """Yield the complete events of a Chrome trace in array form.

    The closing bracket may be missing, and the last event truncated. In an object with
    `traceEvents` other keys are ignored.
    """
    decoder = json.JSONDecoder()
    start = text.find("[")
    if start < 0:
        return
    position = start + 1
    while True:
        position = _SEPARATOR.match(text, position).end()  # type: ignore[union-attr]
        try:
            event, position = decoder.raw_decode(text, position)
        except (ValueError, RecursionError):
            return
        if isinstance(event, dict):
            yield event


def _arguments(event: Mapping[str, Any]) -> Mapping[str, Any]:
    args = event.get("args", {})
    if not isinstance(args, Mapping):
        raise ValueError(f"its 'args' are {args!r}, not keys and values")
    return args


def _number(values: Mapping[str, Any], name: str, default: int | None = None) -> float:
    value = values.get(name, default)
    try:
        if isinstance(value, int | float) and math.isfinite(value):
            return float(value)
    except OverflowError:
        pass
    raise ValueError(f"its {name!r} is {value!r}, not a finite number")


def _slice(event: Mapping[str, Any]) -> Slice:
    """Convert an event; raises `ValueError` for invalid numbers."""
    args = _arguments(event)
    drawn = _number(event, "ts")
    end = drawn + _number(event, "dur")
    queued = _number(args, "queued_us", 0)
    track = str(event.get("cat", ""))
    # Disk requests are drawn from their submission, other events from their beginning.
    from_submission = track in FROM_SUBMISSION
    submitted = drawn if from_submission else drawn - queued
    begin = drawn + queued if from_submission else drawn
    if not all(map(math.isfinite, (submitted, begin, end))):
        raise ValueError(f"its 'ts' is {drawn}, out of range")
    return Slice(
        track=track,
        what=str(args.get("what", event.get("name", ""))),
        unit=str(args.get("unit", "")),
        submitted=submitted / 1e6,
        begin=begin / 1e6,
        end=max(end, begin) / 1e6,
        nbytes=int(_number(args, "bytes", 0)),
        args=args,
    )
