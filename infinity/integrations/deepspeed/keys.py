"""Lookup of DeepSpeed configuration keys, and a reader for each kind of value.

`key_table.py` has the table of keys. JSON does not distinguish integers from floats: `1e9` is
accepted as a whole number, and so is a string with a number.
"""

from __future__ import annotations

import json
import math
import numbers
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from infinity.integrations.deepspeed.key_table import RENAMED_SECTIONS, TABLE, KeyStatus, Kind, When
from infinity.optim.rules import RULES

# DeepSpeed's names of the built-in update rules, in lower case: DeepSpeed ignores case.
BUILT_IN = {name.lower(): name for name, rule in RULES.items() if rule.deepspeed is not None}


@dataclass(frozen=True, slots=True)
class Row:
    """Treatment of one given key: shown by `infinity plan`, written to the step log."""

    key: str
    given: Any
    verdict: KeyStatus
    note: str

    def as_dict(self) -> dict[str, Any]:
        """Return the row as JSON types; values without a JSON type become strings."""
        given, verdict = _to_json(self.given), str(self.verdict)
        return {"key": self.key, "given": given, "verdict": verdict, "note": self.note}


def _to_json(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _to_json(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_to_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if not isinstance(value, bool) and isinstance(value, numbers.Integral):
        return int(value)  # also NumPy's
    return value if value is None or isinstance(value, bool | float | str) else str(value)


def rows_as_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Format the rows of `Translation.table`: a heading, and one line per row."""
    cells = [
        (row["key"], "" if row["given"] is None else json.dumps(row["given"]), row["verdict"])
        for row in rows
    ]
    widths = [max(map(len, column), default=0) for column in zip(*cells, strict=True)]
    lines = ["the DeepSpeed configuration, key by key:"]
    for row_cells, row in zip(cells, rows, strict=True):
        columns = [text.ljust(width) for text, width in zip(row_cells, widths, strict=True)]
        lines.append("  ".join(["", *columns, row["note"]]).rstrip())
    return "\n".join(lines)


KEYS = {key.name: key for key in TABLE}
# Old names of keys and sections -> current names.
RENAMED_KEYS = RENAMED_SECTIONS | {
    f"{key.name.rpartition('.')[0]}.{old}".lstrip("."): key.name for key in TABLE for old in key.old
}
# Sections whose keys depend on `type`; keys that the table lacks are checked by `type`.
OPEN = ("optimizer.params", "scheduler.params")
SECTIONS = frozenset(
    ".".join(parts[:depth])
    for parts in (name.split(".") for name in KEYS)
    for depth in range(1, len(parts))
)


def names_in(section: str) -> list[str]:
    """Return the valid names in a section ("" is the top level), old names last."""
    prefix = f"{section}." if section else ""
    below = [n.removeprefix(prefix) for n in (*KEYS, *RENAMED_KEYS) if n.startswith(prefix)]
    return list(dict.fromkeys(name.split(".")[0] for name in below))


# --- when a key is refused -----------------------------------------------------------------------


def _is_enabled(value: Any) -> bool:
    """Return whether a section is on: its `enabled`, else any `enabled` inside, else not empty."""
    if not isinstance(value, Mapping):
        return bool(value)
    switches = [value["enabled"] is True] if "enabled" in value else list(_switches(value))
    return any(switches) if switches else bool(value)


def _switches(value: Mapping[str, Any]) -> Iterator[bool]:
    for name, item in value.items():
        if name == "enabled":
            yield item is True
        elif isinstance(item, Mapping):
            yield from _switches(item)


def _is_tensor_parallel(value: Any) -> bool:
    """Return whether tensor_parallel is enabled: a size is above 1."""
    if not isinstance(value, dict):
        return bool(value)
    inner = value.get("tp") or value.get("tensor_parallel") or {}
    sizes = [value.get("autotp_size", 0), value.get("tp_size", 1), inner.get("tp_size", 1)]
    return any(isinstance(size, int | float) and size > 1 for size in sizes)


def _has_stages(value: Any) -> bool:
    """Return whether pipeline has several stages; the section affects a PipelineModule only."""
    stages = value.get("stages") if isinstance(value, dict) else value
    return isinstance(stages, int) and stages > 1


REFUSAL_CONDITIONS: dict[When, Callable[[Any], bool]] = {
    "true": bool,
    "given": bool,
    "false": lambda value: not value,
    "above 1": lambda value: bool(value > 1),
    "on": _is_enabled,
    "a size is above 1": _is_tensor_parallel,
    "stages is above 1": _has_stages,
}

# --- kinds of values -----------------------------------------------------------------------------


def read_value(kind: Kind | tuple[str, ...], value: Any) -> Any:
    """Return the value as a Python object; raise `ValueError` if it is of another kind."""
    if isinstance(kind, str):
        return _READERS[kind](value)
    if isinstance(value, str) and value.lower() in kind:
        return value.lower()
    raise ValueError(f"should be one of {', '.join(map(repr, kind))}")


def _number(value: Any) -> float:
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            raise ValueError("should be a number") from None
    real = not isinstance(value, bool) and isinstance(value, numbers.Real)  # also NumPy's
    if not real or not math.isfinite(value):
        raise ValueError("should be a number")
    return float(value)


def _as_int(value: Any) -> int:
    integral = not isinstance(value, bool) and isinstance(value, numbers.Integral)
    number = value if integral else _number(value)
    if int(number) != number:
        raise ValueError("should be a whole number")
    return int(number)


def _checked(
    read: Callable[[Any], Any], fits: Callable[[Any], bool], expected: str
) -> Callable[..., Any]:
    def read_and_check(value: Any) -> Any:
        result = read(value)
        if fits(result):
            return result
        raise ValueError(f"should be {expected}")

    return read_and_check


def _interval(value: Any) -> float:
    return math.inf if value in (math.inf, "Infinity", "inf") else _WHOLE(value)


def _numbers(value: Any) -> Any:
    return [_number(v) for v in value] if isinstance(value, list | tuple) else _number(value)


def _paths(value: Any) -> list[str]:
    paths = value if isinstance(value, list | tuple) else [value]
    if paths and all(isinstance(path, str | os.PathLike) for path in paths):
        texts = [os.fspath(path) for path in paths]
        if all(isinstance(text, str) for text in texts):
            return texts
    raise ValueError("should be a path, or a list of paths")


def _of_type(types: Any, expected: str) -> Callable[[Any], Any]:
    return _checked(lambda value: value, lambda value: isinstance(value, types), expected)


_WHOLE = _checked(_as_int, lambda number: number >= 0, "0 or more")
_READERS: dict[Kind, Callable[[Any], Any]] = {
    "flag": _of_type(bool, "true or false"),
    "number": _number,
    "numbers": _numbers,  # one, or one per parameter group
    "pair": _checked(_numbers, lambda n: isinstance(n, list) and len(n) == 2, "two numbers"),
    "share": _checked(_number, lambda number: 0 <= number <= 1, "between 0 and 1"),
    "whole": _WHOLE,
    "count": _checked(_as_int, lambda number: number >= 1, "1 or more"),
    "signed": _as_int,
    "interval": _interval,
    "text": _of_type(str, "text"),
    "paths": _paths,
    "section": _of_type(Mapping | bool, "a section of keys and values"),
    "anything": lambda value: value,
}
