"""From what was given to a draft: every key found in the table, its value read, its row made."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from infinity.config import Config
from infinity.integrations.deepspeed.draft import Draft, Key, Row, Verdict
from infinity.integrations.deepspeed.table import KEYS, OLD_NAMES, OPEN, SECTIONS, names_in

OURS = "infinity"  # a section of a DeepSpeed configuration that holds keys of ours
_SECRET = "api_key"


class Reader:
    """Fills a draft from nested keys; `fill` has values for keys that are "auto"."""

    def __init__(self, draft: Draft, fill: Mapping[str, Any]) -> None:
        self._draft = draft
        self._fill = fill
        self._written: dict[str, str] = {}  # key -> the name it was given by

    def read(self, raw: Mapping[str, Any]) -> None:
        """Take all; what is wrong is in the draft's problems."""
        for name, value in raw.items():
            if name == OURS:
                continue
            self._take("", "", name, value)

    def _take(self, section: str, written: str, name: object, value: Any) -> None:
        """One name in a section, which was perhaps written by an old name."""
        where = f"{written}.{name}" if written else str(name)
        if not isinstance(name, str):
            self._draft.problem(where, f'the key is not text; write "{name}"')
            return
        full = f"{section}.{name}" if section else name
        full = OLD_NAMES.get(full, full)
        key = KEYS.get(full)
        if key is not None:
            self._take_key(key, where, value)
        elif full in SECTIONS:
            self._take_section(full, where, value)
        elif section in OPEN:
            self._take_open(full, where, value)
        else:
            self._draft.problem(where, _unknown(section, name))

    def _take_section(self, full: str, where: str, value: Any) -> None:
        if full == "zero_optimization" and isinstance(value, bool):
            value = {"stage": int(value)}  # how it was written at first
        if value is None:
            return
        if not isinstance(value, Mapping):
            self._draft.problem(where, f"should be a section of keys and values, got {value!r}")
            return
        for name, part in value.items():
            self._take(full, where, name, part)

    def _take_open(self, full: str, where: str, value: Any) -> None:
        if value == "auto" and full not in self._fill:
            self._draft.autos.add(full)
            value = "auto"
        elif value is not None:
            self._draft.given[full] = self._fill[full] if value == "auto" else value
        self._draft.rows[full] = Row(where, value, Verdict.DONE, "passed on")

    def _take_key(self, key: Key, where: str, value: Any) -> None:
        draft, name = self._draft, key.name
        shown = "***" if name.endswith(_SECRET) and value is not None else value
        if value is None:
            draft.rows.setdefault(name, Row(where, None, Verdict.ACCEPTED, "null: not given"))
            return
        filled = value == "auto" and name in self._fill
        if filled:
            value = self._fill[name]
        if isinstance(value, str) and value == "auto":
            draft.autos.add(name)
            draft.rows[name] = Row(where, shown, Verdict.ACCEPTED, f"auto: {_when_auto(key)}")
            return
        try:
            read = key.kind.read(value)
        except ValueError as error:
            draft.problem(where, f"{error}, got {shown!r}")
            draft.wrong.add(name)
            return
        before = self._written.get(name)
        if before is not None and draft.given[name] != read:
            draft.problem(
                where,
                f"{shown!r}, but {before} is {draft.given[name]!r}: two names of one key; "
                f"keep {before}",
            )
            return
        self._written[name] = where
        draft.given[name] = read
        draft.rows[name] = self._row(key, where, shown, read, filled)

    def _row(self, key: Key, where: str, shown: Any, read: Any, filled: bool) -> Row:
        note = f"{key.note} (auto, filled in with {read!r})" if filled else key.note
        if key.verdict is not Verdict.REFUSED:
            return Row(where, shown, key.verdict, note)
        if key.refused_if is not None and key.refused_if(read):
            self._draft.problem(where, f"{_short(shown)} is refused: {key.note}; {key.remedy}")
            return Row(where, shown, Verdict.REFUSED, f"{key.note}; {key.remedy}")
        return Row(where, shown, Verdict.ACCEPTED, "off, as here")


def _when_auto(key: Key) -> str:
    """What an "auto" that nobody filled in comes to."""
    if key.verdict is Verdict.ACCEPTED:
        return key.note
    if key.verdict is Verdict.REFUSED:
        return "off"
    if key.name.startswith(("zero_optimization.", "aio.")):
        return "left to the plan, and our defaults"
    return f"as there, {key.default}"


def _short(value: Any) -> str:
    return "a section that is on" if isinstance(value, Mapping) else repr(value)


def _unknown(section: str, name: str) -> str:
    if not section and name in Config.model_fields:
        return f'a key of ours, not of DeepSpeed\'s; write "{OURS}": {{"{name}": ...}}'
    prefix = f"{section}." if section else ""
    known = names_in(section)
    # It may also have the right name in the wrong place.
    near = [full for full in (*SECTIONS, *KEYS) if full.rpartition(".")[2] == name]
    near = near or [prefix + word for word in difflib.get_close_matches(name, known, n=1)]
    if near:
        return f"unknown key; did you mean {near[0]!r}?"
    return f"unknown key; known {f'in {section}' if section else 'here'}: {', '.join(known)}"
