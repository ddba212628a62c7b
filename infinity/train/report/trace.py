"""The page of a trace: busy tracks over time, to zoom into, and the binding resource."""

from __future__ import annotations

from typing import Any

from infinity.common.sizes import format_size
from infinity.errors import InfinityError
from infinity.profiling.trace_reader import (
    SHOWN,
    Shares,
    Slice,
    StepShares,
    percent,
    report_data,
    seconds,
    verdict,
)
from infinity.profiling.trace_recorder import TRACKS
from infinity.train.report.page import ReportPage, Spec, quantitative, tooltip

MOST = 20_000  # slices of a page; of longer traces it has the first steps that fit
_NAMES = 130  # pixels of the names of tracks
_ROW = 30  # pixels of a track


def trace_page(shares: Shares, only: StepShares | None = None) -> ReportPage:
    """Everything there is to see, of one step if asked for; tracks without a slice are left out.

    Raises `InfinityError` where no step was completed.
    """
    timeline, steps = shares.timeline, shares.steps if only is None else [only]
    total = only or shares.total
    if total is None:
        raise InfinityError("no step was completed while the trace was recorded")
    data = report_data(shares, 6, only)
    drawn, slices = _drawn(shares, steps)
    page = ReportPage(f"Trace of {timeline.path.rpartition('/')[2]}: {total.name}")
    page.say(verdict(total))
    for note in data["notes"]:
        page.say(note, "bad")
    if len(drawn) < len(steps):
        page.say(f"{drawn[0].name} to {drawn[-1].name} are drawn; --step N draws another", "soft")
    facts = [
        ("steps", str(len(steps)), ""),
        ("a step", seconds(total.seconds / len(steps)), "mean"),
    ]
    facts.append(("waits", percent(total.waits / total.seconds), "of the time"))
    page.tiles([*facts, ("the loop's own code", percent(total.other / total.seconds), "of it")])
    page.datasets["slices"] = [_row(one, drawn[0].begin) for one in slices]
    _timeline(page, drawn)
    shown = [track for track in SHOWN if total.share(track)]
    page.datasets["busy"] = [
        {"track": _track(track), "share": total.share(track)} for track in shown
    ]
    y: Spec = {"field": "track", "type": "nominal", "sort": None, "title": None}
    y["axis"] = {"labelLimit": 0}
    x = quantitative("share", None, "%", scale={"domain": [0, 1]})
    tip = tooltip(track=("", ""), share=("busy", ".1%"))
    bars = {"data": {"name": "busy"}, "mark": "bar", "height": _ROW * len(shown)}
    page.chart("Busy", {**bars, "encoding": {"y": y, "x": x, "tooltip": tip}}, "share of the time")
    page.table("Longest waits", [_stall(stall) for stall in data["largest_stalls"]])
    page.table("Steps", [_of_step(step) for step in steps[:20]])
    return page


def _drawn(shares: Shares, steps: list[StepShares]) -> tuple[list[StepShares], list[Slice]]:
    """The steps that are drawn, at least one, and all that goes on in them."""
    tracks = [track for track in TRACKS if track != "step"]
    found = sorted(shares.timeline.of(*tracks), key=lambda one: one.begin)
    drawn: list[StepShares] = []
    slices: list[Slice] = []
    for step in steps:
        inside = [one for one in found if step.begin <= one.begin < step.end]
        if drawn and len(slices) + len(inside) > MOST:
            break
        drawn.append(step)
        slices += inside
    return drawn, slices


def _row(one: Slice, since: float) -> dict[str, Any]:
    """A slice; times are ms since the first step that is drawn."""
    return {
        "track": _track(one.track),
        "what": _what(one),
        "unit": one.what if one.track == "micro_batch" else one.unit,
        "begin": round((one.begin - since) * 1e3, 4),
        "end": round((one.end - since) * 1e3, 4),
        "took": seconds(one.seconds),
        "queued": seconds(one.begin - one.submitted),
        "size": format_size(one.nbytes) if one.nbytes else "",
    }


def _what(one: Slice) -> str:
    """Return the text of a slice in the legend; micro-batches are of one kind."""
    if one.track == "micro_batch":
        return "micro-batch"
    return f"wait: {one.what.replace('_', ' ')}" if one.track == "stall" else one.what


def _track(track: str) -> str:
    return TRACKS.get(track, track).replace("_", " ")


def _timeline(page: ReportPage, drawn: list[StepShares]) -> None:
    """Steps above, where a part is chosen by dragging; all tracks of that part below."""
    since = drawn[0].begin
    page.datasets["steps"] = [
        {"name": s.name, "begin": (s.begin - since) * 1e3, "end": (s.end - since) * 1e3}
        for s in drawn
    ]
    first = page.datasets["steps"][-1 if len(drawn) < 3 else 1]
    brush = {"name": "part", "select": {"type": "interval", "encodings": ["x"]},
             "value": {"x": [first["begin"], first["end"]]}}  # fmt: skip
    extent = {"minExtent": _NAMES, "maxExtent": _NAMES, "labelLimit": 0}
    span, legend = {"x2": {"field": "end"}}, {"orient": "bottom"}
    x = quantitative("begin", None, scale={"nice": False})
    overview: Spec = {
        "data": {"name": "steps"},
        "height": _ROW,
        "params": [brush],
        "mark": {"type": "bar", "stroke": "gray", "strokeWidth": 1, "fillOpacity": 0.25},
        "encoding": {
            "x": {**x, "axis": {"tickCount": 5, "orient": "top"}},
            **span,
            "y": {"datum": "steps", "type": "nominal", "title": None, "axis": extent},
            "tooltip": tooltip(name=("", "")),
        },
    }
    names = [_track(track) for track in TRACKS]
    rows = page.datasets["slices"]
    shown = [name for name in dict.fromkeys(names) if any(row["track"] == name for row in rows)]
    tip = tooltip(what=("what", ""), unit=("unit", ""), took=("took", ""), queued=("queued", ""),
                   size=("bytes", ""))  # fmt: skip
    tracks: Spec = {
        "data": {"name": "slices"},
        "height": _ROW * len(shown),
        "mark": {"type": "bar", "clip": True, "strokeWidth": 0.7, "height": {"band": 0.8}},
        "encoding": {
            "x": {**quantitative("begin", "ms since the first step"),
                  "scale": {"domain": {"param": "part", "encoding": "x"}, "nice": False}},
            **span,
            "y": {"field": "track", "type": "nominal", "sort": shown, "title": None,
                  "axis": {**extent, "grid": True}},
            "color": {"field": "what", "sort": None, "legend": legend},
            "stroke": {"field": "what", "sort": None, "legend": legend},  # a line where it is short
            "tooltip": tip,
        },
    }  # fmt: skip
    page.chart(
        "Busy times by resource",
        {"vconcat": [overview, tracks], "spacing": 8, "names": _NAMES},
        "drag over the steps to select a part, and drag that part to move it",
        wide=True,
    )


def _stall(stall: dict[str, Any]) -> tuple[str, str, str]:
    busy = percent(stall["resource_seconds"] / stall["seconds"])
    what = f"{stall['cause'].replace('_', ' ')} {stall['unit']}"
    return (
        seconds(stall["seconds"]),
        what,
        f"{stall['step']}; at the same time {_track(stall['track'])} was busy {busy}",
    )


def _of_step(step: StepShares) -> tuple[str, str, str]:
    name, _, text = verdict(step).partition(": ")
    return name, text, ""
