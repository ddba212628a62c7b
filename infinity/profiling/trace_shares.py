"""Summary of a trace by step: busy shares of tracks, stalls, and the bottleneck.

Shares are unions of intervals: two concurrent requests count once. A track is busy while one of its
events runs, not while it is queued. If compute ends with its call (a CPU), stalls inside compute
are subtracted; on a GPU compute is timed by the device, and is idle between its slices.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, TypeAlias

from infinity.profiling.trace_reader import Slice, TraceTimeline

Interval: TypeAlias = tuple[float, float]
Times: TypeAlias = list[Interval]  # sorted, disjoint, none empty

# Tracks that compute may wait for, with the name in verdicts.
CAUSES = {
    "disk": "the disk",
    "to_device": "copying to the device",
    "from_device": "copying from the device",
    "sums": "summing gradients",
    "update": "the optimizer update",
    "saving": "saving",
}
_COPIES = ("disk_read", "disk_write", "to_device", "from_device")
SHOWN = ("compute", "disk", *_COPIES, "sums", "update")
_NAMES = {"disk_read": "disk read", "disk_write": "disk write"}
SMALL_SHARE = 0.05  # of a step; shorter waits are not attributed
ONE_SIDED = 1.25  # ratio of the waits covered by reads and writes above which one is named
CLEARLY = 4.0  # ratio of compute to its waits above which compute binds


# --- sets of times -------------------------------------------------------------------------------


def _combine(keep: Callable[[bool, bool], bool], one: Iterable[Interval], other: Times) -> Times:
    """Return the times at which `keep(in one, in other)`; intervals of `one` may overlap."""
    edges = [edge for b, e in one if b < e for edge in ((b, 0, 1), (e, 0, -1))]
    edges += [edge for b, e in other for edge in ((b, 1, 1), (e, 1, -1))]
    result: Times = []
    inside, since = [0, 0], 0.0
    for time, operand, change in sorted(edges):
        if time > since and keep(inside[0] > 0, inside[1] > 0):
            joins = result and result[-1][1] == since
            begin = result.pop()[0] if joins else since
            result.append((begin, time))
        inside[operand] += change
        since = time
    return result


def union(intervals: Iterable[Interval]) -> Times:
    """Return the times in at least one interval."""
    return _combine(lambda one, _: one, intervals, [])


def overlap(one: Times, other: Times) -> Times:
    """Return the times in both."""
    return _combine(lambda a, b: a and b, one, other)


def without(one: Times, other: Times) -> Times:
    """Return the times in `one` but not in `other`."""
    return _combine(lambda a, b: a and not b, one, other)


def clip(times: Times, window: Interval) -> Times:
    """Return the times inside a window, by bisection."""
    begin, end = window
    first = max(bisect_right(times, begin, key=lambda i: i[0]) - 1, 0)
    last = bisect_left(times, end, key=lambda i: i[0])
    clipped = ((max(b, begin), min(e, end)) for b, e in times[first:last])
    return [interval for interval in clipped if interval[0] < interval[1]]


def length(times: Times) -> float:
    """Return the total of seconds."""
    return sum(end - begin for begin, end in times)


# --- shares --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stall:
    """One wait of the training thread, and the busiest track during it."""

    step: str
    cause: str
    unit: str
    begin: float
    seconds: float
    track: str
    resource_seconds: float


@dataclass(frozen=True)
class StepShares:
    """Shares of one step; times in seconds, `busy` by track.

    `waits` is the time compute waited for data; `other` is neither compute nor waits: the code of
    the training loop.
    """

    name: str
    begin: float
    end: float
    busy: dict[str, float]
    waits: float
    other: float
    covered: dict[str, float] = field(repr=False)  # by track: its busy time during waits
    causes: dict[str, float] = field(repr=False)

    @property
    def seconds(self) -> float:
        """Duration of the step."""
        return self.end - self.begin

    def share(self, track: str) -> float:
        """Return the busy share of a track, 0 to 1."""
        return self.busy.get(track, 0.0) / self.seconds if self.seconds > 0 else 0.0


class Shares:
    """Busy shares of a timeline, computed once.

    `steps` has one entry per traced step, in order; slices are cut at step boundaries. `total` is
    the entry of all steps together; None without steps.
    """

    def __init__(self, timeline: TraceTimeline) -> None:
        self.timeline = timeline
        self._measure(timeline)
        steps = timeline.of("step")
        self.steps = [self._step(s.what, (s.begin, s.end)) for s in steps]
        self.total: StepShares | None = None
        if steps:
            window = steps[0].begin, max(s.end for s in steps)
            name = f"all {len(steps)} steps" if len(steps) > 1 else steps[0].what
            self.total = self._step(name, window)

    def _measure(self, timeline: TraceTimeline) -> None:
        """Compute the times at which each track was busy and compute waited."""
        tracks = (*_COPIES, "sums", "update", "saving", "compute")
        self._busy = {track: union(_spans(timeline.of(track))) for track in tracks}
        self._busy["disk"] = union(self._busy["disk_read"] + self._busy["disk_write"])
        causes = {s.what for s in timeline.of("stall")}
        self._causes = {
            cause: union(_spans(s for s in timeline.of("stall") if s.what == cause))
            for cause in sorted(causes)
        }
        stalls = union(_spans(timeline.of("stall")))
        if timeline.facts.get("host_clock", True):
            self._busy["compute"] = without(self._busy["compute"], stalls)
            self._waits = stalls
            return
        active = union([*stalls, *(i for cause in CAUSES for i in self._busy[cause])])
        self._waits = without(active, self._busy["compute"])

    def _step(self, name: str, window: Interval) -> StepShares:
        inside = {track: clip(times, window) for track, times in self._busy.items()}
        waits = clip(self._waits, window)
        return StepShares(
            name=name,
            begin=window[0],
            end=window[1],
            busy={track: length(times) for track, times in inside.items()},
            waits=length(waits),
            other=max(window[1] - window[0] - length(union(inside["compute"] + waits)), 0.0),
            covered={track: length(overlap(inside[track], waits)) for track in (*CAUSES, *_NAMES)},
            causes={cause: length(clip(times, window)) for cause, times in self._causes.items()},
        )

    def largest_stalls(self, count: int) -> list[Stall]:
        """Return the longest waits of the training thread, longest first."""
        steps, stalls = self.timeline.of("step"), []
        longest = sorted(self.timeline.of("stall"), key=lambda s: -s.seconds)[:count]
        for stall in (s for s in longest if s.seconds > 0):
            window = stall.begin, stall.end
            during = {track: length(clip(self._busy[track], window)) for track in CAUSES}
            track = max(during, key=during.__getitem__) if any(during.values()) else "nothing"
            step = next((s.what for s in steps if s.begin <= stall.begin < s.end), "after the last")
            busiest = track, during.get(track, 0.0)
            stalls.append(Stall(step, stall.what, stall.unit, stall.begin, stall.seconds, *busiest))
        return stalls


def _spans(slices: Iterable[Slice]) -> list[Interval]:
    return [(s.begin, s.end) for s in slices]


def binds(step: StepShares) -> str:
    """Return the bottleneck of a step: a key of `CAUSES`, "disk_read", "disk_write", "compute",
    "other" (code of the training loop), or "unknown": waits without a traced cause.
    """
    compute = step.busy["compute"]
    if step.other > max(step.waits, compute):
        return "other"
    if step.waits < SMALL_SHARE * step.seconds or compute > CLEARLY * step.waits:
        return "compute"
    cause = max(CAUSES, key=lambda name: step.covered[name])
    if step.covered[cause] < step.waits / 4:
        return "unknown"
    if cause == "disk":
        read, write = step.covered["disk_read"], step.covered["disk_write"]
        if read > ONE_SIDED * write:
            return "disk_read"
        if write > ONE_SIDED * read:
            return "disk_write"
    return cause


def verdict(step: StepShares) -> str:
    """Return a sentence that names the bottleneck of a step."""
    track, total = binds(step), seconds(step.seconds)
    compute = f"busy {percent(step.share('compute'))}"
    waits = f"waits {seconds(step.waits)} of {total}"
    if track == "compute":
        return f"{step.name}: compute binds ({compute}); it {waits}"
    if track == "other":
        return (
            f"{step.name}: the training loop's own code binds: {seconds(step.other)} of {total} "
            f"are outside the engine (compute {compute})"
        )
    if track == "unknown":
        cause = max(step.causes, key=lambda c: step.causes[c], default="data")
        return (
            f"{step.name}: compute {waits}, most of it for {cause!r}, during little traced activity"
        )
    busy = f"busy {percent(step.share(track))}"
    if track == "disk":
        read, write = percent(step.share("disk_read")), percent(step.share("disk_write"))
        busy += f": read {read}, write {write}"
    # A track idle for half of the time serves single requests, one after the other.
    verb = "binds" if step.share(track) >= 0.5 else "is waited for, but does not bind"
    waited = f"compute waits {seconds(step.covered[track])} of {total} for it"
    return f"{step.name}: {_NAMES.get(track) or CAUSES[track]} {verb} ({busy}); {waited}"


def percent(share: float) -> str:
    """Return a share as a rounded percentage."""
    return f"{100 * share:.0f} %"


def seconds(time_s: float) -> str:
    """Return a time with its unit: "1.85 s", "12.3 ms"."""
    return f"{time_s:.2f} s" if time_s >= 0.1 else f"{time_s * 1e3:.3g} ms"


# --- as text, and as data ------------------------------------------------------------------------


def report_data(shares: Shares, num_stalls: int) -> dict[str, Any]:
    """Return shares and a verdict per step, and the largest stalls, for JSON.

    Times are in seconds, shares from 0 to 1; `notes` list missing events of the trace.
    """
    timeline, total, notes = shares.timeline, shares.total, []
    if not timeline.complete:
        notes.append("the trace was not closed: the run was killed, or is still running")
    if timeline.num_dropped:
        notes.append(f"{timeline.num_dropped:,} events were dropped: shares are lower bounds")
    return {
        "trace": timeline.path,
        "device": timeline.facts.get("device"),
        "notes": notes,
        "steps": [step_data(step) for step in shares.steps],
        "total": None if total is None else step_data(total),
        "largest_stalls": [asdict(stall) for stall in shares.largest_stalls(num_stalls)],
    }


def step_data(step: StepShares) -> dict[str, Any]:
    """Return one step, or all together, as data; `idle_share` is that of compute."""
    return {
        "name": step.name,
        "seconds": step.seconds,
        "busy_share": {track: step.share(track) for track in SHOWN},
        "idle_share": 1.0 - step.share("compute"),
        "waits_s": step.waits,
        "other_s": step.other,
        "binds": binds(step),
        "verdict": verdict(step),
    }


def report_lines(data: Mapping[str, Any]) -> Iterator[str]:
    """Yield the human-readable lines of a report from `report_data`."""
    yield from data["notes"]
    steps = data["steps"]
    if not steps:
        yield "no step was completed while the trace was recorded"
        return
    shown = steps + ([data["total"]] if len(steps) > 1 else [])
    tracks = [track for track in SHOWN if any(step["busy_share"][track] for step in steps)]
    yield f"{'busy share of':14}  {'seconds':>8}" + "".join(f"{_spaced(x):>12}" for x in tracks)
    for step in shown:
        percents = "".join(f"{percent(step['busy_share'][track]):>12}" for track in tracks)
        yield f"{step['name']:14}  {step['seconds']:8.3f}{percents}"
    yield ""
    yield "largest stalls:"
    for stall in data["largest_stalls"]:
        share = percent(stall["resource_seconds"] / stall["seconds"])
        yield (
            f"  {stall['seconds'] * 1e3:9.2f} ms  {stall['cause']:10} {stall['unit']:20} in "
            f"{stall['step']}; at the same time {_spaced(stall['track'])} was busy {share}"
        )
    yield ""
    yield from (step["verdict"] for step in shown)


def _spaced(track: str) -> str:
    return track.replace("_", " ")
