"""A configuration as the text that is kept with its run: every value, and where it came from."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from infinity.config import Config
from infinity.runs.settings import RunConfig

Entry = dict[str, Any]


def resolved(config: RunConfig, derived: Mapping[str, Any]) -> dict[str, Entry]:
    """Every value by dotted name, with its origin: "given", "default" or "derived".

    `derived` are values, by dotted name, that the run has worked out where nothing was given.
    """
    entries = dict(_entries(config, ""))
    for name, value in derived.items():
        entry = entries.get(name, {"origin": "default"})
        if entry["origin"] == "default" or entry["value"] == "auto":
            entries[name] = {"value": value, "origin": "derived"}
    return entries


def _entries(section: BaseModel, prefix: str) -> Iterator[tuple[str, Entry]]:
    dumped = section.model_dump(mode="json")
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, Config):
            yield from ((f"{prefix}{name}.{key}", entry) for key, entry in value.resolved().items())
        elif isinstance(value, BaseModel):
            yield from _entries(value, f"{prefix}{name}.")
        else:
            origin = "given" if name in section.model_fields_set else "default"
            yield f"{prefix}{name}", {"value": dumped[name], "origin": origin}


def as_yaml(entries: Mapping[str, Entry], heading: str) -> str:
    """A YAML file that means the same configuration.

    Defaults stand in comments, and so does what was derived: read again, they are found again.
    """
    lines = [f"# {line}".rstrip() for line in heading.splitlines()]
    tree: dict[str, Any] = {}
    for name, entry in entries.items():
        *parents, key = name.split(".")
        place = tree
        for parent in parents:
            place = place.setdefault(parent, {})
        place[key] = (entry,)  # a tuple is a leaf
    lines += _lines(tree, "")
    return "\n".join(lines) + "\n"


def _lines(tree: Mapping[str, Any], indent: str) -> Iterator[str]:
    for key, below in tree.items():
        if isinstance(below, tuple):
            (entry,) = below
            text = f"{key}: {json.dumps(entry['value'])}"
            live = entry["origin"] == "given"
            yield f"{indent}{text}" if live else f"{indent}# {text}  # {entry['origin']}"
        else:
            live = any(_is_given(part) for part in below.values())
            yield f"{indent}{key}:" if live else f"{indent}# {key}:"
            yield from _lines(below, indent + "  ")


def _is_given(part: Any) -> bool:
    if isinstance(part, tuple):
        return bool(part[0]["origin"] == "given")
    return any(_is_given(below) for below in part.values())
