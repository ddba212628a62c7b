"""A DeepSpeed configuration, translated: every key is done, accepted with a note, or refused.

>>> translation = translate_deepspeed("ds_config.json")
>>> translation.config                      # ours
>>> for row in translation.rows: ...        # key, given, verdict, note
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from infinity.config import Config, load_config
from infinity.errors import ConfigError
from infinity.integrations.deepspeed.draft import Draft, Row
from infinity.integrations.deepspeed.optimizers import optimizer, scheduler
from infinity.integrations.deepspeed.reader import OURS, Reader
from infinity.integrations.deepspeed.rules import batch, homes, precision
from infinity.integrations.deepspeed.source import Source, find_source
from infinity.integrations.deepspeed.table import KEYS

_RULES = (batch, precision, optimizer, scheduler, homes)


@dataclass(frozen=True, slots=True)
class Translation:
    """What a DeepSpeed configuration means here.

    `rows` say what became of each key that was given, in its order. `batch_size` is the number of
    samples of a micro-batch, `drop_last` whether a loader leaves out a last one that is smaller.
    """

    config: Config
    rows: tuple[Row, ...]
    batch_size: int
    drop_last: bool
    trains: bool = True  # false: no optimizer, and none was needed

    def table(self) -> list[dict[str, Any]]:
        """The rows as plain data: key, given, verdict, note."""
        return [row.as_dict() for row in self.rows]

    def describe(self) -> str:
        """The rows as text for people: a heading, and a line each."""
        cells = [
            (row["key"], "" if row["given"] is None else json.dumps(row["given"]), row["verdict"])
            for row in self.table()
        ]
        widths = [max(map(len, column), default=0) for column in zip(*cells, strict=True)]
        lines = ["what became of the DeepSpeed configuration:"]
        for found, row in zip(cells, self.rows, strict=True):
            columns = [text.ljust(width) for text, width in zip(found, widths, strict=True)]
            lines.append("  ".join(["", *columns, row.note]).rstrip())
        return "\n".join(lines)


def translate_deepspeed(
    source: Any,
    overrides: Iterable[str] = (),
    *,
    fill: Mapping[str, Any] | None = None,
    lenient: bool = False,
    client_optimizer: bool = False,
    client_scheduler: bool = False,
) -> Translation:
    """Translate a DeepSpeed configuration: a dict, a file's path, JSON text, or base64 of it.

    Its section "infinity" may hold keys of ours, which win; DeepSpeed does not look at it.
    `overrides` are "section.key=value" texts in our names, and win over all. `fill` gives values,
    by DeepSpeed's dotted names, to keys that are "auto". With `lenient` an optimizer and values
    that only training needs may be missing. `client_optimizer` and `client_scheduler` say that
    `initialize` got its own, which win over the sections.

    Raises one `ConfigError` that names everything wrong: keys that are unknown (with the nearest
    name), given twice, in conflict, of the wrong kind, or refused (with what to write).
    """
    found = find_source(source)
    if found is None:
        raise ConfigError(
            f"not a DeepSpeed configuration: {_shown(source)}",
            because="none of its keys is DeepSpeed's alone, or it cannot be read",
        )
    draft = Draft(
        lenient=lenient, client_optimizer=client_optimizer, client_scheduler=client_scheduler
    )
    return _translated(found, draft, fill or {}, overrides)


def find_translation(
    source: Any,
    overrides: Iterable[str] = (),
    *,
    lenient: bool = False,
    client_optimizer: bool = False,
    client_scheduler: bool = False,
    may_infer: bool = False,
) -> Translation | None:
    """As `translate_deepspeed`, or None if `source` is not DeepSpeed's.

    With `may_infer` the optimizer may be missing: then `trains` is false.
    """
    found = find_source(source)
    if found is None:
        return None
    draft = Draft(
        lenient=lenient,
        client_optimizer=client_optimizer,
        client_scheduler=client_scheduler,
        may_infer=may_infer,
    )
    return _translated(found, draft, {}, overrides)


def _translated(
    found: Source, draft: Draft, fill: Mapping[str, Any], overrides: Iterable[str]
) -> Translation:
    for name in found.repeated:
        draft.problem(name, "given twice in one section")
    ours = found.raw.get(OURS, {})
    if not isinstance(ours, Mapping):
        draft.problem(OURS, f"should be a section with keys of ours, got {ours!r}")
        ours = {}
    Reader(draft, fill).read(found.raw)
    for name, value in list(draft.given.items()):
        key = KEYS.get(name)
        if key is not None and key.sets:
            draft.set(key.sets, value, name)
        take = None if key is None else key.take
        if take is None:
            continue
        try:
            note = take(draft, value)
        except ValueError as error:
            draft.problem(draft.rows[name].key, f"{error}, got {value!r}")
        else:
            if note is not None:
                draft.note(name, note)
    for rule in _RULES:
        rule(draft)
    config = _checked(draft, ours, overrides)
    if draft.problems or config is None:
        count = len(draft.problems)
        heading = "1 mistake" if count == 1 else f"{count} mistakes"
        problems = "".join(f"\n  - {problem}" for problem in draft.problems)
        raise ConfigError(f"{heading} in {found.where}:{problems}")
    rows = tuple(draft.rows.values())
    return Translation(config, rows, draft.batch_size, draft.drop_last, draft.trains)


def _checked(draft: Draft, ours: Mapping[str, Any], overrides: Iterable[str]) -> Config | None:
    """Our configuration; what it refuses is told by the names that were given."""
    try:
        return load_config(_merged(draft.config, ours), overrides)
    except ConfigError as error:
        head, *problems = error.what.split("\n  - ")
        for problem in problems or [head]:
            name, colon, text = problem.partition(": ")
            if colon and _has(ours, name):
                draft.problems.append(f"{OURS}.{problem}")
                continue
            key = _origin(draft, name) if colon else None
            if key is not None and key in draft.rows:
                key = draft.rows[key].key  # as it was written
            renamed = key is not None and key != name
            draft.problems.append(f"{key}: {text} (here {name})" if renamed else problem)
        return None


def _has(section: Any, name: str) -> bool:
    """Whether a section has a dotted name."""
    for key in name.split("."):
        if not isinstance(section, Mapping) or key not in section:
            return False
        section = section[key]
    return True


def _origin(draft: Draft, name: str) -> str | None:
    """DeepSpeed's key that set our `name`, or a part of it."""
    while name and name not in draft.origins:
        name = name.rpartition(".")[0]
    return draft.origins.get(name)


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for name, value in above.items():
        old = merged.get(name)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            value = _merged(old, value)
        merged[name] = value
    return merged


def _shown(source: Any) -> str:
    text = repr(source)
    return text if len(text) <= 80 else f"{text[:77]}..."
