"""What `infinity checkpoint inspect` shows."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import UTC, datetime
from math import prod
from pathlib import Path
from typing import Any

from infinity import __version__
from infinity.checkpoint.layout import INDEX, MANIFEST_NAME
from infinity.checkpoint.reader import CheckpointReader
from infinity.checkpoint.root import find_tag, tags
from infinity.cli.screen import Page, ProgressLine
from infinity.errors import CheckpointError, listed
from infinity.sizes import format_count, format_size

_MAX_TAGS = 20


def report_of(root: Path, tag: str, reader: CheckpointReader) -> dict[str, Any]:
    """What is known without reading tensors, JSON-able; sizes in bytes."""
    manifest = reader.manifest
    streams: dict[str, dict[str, Any]] = {}
    for record in manifest.files:
        row = streams.setdefault(
            record.stream,
            {"files": 0, "nbytes": 0, "tensors": len(reader.names(record.stream))},
        )
        row["files"] += 1
        row["nbytes"] += record.nbytes
    written_s = os.stat(reader.directory / MANIFEST_NAME).st_mtime
    return {
        "infinity": __version__,
        "path": str(reader.directory),
        "tag": tag,
        "latest": find_tag(root, None),
        "tags": tags(root),
        "written": datetime.fromtimestamp(written_s, UTC).isoformat(timespec="seconds"),
        "engine_version": manifest.engine_version,
        "global_steps": manifest.global_steps,
        "precision": manifest.precision,
        "rule": manifest.rule,
        "moments": list(manifest.moments),
        "parameters": counted([p.shape for p in manifest.parameters]),
        "trained": counted([p.shape for p in manifest.parameters if p.trained]),
        "tied": sum(len(p.aliases) for p in manifest.parameters),
        "buffers": counted([b.shape for b in manifest.buffers]),
        "client_state": manifest.client_state,
        "streams": streams,
        "nbytes": sum(row["nbytes"] for row in streams.values()),
    }


def counted(shapes: list[tuple[int, ...]]) -> dict[str, int]:
    """How many tensors, and elements in them."""
    return {"tensors": len(shapes), "elements": sum(map(prod, shapes))}


def read_all(
    place: Path,
    opened: Callable[[], Any],
    total_of: Callable[[Any], int],
    said: Callable[[Any, int], str],
) -> bool:
    """Read every byte of what `opened` gives, and print what is wrong; whether it is sound.

    The reader is a context manager with `verify(seen)`. `said(reader, bytes)` is printed of what
    is sound.
    """
    problems: list[str] = []
    told = ""
    try:
        with opened() as reader, ProgressLine() as line:
            total = total_of(reader)
            line.begin(f"reading {place}", total)
            done = 0

            def seen(nbytes: int) -> None:
                nonlocal done
                done += nbytes
                line.advance(done)

            problems += reader.verify(seen)
            told = said(reader, total)
    except CheckpointError as error:
        problems.append(error.what)
    for problem in problems:
        print(problem)
    print(f"{place}: {f'damaged, {len(problems)} problem(s)' if problems else told}", flush=True)
    return not problems


def show_checkpoint(report: dict[str, Any]) -> None:
    """Print it."""
    page = Page()
    is_latest = ", the latest" if report["tag"] == report["latest"] else ""
    page.say(f"{report['path']}{is_latest}")
    page.say(f"written {report['written']} by infinity {report['engine_version']}")
    moments = ", ".join(report["moments"]) or "none"
    page.say(
        f"step {report['global_steps']}, {report['precision']}, {report['rule']}, "
        f"moments: {moments}"
    )
    trained, total, buffers = report["trained"], report["parameters"], report["buffers"]
    page.say(
        f"{format_count(total['elements'])} parameters in {total['tensors']} tensors, of which "
        f"{trained['tensors']} are trained; {report['tied']} more tied name(s); "
        f"{buffers['tensors']} buffer(s)"
    )
    state = report["client_state"]
    if isinstance(state, dict) and state:
        page.say(f"client state: {', '.join(state)}")
    page.say()
    rows = [
        (
            name,
            "" if name == INDEX else str(row["tensors"]),
            str(row["files"]),
            format_size(row["nbytes"]),
        )
        for name, row in report["streams"].items()
    ]
    rows.append(("all", "", "", format_size(report["nbytes"])))
    page.table("Streams", ("stream", "tensors", "files", "size"), rows)
    others = [tag for tag in report["tags"] if tag != report["tag"]]
    if others:
        page.say()
        page.say(f"beside it: {listed(others, limit=_MAX_TAGS)}")
