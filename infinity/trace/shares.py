"""What a trace says of each step: busy shares per lane, overlaps, stalls, and what binds.

Shares are unions of intervals: two requests at once count once. A lane is busy while something of
it goes on, not while it waits in a queue. Where compute ends with its call (a CPU) the stalls
inside it are taken out; on a GPU compute has a clock of its own, and is idle between its slices.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import combinations
from typing import TypeAlias

from infinity.trace.reader import Slice, Timeline

Interval: TypeAlias = tuple[float, float]
Times: TypeAlias = list[Interval]  # sorted, disjoint, none empty

# What may keep compute waiting, and how it is called.
MOVERS = {
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
_LANES = (*_COPIES, "sums", "update", "saving", "compute")
_SAME = ({"disk", "disk_read"}, {"disk", "disk_write"})
SMALL_SHARE = 0.05  # of a step; waits below it are not worth a name
ONE_SIDED = 1.25  # reads cover so much more of the waits than writes, or the reverse
CLEARLY = 4.0  # compute is so much longer than its waits


# --- sets of times -------------------------------------------------------------------------------


def _times(keep: Callable[[bool, bool], bool], one: Iterable[Interval], other: Times) -> Times:
    """When `keep` holds of being in one and in the other; intervals of `one` may overlap."""
    edges = [edge for b, e in one if b < e for edge in ((b, 0, 1), (e, 0, -1))]
    edges += [edge for b, e in other for edge in ((b, 1, 1), (e, 1, -1))]
    result: Times = []
    inside, since = [0, 0], 0.0
    for time, which, change in sorted(edges):
        if time > since and keep(inside[0] > 0, inside[1] > 0):
            joins = result and result[-1][1] == since
            begin = result.pop()[0] if joins else since
            result.append((begin, time))
        inside[which] += change
        since = time
    return result


def union(intervals: Iterable[Interval]) -> Times:
    """All times in at least one interval."""
    return _times(lambda one, _: one, intervals, [])


def overlap(one: Times, other: Times) -> Times:
    """All times in both."""
    return _times(lambda a, b: a and b, one, other)


def without(one: Times, other: Times) -> Times:
    """All times in the first, but not in the second."""
    return _times(lambda a, b: a and not b, one, other)


def clip(times: Times, window: Interval) -> Times:
    """All times inside a window; fast where the window is small."""
    begin, end = window
    first = max(bisect_right(times, begin, key=lambda i: i[0]) - 1, 0)
    last = bisect_left(times, end, key=lambda i: i[0])
    cut = ((max(b, begin), min(e, end)) for b, e in times[first:last])
    return [interval for interval in cut if interval[0] < interval[1]]


def length(times: Times) -> float:
    """Seconds in all."""
    return sum(end - begin for begin, end in times)


# --- shares --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stall:
    """One wait of the training thread, and the lane that was busiest meanwhile."""

    step: str
    cause: str
    unit: str
    begin: float
    seconds: float
    lane: str
    lane_seconds: float


@dataclass(frozen=True)
class StepShares:
    """One step; all times in seconds, `busy` and `overlaps` of its `seconds`.

    `waits` is what compute waited for data, `other` what is neither: the training loop's own code.
    """

    name: str
    begin: float
    end: float
    busy: dict[str, float]
    overlaps: dict[tuple[str, str], float]
    waits: float
    other: float
    covered: dict[str, float] = field(repr=False)  # by mover: how much of the waits it was busy
    causes: dict[str, float] = field(repr=False)

    @property
    def seconds(self) -> float:
        """How long the step took."""
        return self.end - self.begin

    def share(self, lane: str) -> float:
        """Busy share of a lane, 0 to 1."""
        return self.busy.get(lane, 0.0) / self.seconds if self.seconds > 0 else 0.0


class Shares:
    """What a timeline says, worked out once.

    `steps` has one entry per step that the trace knows, in order; slices are cut at step ends.
    `whole` is the same for all steps together; None where there is none.
    """

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        self._measure(timeline)
        steps = timeline.of("step")
        self.steps = [self._step(s.what, (s.begin, s.end)) for s in steps]
        self.whole: StepShares | None = None
        if steps:
            window = steps[0].begin, max(s.end for s in steps)
            name = f"all {len(steps)} steps" if len(steps) > 1 else steps[0].what
            self.whole = self._step(name, window)

    def _measure(self, timeline: Timeline) -> None:
        """When each lane was busy, and compute waited."""
        self._busy = {lane: union(_spans(timeline.of(lane))) for lane in _LANES}
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
        going_on = union([*stalls, *(i for mover in MOVERS for i in self._busy[mover])])
        self._waits = without(going_on, self._busy["compute"])

    def _step(self, name: str, window: Interval) -> StepShares:
        """What lies in a window."""
        inside = {lane: clip(times, window) for lane, times in self._busy.items()}
        waits = clip(self._waits, window)
        pairs = [p for p in combinations(SHOWN, 2) if set(p) not in _SAME]
        return StepShares(
            name=name,
            begin=window[0],
            end=window[1],
            busy={lane: length(times) for lane, times in inside.items()},
            overlaps={pair: length(overlap(inside[pair[0]], inside[pair[1]])) for pair in pairs},
            waits=length(waits),
            other=max(window[1] - window[0] - length(union(inside["compute"] + waits)), 0.0),
            covered={lane: length(overlap(inside[lane], waits)) for lane in (*MOVERS, *_NAMES)},
            causes={cause: length(clip(times, window)) for cause, times in self._causes.items()},
        )

    def largest_stalls(self, count: int = 10) -> list[Stall]:
        """The longest waits of the training thread, longest first."""
        steps, found = self.timeline.of("step"), []
        longest = sorted(self.timeline.of("stall"), key=lambda s: -s.seconds)[:count]
        for stall in (s for s in longest if s.seconds > 0):
            window = stall.begin, stall.end
            during = {lane: length(clip(self._busy[lane], window)) for lane in MOVERS}
            lane = max(during, key=lambda name: during[name]) if any(during.values()) else "nothing"
            step = next((s.what for s in steps if s.begin <= stall.begin < s.end), "after the last")
            busiest = lane, during.get(lane, 0.0)
            found.append(Stall(step, stall.what, stall.unit, stall.begin, stall.seconds, *busiest))
        return found


def _spans(slices: Iterable[Slice]) -> list[Interval]:
    return [(s.begin, s.end) for s in slices]


def binds(step: StepShares) -> str:
    """What the step's time is due to: a key of `MOVERS`, "disk_read", "disk_write", "compute",
    "other" (the loop's own code), or "unknown": waits during which nothing that is traced went on.
    """
    compute = step.busy["compute"]
    if step.other > max(step.waits, compute):
        return "other"
    if step.waits < SMALL_SHARE * step.seconds or compute > CLEARLY * step.waits:
        return "compute"
    mover = max(MOVERS, key=lambda name: step.covered[name])
    if step.covered[mover] < step.waits / 4:
        return "unknown"
    if mover == "disk":
        read, write = step.covered["disk_read"], step.covered["disk_write"]
        if read > ONE_SIDED * write:
            return "disk_read"
        if write > ONE_SIDED * read:
            return "disk_write"
    return mover


def verdict(step: StepShares) -> str:
    """What binds, in one sentence."""
    lane, total = binds(step), seconds(step.seconds)
    compute = f"busy {percent(step.share('compute'))}"
    waits = f"waits {seconds(step.waits)} of {total}"
    if lane == "compute":
        return f"{step.name}: compute binds ({compute}); it {waits}"
    if lane == "other":
        return (
            f"{step.name}: the training loop's own code binds: {seconds(step.other)} of {total} "
            f"lie outside the engine (compute {compute})"
        )
    if lane == "unknown":
        cause = max(step.causes, key=lambda c: step.causes[c], default="data")
        return (
            f"{step.name}: compute {waits}, most of it for {cause!r}, while little that is "
            "traced goes on"
        )
    busy = f"busy {percent(step.share(lane))}"
    if lane == "disk":
        read, write = percent(step.share("disk_read")), percent(step.share("disk_write"))
        busy += f": read {read}, write {write}"
    # A lane that rests half of the time is waited for one request after the other.
    verb = "binds" if step.share(lane) >= 0.5 else "is waited for, but does not bind"
    waited = f"compute waits {seconds(step.covered[lane])} of {total} for it"
    return f"{step.name}: {_NAMES.get(lane) or MOVERS[lane]} {verb} ({busy}); {waited}"


def percent(share: float) -> str:
    """A share in whole percent."""
    return f"{100 * share:.0f} %"


def seconds(time_s: float) -> str:
    """A time with its unit: "1.85 s", "12.3 ms"."""
    return f"{time_s:.2f} s" if time_s >= 0.1 else f"{time_s * 1e3:.3g} ms"
