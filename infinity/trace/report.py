"""What a trace says, as lines of text or as plain data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from infinity.trace.reader import SHOWN, Shares, StepShares, Timeline, binds, percent, verdict


def notes(timeline: Timeline) -> list[str]:
    """What is missing in the trace, in words."""
    found = []
    if not timeline.complete:
        found.append("the trace was not closed: the run was killed, or goes on")
    if timeline.num_dropped:
        found.append(f"{timeline.num_dropped:,} events were dropped: shares are lower bounds")
    return found


def report_lines(
    shares: Shares, num_stalls: int = 10, only: StepShares | None = None
) -> Iterator[str]:
    """Shares, overlaps, the largest stalls and a verdict per step; of one only if asked for."""
    yield from notes(shares.timeline)
    steps = shares.steps if only is None else [only]
    total = shares.whole if len(steps) > 1 else None
    if not steps:
        yield "no step was completed while the trace was recorded"
        return
    lanes = [lane for lane in SHOWN if any(step.busy[lane] for step in steps)]
    yield f"{'busy share of':14}  {'seconds':>8}" + "".join(f"{_short(x):>12}" for x in lanes)
    for step in [*steps, *([total] if total is not None else [])]:
        percents = "".join(f"{percent(step.share(lane)):>12}" for lane in lanes)
        yield f"{step.name:14}  {step.seconds:8.3f}{percents}"
    yield ""
    shown = total or steps[0]
    together = {pair: seconds for pair, seconds in shown.overlaps.items() if seconds > 0}
    if together:
        yield f"at the same time, in {shown.name}:"
        for (one, other), seconds in together.items():
            yield f"  {_short(one)} and {_short(other)}: {seconds:.3f} s"
        yield ""
    yield "largest stalls:"
    for stall in shares.largest_stalls(num_stalls):
        share = percent(stall.lane_seconds / stall.seconds)
        yield (
            f"  {stall.seconds * 1e3:9.2f} ms  {stall.cause:10} {stall.unit:20} in {stall.step}; "
            f"meanwhile {_short(stall.lane)} was busy {share}"
        )
    yield ""
    for step in steps:
        yield verdict(step)
    if total is not None:
        yield verdict(total)


def report_data(
    shares: Shares, num_stalls: int = 10, only: StepShares | None = None
) -> dict[str, Any]:
    """The same as data for JSON; times in seconds, shares from 0 to 1."""
    timeline, total = shares.timeline, shares.whole if only is None else only
    return {
        "trace": timeline.path,
        "device": timeline.facts.get("device"),
        "notes": notes(timeline),
        "steps": [step_data(step) for step in (shares.steps if only is None else [only])],
        "whole": None if total is None else step_data(total),
        "largest_stalls": [asdict(stall) for stall in shares.largest_stalls(num_stalls)],
    }


def step_data(step: StepShares) -> dict[str, Any]:
    """One step, or several together, as data; `idle_share` is that of compute."""
    return {
        "name": step.name,
        "seconds": step.seconds,
        "busy_share": {lane: step.share(lane) for lane in SHOWN},
        "idle_share": 1.0 - step.share("compute"),
        "waits_s": step.waits,
        "other_s": step.other,
        "binds": binds(step),
        "verdict": verdict(step),
    }


def _short(lane: str) -> str:
    return lane.replace("_", " ")
