#!/usr/bin/env python3
"""Draw the chart of the README: step time and peak RAM of the contenders of a benchmark.

    python tools/readme_chart.py docs/benchmarks/peers_2-core-epyc_2026-11-27.json docs/images/peers

Writes PREFIX-light.svg and PREFIX-dark.svg, and PREFIX-narrow-light.svg and -dark.svg for phones.
Needs vl-convert-python (the extra `report`).
"""

from __future__ import annotations

import argparse
import json
import textwrap
from pathlib import Path
from typing import Any

import vl_convert

COLORS = {
    "light": {"text": "#1f2328", "ours": "#1f6fc5", "others": "#9aa4af"},
    "dark": {"text": "#e6edf3", "ours": "#58a6ff", "others": "#6e7681"},
}


def chart(results: dict[str, Any], scheme: str, *, narrow: bool) -> dict[str, Any]:
    """Return a Vega-Lite specification: two bar charts, side by side or one below the other."""
    colors, names = COLORS[scheme], [row["name"] for row in results["rows"]]

    def bars(field: str, title: str, number_format: str, *, named: bool) -> dict[str, Any]:
        name = {"field": "name", "type": "nominal", "sort": names, "title": None}
        axis = {"labelLimit": 260, "ticks": False, "domain": False} if named else None
        value = {"field": field, "type": "quantitative", "title": None, "axis": None}
        layer = {"y": {**name, "axis": axis}, "x": value}
        color = {"field": "ours", "type": "nominal", "legend": None}
        color["scale"] = {"domain": [True, False], "range": [colors["ours"], colors["others"]]}
        label = {"field": field, "type": "quantitative", "format": number_format}
        text = {"type": "text", "align": "left", "dx": 4, "color": colors["text"]}
        return {
            "title": {"text": title, "anchor": "start", "fontSize": 12},
            "width": 150 if narrow else 210,
            "height": {"step": 24},
            "layer": [
                {
                    "mark": {"type": "bar", "cornerRadiusEnd": 2},
                    "encoding": {**layer, "color": color},
                },
                {"mark": text, "encoding": {**layer, "text": label}},
            ],
        }

    title = textwrap.wrap(results["title"], 44 if narrow else 200)
    rows = [{**row, "peak_gib": row["peak_bytes"] / 2**30} for row in results["rows"]]
    text = {"labelColor": colors["text"], "titleColor": colors["text"]}
    return {
        "$schema": "https://vega.github.io/schema/vega-lite/v5.json",
        "title": {"text": title, "anchor": "start", "fontSize": 13, "offset": 12},
        "data": {"values": rows},
        "background": None,
        # Padding for fonts that are wider than the default.
        "padding": {"left": 4 if narrow else 48, "top": 5, "right": 24, "bottom": 5},
        "vconcat" if narrow else "hconcat": [
            bars("step_s", "seconds a step (less is better)", ".2f", named=True),
            bars("peak_gib", "peak RAM in GiB (less is better)", ".2f", named=narrow),
        ],
        "spacing": 16 if narrow else 36,
        "config": {
            "view": {"stroke": None},
            "axis": {**text, "labelFontSize": 12},
            "title": {"color": colors["text"]},
            "font": "sans-serif",
        },
    }


def main() -> None:
    """Draw all files."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("results", type=Path, help="JSON with a title and rows")
    parser.add_argument("prefix", help="where to write, without -light.svg")
    arguments = parser.parse_args()
    results = json.loads(arguments.results.read_text(encoding="utf-8"))
    for scheme in COLORS:
        for width, narrow in (("", False), ("-narrow", True)):
            drawing = vl_convert.vegalite_to_svg(chart(results, scheme, narrow=narrow))
            Path(f"{arguments.prefix}{width}-{scheme}.svg").write_text(drawing, encoding="utf-8")


if __name__ == "__main__":
    main()
