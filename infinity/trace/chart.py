"""A trace as a lane chart, in SVG by hand, and as a page of HTML around it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from infinity.trace.intervals import Interval, clip, union
from infinity.trace.reader import Slice, Timeline
from infinity.trace.report import notes
from infinity.trace.shares import SHOWN, Shares, Stall, StepShares, percent, verdict

WIDTH, LEFT, RIGHT, TOP = 1400, 150, 20, 56
ROW, GAP = 26, 8
TITLES = {
    "compute": "compute",
    "stall": "stalls",
    "to_device": "copy to device",
    "from_device": "copy from device",
    "disk_read": "disk read",
    "disk_write": "disk write",
    "sums": "sums of gradients",
    "update": "update",
    "sweep": "sweep",
    "saving": "saving, commits",
}
COLOURS = {
    "forward": "#4e79a7",
    "backward": "#2f4b6e",
    "stall": "#e15759",
    "to_device": "#76b7b2",
    "from_device": "#499894",
    "disk_read": "#f28e2b",
    "disk_write": "#b07aa1",
    "sums": "#edc948",
    "update": "#59a14f",
    "sweep": "#bab0ac",
    "saving": "#9c755f",
}
_NESTED = ("compute", "stall", "sweep")  # one thread's: a slice at a time has a text of its own
_LABEL_PX = 46  # narrower boxes have no text
_STYLE = """body{font:14px/1.45 system-ui,sans-serif;margin:24px;color:#222;max-width:1440px}
table{border-collapse:collapse;margin:12px 0}td,th{padding:3px 10px;text-align:right;
border-bottom:1px solid #ddd}td:first-child,th:first-child{text-align:left}
h1{font-size:20px}h2{font-size:16px;margin-top:28px}.verdict{font-size:16px}
.chart{overflow-x:auto;border:1px solid #ddd}.note{color:#8a4b00}"""


def draw_svg(timeline: Timeline, window: Interval | None = None) -> str:
    """The lanes over time as the text of an SVG; `window` in seconds, all steps if left out."""
    begin, end = window or _extent(timeline)
    lanes = [lane for lane in TITLES if timeline.of(lane)]
    height = TOP + len(lanes) * (ROW + GAP) + 30
    scale = (WIDTH - LEFT - RIGHT) / max(end - begin, 1e-9)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" height="{height}" font-family="sans-serif" font-size="11">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        *_axis(begin, end, scale, height),
        *_steps(timeline, begin, end, scale, height),
    ]
    for row, lane in enumerate(lanes):
        top = TOP + row * (ROW + GAP)
        busy = union((s.begin, s.end) for s in timeline.of(lane))
        share = sum(e - b for b, e in clip(busy, (begin, end))) / max(end - begin, 1e-9)
        title = f"{TITLES[lane]} {percent(share)}"
        parts.append(f'<text x="8" y="{top + 17}" font-size="12">{escape(title)}</text>')
        inside = [s for s in timeline.of(lane) if s.end > begin and s.begin < end]
        parts += _boxes(lane, inside, begin, end, scale, top)
    return "\n".join([*parts, "</svg>"])


def _extent(timeline: Timeline) -> Interval:
    steps = timeline.of("step") or timeline.of(*TITLES)
    return min((s.begin for s in steps), default=0.0), max((s.end for s in steps), default=1.0)


def _axis(begin: float, end: float, scale: float, height: int) -> Iterable[str]:
    """Marks of time, a round number apart, 5 to 12 of them."""
    span = end - begin
    unit = next(
        size * 10.0**power
        for power in range(-9, 9)
        for size in (1, 2, 5)
        if span / (size * 10.0**power) <= 12
    )
    for mark in range(int(span / unit) + 1):
        x = LEFT + mark * unit * scale
        yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="40" y2="{height - 24}" stroke="#eeeeee"/>'
        yield f'<text x="{x:.1f}" y="{height - 8}" fill="#666">{mark * unit:.6g} s</text>'


def _steps(
    timeline: Timeline, begin: float, end: float, scale: float, height: int
) -> Iterable[str]:
    free_from = 0.0
    for step in timeline.of("step"):
        if not begin <= step.begin < end:
            continue
        x = LEFT + (step.begin - begin) * scale
        yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="24" y2="{height - 24}" stroke="#999"/>'
        if x >= free_from:
            yield f'<text x="{x + 3:.1f}" y="32">{escape(step.what)}</text>'
            free_from = x + 70


def _boxes(
    lane: str, slices: Sequence[Slice], begin: float, end: float, scale: float, top: int
) -> Iterable[str]:
    """Boxes of one lane; those of less than some pixels are drawn together."""
    pixel = 1 / scale
    least = pixel if lane in _NESTED else 3 * pixel
    for one in slices:
        if one.seconds >= least:
            yield _box(one, begin, end, scale, top, text=lane in _NESTED)
    # Widened by half a pixel, so that neighbours become one.
    narrow = ((s.begin - pixel / 2, s.end + pixel / 2) for s in slices if s.seconds < least)
    colour = COLOURS.get(lane, COLOURS["forward"])
    for first, last in clip(union(narrow), (begin, end)):
        x, width = LEFT + (first - begin) * scale, (last - first) * scale
        yield (f'<rect x="{x:.2f}" y="{top}" width="{width:.2f}" height="{ROW}" fill="{colour}"/>')


def _box(one: Slice, begin: float, end: float, scale: float, top: int, *, text: bool) -> str:
    colour = COLOURS.get(one.what) or COLOURS.get(one.lane, "#888")
    first, last = max(one.begin, begin), min(one.end, end)
    x, width = LEFT + (first - begin) * scale, (last - first) * scale
    told = f"{one.what} {one.unit}".strip()
    size = f", {one.nbytes:,} bytes" if one.nbytes else ""
    queued = one.begin - one.submitted
    waited = f", queued {queued * 1e3:.3f} ms" if queued > 0 else ""
    title = f"{told}: {one.seconds * 1e3:.3f} ms{size}{waited}, at {one.begin:.4f} s"
    label = ""
    if text and width >= _LABEL_PX:
        short = escape((one.unit or one.what)[: int(width / 6.5)])
        label = f'<text x="{x + 3:.2f}" y="{top + 17}" fill="white">{short}</text>'
    return (
        f'<g><title>{escape(title)}</title><rect x="{x:.2f}" y="{top}" width="{width:.2f}" '
        f'height="{ROW}" fill="{colour}" fill-opacity="0.9" stroke="white" stroke-width="0.3"/>'
        f"{label}</g>"
    )


# --- the page ------------------------------------------------------------------------------------


def draw_html(shares: Shares, only: StepShares | None = None) -> str:
    """A page of its own: verdicts, the chart, shares, overlaps and the largest stalls.

    Of all steps and the slowest, or of one only.
    """
    timeline, steps, total = shares.timeline, shares.steps, shares.whole
    if only is not None:
        steps, total = [only], only
    parts = [
        "<!doctype html>",
        f'<html lang="en"><meta charset="utf-8"><title>{escape(timeline.path)}</title>',
        f"<style>{_STYLE}</style><body>",
        f"<h1>{escape(timeline.path)}</h1>",
    ]
    parts += [f'<p class="note">{escape(note)}</p>' for note in notes(timeline)]
    if total is not None:
        parts.append(f'<p class="verdict">{escape(verdict(total))}</p>')
    window = (only.begin, only.end) if only is not None else None
    parts.append(f'<div class="chart">{draw_svg(timeline, window)}</div>')
    if steps:
        slowest = max(steps, key=lambda s: s.seconds)
        if len(steps) > 1:
            parts.append(f"<h2>The slowest: {escape(slowest.name)}</h2>")
            window = slowest.begin, slowest.end
            parts.append(f'<div class="chart">{draw_svg(timeline, window)}</div>')
        parts += ["<h2>Busy shares</h2>", _shares_table(steps)]
        parts += ["<h2>At the same time</h2>", _overlap_table(total)]
    parts += ["<h2>Largest stalls</h2>", _stalls_table(shares.largest_stalls())]
    if steps:
        said = "".join(f"<li>{escape(verdict(step))}</li>" for step in steps)
        parts += ["<h2>Step by step</h2>", f"<ul>{said}</ul>"]
    return "\n".join([*parts, "</body></html>", ""])


def _shares_table(steps: Sequence[StepShares]) -> str:
    head = ["step", "seconds", *(lane.replace("_", " ") for lane in SHOWN), "compute idle", "other"]
    rows = [
        [
            step.name,
            f"{step.seconds:.3f}",
            *(percent(step.share(lane)) for lane in SHOWN),
            percent(1 - step.share("compute")),
            percent(step.other / step.seconds if step.seconds else 0.0),
        ]
        for step in steps
    ]
    return _table(head, rows)


def _overlap_table(total: StepShares | None) -> str:
    if total is None:
        return ""
    rows = [
        [f"{one} and {other}".replace("_", " "), f"{seconds:.3f}"]
        for (one, other), seconds in total.overlaps.items()
        if seconds > 0
    ]
    return _table(["lanes", "seconds together"], rows)


def _stalls_table(stalls: Sequence[Stall]) -> str:
    rows = [
        [
            s.step,
            f"{s.begin:.4f}",
            f"{s.seconds * 1e3:.2f}",
            s.cause,
            s.unit,
            f"{s.lane} {percent(s.lane_seconds / s.seconds)}".replace("_", " "),
        ]
        for s in stalls
    ]
    return _table(["step", "at, s", "ms", "cause", "unit", "busiest meanwhile"], rows)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    cells = "".join(f"<th>{escape(text)}</th>" for text in head)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(text)}</td>" for text in row) + "</tr>" for row in rows
    )
    return f"<table><tr>{cells}</tr>{body}</table>"
