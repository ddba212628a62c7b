"""SVG of loss curves: smoothed curves, and below them the differences from fp32."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

WIDTH, LEFT, RIGHT = 900, 70, 150
PANELS = ((40, 300), (380, 180))  # (top, height) of the losses and of the differences
COLOURS = {"fp32": "#222222", "bf16": "#d95f02", "bf16_stochastic": "#1b9e77", "8bit": "#7570b3",
           "muon": "#e7298a"}  # fmt: skip

Curve = Sequence[tuple[float, float]]


def smoothed(losses: Sequence[float], window: int) -> list[tuple[float, float]]:
    """Return (step, mean of the last `window` losses), from the first full window on."""
    points = []
    total = 0.0
    for index, loss in enumerate(losses):
        total += loss - (losses[index - window] if index >= window else 0.0)
        if index + 1 >= window:
            points.append((index + 1.0, total / window))
    return points


def draw(losses: dict[str, list[float]], title: str, window: int) -> str:
    """Return the SVG; `losses` are bits per byte by variant and must include fp32."""
    curves = {name: smoothed(values, window) for name, values in losses.items()}
    exact = dict(curves["fp32"])
    differences = {
        name: [(x, y - exact[x]) for x, y in curve if x in exact]
        for name, curve in curves.items()
        if name != "fp32"
    }
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} 610" '
        'font-family="sans-serif" font-size="13">',
        f'<rect width="{WIDTH}" height="610" fill="white"/>',
        f'<text x="{LEFT}" y="22" font-size="15">{escape(title)}</text>',
        *_panel(PANELS[0], curves, f"bits per byte, mean of {window} steps"),
        *_panel(PANELS[1], differences, "difference from fp32"),
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="602" text-anchor="middle">step</text>',
    ]
    for row, name in enumerate(losses):
        y = PANELS[0][0] + 20 * row + 12
        x = WIDTH - RIGHT + 12
        parts.append(f'<path d="M{x} {y - 4}h20" stroke="{_color(name)}" stroke-width="2"/>')
        parts.append(f'<text x="{x + 26}" y="{y}">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>\n"])


def _panel(panel: tuple[int, int], curves: dict[str, list[tuple[float, float]]], label: str):  # type: ignore[no-untyped-def]
    top, height = panel
    points = [point for curve in curves.values() for point in curve]
    if not points:
        return
    last = max(x for x, _ in points)
    low, high = min(y for _, y in points), max(y for _, y in points)
    high = high if high > low else low + 1e-6
    across = (WIDTH - LEFT - RIGHT) / last
    up = height / (high - low)
    yield (
        f'<rect x="{LEFT}" y="{top}" width="{WIDTH - LEFT - RIGHT}" height="{height}" '
        'fill="none" stroke="#999999"/>'
    )
    yield f'<text x="{LEFT + 8}" y="{top + 16}" fill="#555555">{escape(label)}</text>'
    for value in _ticks(low, high):
        y = top + (high - value) * up
        yield f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="#e5e5e5"/>'
        yield f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>'
    for value in _ticks(0, last):
        x = LEFT + value * across
        yield (f'<text x="{x:.1f}" y="{top + height + 16}" text-anchor="middle">{value:g}</text>')
    for name, curve in curves.items():
        path = "L".join(f"{LEFT + x * across:.1f} {top + (high - y) * up:.1f}" for x, y in curve)
        if path:
            yield (
                f'<path d="M{path}" fill="none" stroke="{_color(name)}" stroke-width="1.6" '
                'stroke-opacity="0.85"/>'
            )


def _ticks(low: float, high: float) -> list[float]:
    """Return about five round numbers within a range."""
    raw = (high - low) / 5
    size = 10 ** math.floor(math.log10(raw))
    step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= raw)
    first, last = math.ceil(low / step), math.floor(high / step)
    return [round(index * step, 12) for index in range(first, last + 1)]


def _color(name: str) -> str:
    return COLOURS.get(name, "#e7298a")
