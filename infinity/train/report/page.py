"""Self-contained HTML page of text, tables and charts, in light and dark, for any screen.

Charts are Vega-Lite specifications; the library that draws them in the browser comes from
`vl-convert-python` and is embedded in the file (decision 0028).
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
    """Content of a page, in order; `datasets` are rows that charts refer to by name."""

    title: str
    datasets: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    charts: dict[str, Spec] = field(default_factory=dict)
    head: list[str] = field(default_factory=list)
    figures: list[str] = field(default_factory=list)

    def say(self, text: str, look: str = "") -> None:
        """Add a paragraph below the title; `look` is "soft", "bad" or ""."""
        self.head.append(f'<p class="{look}">{escape(text)}</p>')

    def tiles(self, facts: Iterable[tuple[str, str, str]]) -> None:
        """Add large numbers: (label, number, remark)."""
        cells = (
            f"<div><small>{escape(what)}</small><b>{escape(number)}</b>"
            f"<small>{escape(more)}</small></div>"
            for what, number, more in facts
        )
        self.head.append(f'<div class="tiles">{"".join(cells)}</div>')

    def facts(self, rows: Iterable[tuple[str, str]]) -> None:
        """Add (name, value) lines below the title; nothing if there are no rows."""
        lines = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in rows)
        if lines:
            self.head.append(f"<dl>{lines}</dl>")

    def text(self, title: str, text: str, note: str, *, bold: str) -> None:
        """Add a figure with preformatted text after a `bold` beginning."""
        inside = f"<pre><b>{escape(bold)}</b>{escape(text)}</pre>"
        self._figure(title, inside, note)

    def folded(self, title: str, text: str) -> None:
        """Add text across the page, displayed when its title is clicked."""
        inside = f"<summary>{escape(title)}</summary><pre>{escape(text)}</pre>"
        self.figures.append(f'<details class="wide">{inside}</details>')

    def chart(self, title: str, spec: Spec, note: str = "") -> None:
        """Add a figure with a chart; `spec` refers to its `data` by name, or in its layers."""
        name = f"chart{len(self.charts)}"
        defaults = {"width": "container", "height": HEIGHT}
        defaults["autosize"] = {"type": "fit-x", "contains": "padding"}
        self.charts[name] = {**defaults, **spec}
        css_class = "chart low" if "height" in spec else "chart"
        self._figure(title, f'<div class="{css_class}" id="{name}"></div>', note)

    def table(self, title: str, rows: Iterable[tuple[str, str, str]], note: str = "") -> None:
        """Add a figure of rows: (number or name, label, remark)."""
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
        """Write the file atomically.

        Raises `MachineError` if the library is not installed or the file cannot be written.
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
                file.write(text.encode(errors="backslashreplace"))  # names may have surrogates
        except OSError as error:
            raise MachineError(
                f"{path} cannot be written: {error.strerror}", remedy="--out FILE elsewhere"
            ) from error


@cache
def _library() -> str:
    """Return Vega, Vega-Lite and vega-embed as one script.

    It is created in a separate process, to not load a JavaScript engine into a training process.
    """
    remedy = "pip install 'torch-infinity[report]'"
    if importlib.util.find_spec("vl_convert") is None:
        raise MachineError("the package vl-convert-python is not installed", remedy=remedy)
    script = "import sys, vl_convert as v; sys.stdout.buffer.write(v.javascript_bundle().encode())"
    process = subprocess.run(
        [sys.executable, "-P", "-c", script], capture_output=True, encoding="utf-8", check=False
    )
    if process.returncode:
        why = process.stderr.strip().splitlines()[-1:] or [f"exit code {process.returncode}"]
        raise MachineError("vl-convert-python does not run", because=why[0], remedy=remedy)
    return process.stdout.replace("</script", "<\\/script")


# --- parts of specifications ---------------------------------------------------------------------


def quantitative(name: str, title: str | None, form: str = "", **more: Any) -> Spec:
    """Return a channel of numbers; `form` is the format of its axis if the default is too long."""
    axis = {"tickCount": 5, **({"format": form} if form else {})}
    return {"field": name, "type": "quantitative", "title": title, "axis": axis, **more}


def tooltip(**names: tuple[str, str]) -> list[Spec]:
    """Return the tooltip of a point; arguments are field=(title, format)."""
    return [
        {"field": name, "title": title, **({"format": form} if form else {})}
        for name, (title, form) in names.items()
    ]


def hover(x: Spec, tooltips: list[Spec]) -> Spec:
    """Return a layer with a line and a tooltip at the point nearest to the mouse."""
    params = {
        "name": "at",
        "select": {"type": "point", "on": "pointerover", "clear": "pointerout", "nearest": True,
                   "encodings": ["x"]},
    }  # fmt: skip
    opacity = {"condition": {"param": "at", "value": 0.6, "empty": False}, "value": 0}
    return {
        "mark": {"type": "rule", "strokeWidth": 1},
        "params": [params],
        "encoding": {"x": x, "opacity": opacity, "tooltip": tooltips},
    }


def mapping(value: Any) -> Mapping[str, Any]:
    """Return `value` if it is a mapping, else an empty one: files may have been edited."""
    return value if isinstance(value, Mapping) else {}
