"""How rows of the table are written down."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from infinity.integrations.deepspeed.draft import Draft, Key, Verdict
from infinity.integrations.deepspeed.kinds import FLAG, SECTION, Kind

Take = Callable[[Draft, Any], str | None]


def done(name: str, kind: Kind, default: str, note: str, take: Take | str | None = None) -> Key:
    """A key that means here what it means there; `take` may be the name of our key."""
    if isinstance(take, str):
        return Key(name, kind, default, Verdict.DONE, note, sets=take)
    return Key(name, kind, default, Verdict.DONE, note, take)


def accepted(name: str, kind: Kind, default: str, note: str, take: Take | None = None) -> Key:
    """A key that changes nothing here; the note says what is done instead."""
    return Key(name, kind, default, Verdict.ACCEPTED, note, take)


def refused(
    name: str,
    kind: Kind,
    default: str,
    when: str,
    refused_if: Callable[[Any], bool],
    reason: str,
    remedy: str,
) -> Key:
    """A key that would change numbers or memory, where it is on; a note where it is off."""
    return Key(
        name,
        kind,
        default,
        Verdict.REFUSED,
        reason,
        when=when,
        refused_if=refused_if,
        remedy=remedy,
    )


def refused_if_true(name: str, default: str, reason: str, remedy: str) -> Key:
    """A switch for something that is not there."""
    return refused(name, FLAG, default, "if true", bool, reason, remedy)


def refused_section(name: str, reason: str, remedy: str) -> Key:
    """A section for something that is not there; its own keys are not looked at."""
    return refused(name, SECTION, "off", "if on", switched_on, reason, remedy)


def within(section: str, *keys: Key) -> list[Key]:
    """These keys, in a section."""
    return [replace(key, name=f"{section}.{key.name}") for key in keys]


def all_accepted(note: str, keys: Mapping[str, tuple[Kind, str]]) -> list[Key]:
    """Keys of which the same is to be said."""
    return [accepted(name, kind, default, note) for name, (kind, default) in keys.items()]


def table(*parts: Iterable[Key]) -> dict[str, Key]:
    """Rows by name; no name twice."""
    rows = [key for part in parts for key in part]
    found = {key.name: key for key in rows}
    assert len(found) == len(rows), "a key stands in the table twice"
    return found


def switched_on(value: Any) -> bool:
    """Whether a section is on: its `enabled`, else any `enabled` inside, else that it is there."""
    if not isinstance(value, Mapping):
        return bool(value)
    if "enabled" in value:
        return value["enabled"] is True
    inside = list(_enabled_inside(value))
    return any(inside) if inside else bool(value)


def _enabled_inside(value: Mapping[str, Any]) -> Iterable[bool]:
    for name, part in value.items():
        if name == "enabled":
            yield part is True
        elif isinstance(part, Mapping):
            yield from _enabled_inside(part)
