"""A page in one file: text, tables and charts, in light and dark, for any screen.

Charts are Vega-Lite specifications, which are data; the library that draws them in the browser
comes from `vl-convert-python`, and is written into the file. Why that one: decision 0028.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any, TypeAlias

from infinity.common.files import atomic_write
from infinity.errors import MachineError

Spec: TypeAlias = dict[str, Any]
HEIGHT = 210  # pixels of a chart


@dataclass
class ReportPage:
    """The content of a page, in order; `datasets` are rows that charts name."""

    title: str
    datasets: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    charts: dict[str, Spec] = field(default_factory=dict)
    head: list[str] = field(default_factory=list)
    figures: list[str] = field(default_factory=list)

    def say(self, text: str, look: str = "") -> None:
        """A paragraph below the title; `look` is "soft" or "bad"."""
        self.head.append(f'<p class="{look}">{escape(text)}</p>')

    def tiles(self, facts: Iterable[tuple[str, str, str]]) -> None:
        """Large numbers: (what, number, a word more)."""
        cells = (
            f"<div><small>{escape(what)}</small><b>{escape(number)}</b>"
            f"<small>{escape(more)}</small></div>"
            for what, number, more in facts
        )
        self.head.append(f'<div class="tiles">{"".join(cells)}</div>')

    def facts(self, rows: Iterable[tuple[str, str]]) -> None:
        """Lines below the title: (name, value); without a line there is nothing."""
        lines = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in rows)
        if lines:
            self.head.append(f"<dl>{lines}</dl>")

    def text(self, title: str, text: str, note: str, *, bold: str) -> None:
        """A figure with text as it is, behind a `bold` beginning."""
        inside = f"<pre><b>{escape(bold)}</b>{escape(text)}</pre>"
        self._figure(title, inside, note)

    def folded(self, title: str, text: str) -> None:
        """Text that is shown when its title is clicked, across the page."""
        inside = f"<summary>{escape(title)}</summary><pre>{escape(text)}</pre>"
        self.figures.append(f'<details class="wide">{inside}</details>')

    def chart(self, title: str, spec: Spec, note: str = "") -> None:
        """Add a figure with a chart; `spec` refers to its `data` by name, or in its layers."""
        name = f"chart{len(self.charts)}"
        alone = {"width": "container", "height": HEIGHT}
        alone["autosize"] = {"type": "fit-x", "contains": "padding"}
        self.charts[name] = {**alone, **spec}
        look = "chart low" if "height" in spec else "chart"
        self._figure(title, f'<div class="{look}" id="{name}"></div>', note)

    def table(self, title: str, rows: Iterable[tuple[str, str, str]], note: str = "") -> None:
        """Add a figure of rows: (a number or a name, its label, a remark)."""
        lines = "".join(
            f"<tr><td>{escape(number)}</td>"
            f"<td>{escape(what)}<small>{escape(more)}</small></td></tr>"
            for number, what, more in rows
        )
        self._figure(title, f"<table>{lines}</table>", note)

    def _figure(self, title: str, inside: str, note: str) -> None:
        caption = f"<figcaption>{escape(note)}</figcaption>" if note else ""
        self.figures.append(f"<figure><h2>{escape(title)}</h2>{caption}{inside}</figure>")

    def write(self, path: Path) -> None:
        """Write the file, whole or not at all.

        Raises `MachineError` where the library is not installed, or the file cannot be written.
        """
        body = [f"<h1>{escape(self.title)}</h1>", *self.head]
        body.append(f'<div class="charts">{"".join(self.figures)}</div>')
        data = json.dumps({"datasets": self.datasets, "charts": self.charts}, allow_nan=False)
        template = (files("infinity.train.report") / "page.html").read_text("utf-8")
        text = Template(template).substitute(
            title=escape(self.title),
            body="\n".join(body),
            data=data.replace("<", "\\u003c"),
            library=_library(),
        )
        try:
            with atomic_write(path) as file:
                file.write(text.encode(errors="backslashreplace"))  # of odd names
        except OSError as error:
            raise MachineError(
                f"{path} cannot be written: {error.strerror}", remedy="--out FILE elsewhere"
            ) from error


@cache
def _library() -> str:
    """Vega, Vega-Lite and what embeds them, as one script.

    A process of its own makes it: a JavaScript engine has no business beside a training's state.
    """
    remedy = "pip install 'torch-infinity[report]'"
    if importlib.util.find_spec("vl_convert") is None:
        raise MachineError("the package vl-convert-python is not installed", remedy=remedy)
    script = "import sys, vl_convert as v; sys.stdout.buffer.write(v.javascript_bundle().encode())"
    done = subprocess.run(
        [sys.executable, "-P", "-c", script], capture_output=True, encoding="utf-8", check=False
    )
    if done.returncode:
        why = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        raise MachineError("vl-convert-python does not run", because=why[0], remedy=remedy)
    return done.stdout.replace("</script", "<\\/script")


# --- parts of specifications ---------------------------------------------------------------------


def quantitative(name: str, title: str | None, form: str = "", **more: Any) -> Spec:
    """A channel of numbers; `form` is the format of its axis, where the usual one is too long."""
    axis = {"tickCount": 5, **({"format": form} if form else {})}
    return {"field": name, "type": "quantitative", "title": title, "axis": axis, **more}


def tooltip(**names: tuple[str, str]) -> list[Spec]:
    """Return the tooltip of a point: field = (title, format)."""
    return [
        {"field": name, "title": title, **({"format": form} if form else {})}
        for name, (title, form) in names.items()
    ]


def hover(name: str, x: Spec, tooltips: list[Spec]) -> Spec:
    """Return a line at the point nearest to the mouse, with its numbers."""
    params = {
        "name": name,
        "select": {"type": "point", "on": "pointerover", "clear": "pointerout", "nearest": True,
                   "encodings": ["x"]},
    }  # fmt: skip
    shown = {"condition": {"param": name, "value": 0.6, "empty": False}, "value": 0}
    return {
        "mark": {"type": "rule", "strokeWidth": 1},
        "params": [params],
        "encoding": {"x": x, "opacity": shown, "tooltip": tooltips},
    }


def mapping(value: Any) -> Mapping[str, Any]:
    """It, if it has keys, else nothing: for files that others may have touched."""
    return value if isinstance(value, Mapping) else {}
