"""JSON that ends with its own checksum, and the cautious reading of what may be hostile.

A sealed text is one object with a member per line (a list of objects: with one of those per line).
Its last member is "checksum", the CRC32C of all bytes before the comma that precedes it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from infinity.crc32c import crc32c
from infinity.errors import CheckpointError, ConfigError

LARGEST = 2**63 - 1
_SEAL = re.compile(r',\n"checksum": "([0-9a-f]{8})"\n}\n')
_SEAL_LENGTH = len(',\n"checksum": "00000000"\n}\n')


def sealed(members: Mapping[str, Any], lists: Mapping[str, Sequence[Any]]) -> str:
    """The text of `members` and, an element per line, of `lists`.

    Raises `ConfigError` for what is no JSON; infinities are none.
    """
    lines = [f"{_dump(key, key)}: {_dump(value, key)}" for key, value in members.items()]
    for key, items in lists.items():
        inner = ",".join(f"\n {_dump(item, key)}" for item in items)
        lines.append(f"{_dump(key, key)}: [{inner}]")
    body = "{\n" + ",\n".join(lines)
    return f'{body},\n"checksum": "{crc32c(body.encode()):08x}"\n}}\n'


def _dump(value: Any, what: str) -> str:
    try:
        return json.dumps(value, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{what} cannot be saved as JSON: {error}",
            remedy="encode it with infinity.checkpoint.plain.encode",
        ) from None


class Fields:
    """Members of parsed JSON by kind; what is not of that kind raises `CheckpointError`.

    `where` is the file that the errors name.
    """

    def __init__(self, where: str) -> None:
        self.where = where

    def fail(self, problem: str) -> NoReturn:
        """Raise the error for a file that is unsound."""
        raise CheckpointError(
            f"{self.where} is not sound: {problem}",
            because="it is damaged, was changed, or was written by something else",
            remedy="use another checkpoint: infinity checkpoint verify DIR --all names the sound",
        )

    def parse(self, text: str) -> dict[str, Any]:
        """The one JSON object in `text`: no name twice, no infinities, not too deep."""
        try:
            found = json.loads(
                text,
                object_pairs_hook=self._unique,
                parse_constant=self._no_number,
                parse_float=self._finite,
            )
        except (ValueError, RecursionError) as error:
            self.fail(f"it is not JSON: {str(error)[:200]}")
        if type(found) is not dict:
            self.fail("it is no JSON object")
        return found

    def check_seal(self, text: str) -> None:
        """Hold `text` to the checksum at its end."""
        seal = _SEAL.fullmatch(text[-_SEAL_LENGTH:])
        if seal is None:
            self.fail("it does not end with its checksum")
        try:
            crc = crc32c(text[:-_SEAL_LENGTH].encode())
        except UnicodeEncodeError:
            self.fail("it is no UTF-8")
        if crc != int(seal[1], 16):
            self.fail(f"its CRC32C is {crc:08x}, and its checksum {seal[1]}")

    def _unique(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            seen: set[str] = set()
            for name, _ in pairs:
                if name in seen:
                    self.fail(f"the member {name!r:.80} is there twice")
                seen.add(name)
        return found

    def _no_number(self, text: str) -> NoReturn:
        self.fail(f"{text} is no JSON")

    def _finite(self, text: str) -> float:
        number = float(text)
        if not math.isfinite(number):
            self.fail(f"the number {text:.40} is too large")
        return number

    def member(self, members: Any, key: str, place: str) -> Any:
        """The member, whatever it is."""
        if type(members) is not dict:
            self.fail(f"{place or 'it'} is no object")
        if key not in members:
            self.fail(f"{_joined(place, key)} is missing")
        return members[key]

    def _of(self, kind: type, members: Any, key: str, place: str) -> Any:
        value = self.member(members, key, place)
        if type(value) is not kind:
            self.fail(f"{_joined(place, key)} is {value!r:.60}, not of type {kind.__name__}")
        return value

    def text(self, members: Any, key: str, place: str = "") -> str:
        """A text that has an encoding."""
        found: str = self._of(str, members, key, place)
        self._check_text(found, _joined(place, key))
        return found

    def _check_text(self, text: str, place: str) -> None:
        try:
            text.encode()
        except UnicodeEncodeError:
            self.fail(f"{place} is no text: {text!r:.60}")

    def flag(self, members: Any, key: str, place: str = "") -> bool:
        """True or false."""
        found: bool = self._of(bool, members, key, place)
        return found

    def number(self, members: Any, key: str, place: str = "", limit: int = LARGEST) -> int:
        """A whole number from 0 to `limit`."""
        found: int = self._of(int, members, key, place)
        if not 0 <= found <= limit:
            self.fail(f"{_joined(place, key)} is {_number(found)}, not from 0 to {limit}")
        return found

    def items(self, members: Any, key: str, place: str = "") -> list[Any]:
        """A list of anything."""
        found: list[Any] = self._of(list, members, key, place)
        return found

    def texts(self, members: Any, key: str, place: str = "") -> tuple[str, ...]:
        """A list of texts."""
        found = self.items(members, key, place)
        for item in found:
            if type(item) is not str:
                self.fail(f"{_joined(place, key)} holds {item!r:.60}, not texts alone")
            self._check_text(item, _joined(place, key))
        return tuple(found)

    def numbers(
        self, members: Any, key: str, place: str = "", limit: int = LARGEST
    ) -> tuple[int, ...]:
        """A list of whole numbers from 0 to `limit`."""
        found = self.items(members, key, place)
        for item in found:
            if type(item) is not int or not 0 <= item <= limit:
                text = _number(item) if type(item) is int else f"{item!r:.60}"
                self.fail(f"{_joined(place, key)} holds {text}, not numbers from 0 to {limit}")
        return tuple(found)


def _joined(place: str, key: str) -> str:
    return f"{place}.{key}" if place else key


def _number(number: int) -> str:
    return str(number) if abs(number) <= LARGEST else f"a number of {number.bit_length()} bits"
