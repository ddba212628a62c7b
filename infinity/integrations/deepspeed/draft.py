"""One row of the table, and a translation while it is being made."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from infinity.integrations.deepspeed.kinds import Kind


class Verdict(StrEnum):
    """What becomes of a key."""

    DONE = "done"
    ACCEPTED = "accepted"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Row:
    """What became of one key that was given: shown by `infinity plan`, written to the journal."""

    key: str
    given: Any
    verdict: Verdict
    note: str

    def as_dict(self) -> dict[str, Any]:
        """JSON-able: what JSON has no word for is text."""
        return {
            "key": self.key,
            "given": _plain(self.given),
            "verdict": str(self.verdict),
            "note": self.note,
        }


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if not isinstance(value, bool) and isinstance(value, numbers.Integral):
        return int(value)  # NumPy's too
    return value if value is None or isinstance(value, bool | float | str) else str(value)


@dataclass(frozen=True, slots=True)
class Key:
    """A key of DeepSpeed's: its dotted name, what it takes, its default there, what we make of it.

    `note` says what we do, or why we do not. `sets` is the key of ours that gets the value as it
    is; `take(draft, value)` translates otherwise: it may return a note for this value, and raises
    `ValueError` for one that makes no sense. A refused key is refused where `refused_if(value)`,
    named `when` in words, and then says `remedy`; else it is accepted.
    """

    name: str
    kind: Kind
    default: str
    verdict: Verdict
    note: str
    take: Callable[[Draft, Any], str | None] | None = None
    sets: str = ""
    when: str = ""
    refused_if: Callable[[Any], bool] | None = None
    remedy: str = ""


@dataclass(slots=True)
class Draft:
    """What is known so far: values by key, what they make of our configuration, and what is wrong.

    `lenient` is for questions that need no learning rate and no step counts, such as a plan;
    `may_infer` says that an engine need not train: without an optimizer `trains` becomes false.
    """

    lenient: bool = False
    client_optimizer: bool = False
    client_scheduler: bool = False
    may_infer: bool = False
    given: dict[str, Any] = field(default_factory=dict)
    autos: set[str] = field(default_factory=set)
    wrong: set[str] = field(default_factory=set)  # given, but not as a value that can be read
    config: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    rows: dict[str, Row] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    batch_size: int = 1
    drop_last: bool = False
    trains: bool = True

    def set(self, name: str, value: Any, key: str) -> None:
        """Give our `name` (dotted) a value, because of their `key`."""
        target = self.config
        *parents, last = name.split(".")
        for parent in parents:
            target = target.setdefault(parent, {})
        target[last] = value
        self.origins[name] = key

    def note(self, key: str, text: str, verdict: Verdict | None = None) -> None:
        """Say what became of a key; makes a row for a key that was not given."""
        row = self.rows.get(key)
        if row is None:
            self.rows[key] = Row(key, None, verdict or Verdict.ACCEPTED, text)
        else:
            self.rows[key] = Row(row.key, row.given, verdict or row.verdict, text)

    def problem(self, key: str, text: str) -> None:
        """Something is wrong with a key."""
        self.problems.append(f"{key}: {text}")

    def below(self, section: str) -> Mapping[str, Any]:
        """The given values of a section, by their names in it."""
        prefix = f"{section}."
        return {
            name.removeprefix(prefix): value
            for name, value in self.given.items()
            if name.startswith(prefix)
        }

    def has_section(self, section: str) -> bool:
        """Whether any key of a section was given, be it as "auto"."""
        prefix = f"{section}."
        return any(name.startswith(prefix) for name in (*self.given, *self.autos))
