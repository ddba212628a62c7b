"""Sealed JSON: objects whose last member is a checksum of the text.

The text has one member per line; a list of objects has one object per line. The last member,
"checksum", is the CRC32C of all bytes before the comma that precedes it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from infinity.common.crc32c import crc32c
from infinity.common.files import FILE_MODE, atomic_write, read_small
from infinity.errors import ConfigError

_SEAL = re.compile(rb',\n"checksum": "([0-9a-f]{8})"\n}\n')
_SEAL_BYTES = len(b',\n"checksum": "00000000"\n}\n')


def seal(members: Mapping[str, Any]) -> bytes:
    """Return an object as sealed text. Raises `ConfigError` for values that are not JSON."""
    lines = []
    for key, value in members.items():
        if isinstance(value, list | tuple) and value and all(type(v) is dict for v in value):
            inner = ",".join(f"\n {_dump(item, key)}" for item in value)
            lines.append(f"{_dump(key, key)}: [{inner}]")
        else:
            lines.append(f"{_dump(key, key)}: {_dump(value, key)}")
    body = ("{\n" + ",\n".join(lines)).encode()
    return body + f',\n"checksum": "{crc32c(body):08x}"\n}}\n'.encode()


def _dump(value: Any, name: str) -> str:
    try:
        return json.dumps(value, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{name} cannot be saved as JSON: {error}",
            remedy="encode it with infinity.checkpoint.plain.encode",
        ) from None


def first_sealed(data: bytes) -> bytes:
    """Return the sealed text at the start of `data`; all of `data` if there is none."""
    # JSON strings contain no raw line breaks, so the first match is the object's seal.
    match = _SEAL.search(data)
    return data[: match.end()] if match else data


def unseal(data: bytes) -> dict[str, Any]:
    """Return the members of a sealed object. Raises `ValueError` that names the defect."""
    match = _SEAL.fullmatch(data[-_SEAL_BYTES:])
    if match is None:
        raise ValueError("it does not end with its checksum")
    crc = crc32c(data[:-_SEAL_BYTES])
    if crc != int(match[1], 16):
        raise ValueError(f"its CRC32C is {crc:08x}, and its checksum {match[1].decode()}")
    try:
        content = json.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is not JSON: {str(error)[:200]}") from None
    if type(content) is not dict:
        raise ValueError("it is no JSON object")
    del content["checksum"]
    return content


def write_sealed(
    path: Path, format: str, version: int, members: Mapping[str, Any], mode: int = FILE_MODE
) -> None:
    """Write a sealed file atomically and durably. Raises `OSError`."""
    with atomic_write(path, mode) as file:
        file.write(seal({"format": format, "version": version, **members}))


def read_sealed(path: Path, format: str, version: int) -> dict[str, Any]:
    """Read a file of `write_sealed`. Raises `OSError`, or `ValueError` that names the defect."""
    members = unseal(read_small(path))
    stored_format = members.pop("format", None)
    stored_version = members.pop("version", None)
    if (stored_format, stored_version) != (format, version):
        raise ValueError(
            f"its format is {stored_format!r:.60} of version {stored_version!r:.20}, not "
            f"{format!r} of version {version}"
        )
    return members
