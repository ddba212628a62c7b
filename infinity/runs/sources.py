"""Which files a corpus is made of, and what tells that they are still the same."""

from __future__ import annotations

import glob
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from infinity.errors import ConfigError, listed

Format = Literal["text", "jsonl", "tokens"]

_JSONL = (".jsonl", ".ndjson")
_TOKENS = (".npy", ".bin")
_TEXT = (".txt", ".text", ".md")
_MAX_TOLD = 4


@dataclass(frozen=True)
class Source:
    """A file as it was when it was looked at; `size` in bytes, `modified` in nanoseconds."""

    path: str
    format: Format
    size: int
    modified: int

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def find_sources(key: str, patterns: Sequence[str], form: str) -> list[Source]:
    """The files that files, directories and patterns name, in order and once each.

    Of a directory all files with a known ending are taken, those below it as well. `key` is the
    key of the configuration that they come from, for errors.

    Raises one `ConfigError` that names every pattern that gives nothing.
    """
    found: dict[str, Source] = {}
    problems = []
    for pattern in patterns:
        try:
            paths = _paths(Path(pattern), form)
            for path in paths:
                found.setdefault(str(path), _source(path, form))
        except _NothingError as error:
            problems.append(f"{pattern}: {error}")
        except OSError as error:
            problems.append(f"{error.filename or pattern}: {error.strerror}")
    if problems:
        raise ConfigError(
            f"{key}: {listed(problems, _MAX_TOLD, '; ')}",
            remedy="give files, directories, or patterns such as 'texts/**/*.jsonl'",
        )
    return list(found.values())


class _NothingError(Exception):
    pass


def _paths(path: Path, form: str) -> list[Path]:
    if path.is_dir():
        known = {"text": _TEXT, "jsonl": _JSONL, "tokens": _TOKENS}.get(
            form, (*_TEXT, *_JSONL, *_TOKENS)
        )
        below = [p for p in sorted(path.rglob("*")) if _ending(p) in known and p.is_file()]
        if not below:
            raise _NothingError(f"no file in this directory ends in {', '.join(known)}")
        return [p.absolute() for p in below]
    if path.is_file():
        return [path.absolute()]
    if path.exists():
        raise _NothingError("is neither a file nor a directory")
    if not glob.has_magic(str(path)):
        raise _NothingError("does not exist")
    matches = sorted(glob.glob(str(path), recursive=True))
    files = [Path(name).absolute() for name in matches if os.path.isfile(name)]
    if not files:
        raise _NothingError("no file has such a name")
    return files


def _ending(path: Path) -> str:
    """The ending, lower case; of "a.jsonl.gz" that is ".jsonl"."""
    suffix = path.suffix.lower()
    return Path(path.stem).suffix.lower() if suffix == ".gz" else suffix


def _source(path: Path, form: str) -> Source:
    facts = path.stat()
    kind: Format = "text"
    if form in ("text", "jsonl", "tokens"):
        kind = form  # type: ignore[assignment]
    elif _ending(path) in _JSONL:
        kind = "jsonl"
    elif _ending(path) in _TOKENS:
        kind = "tokens"
    if not os.access(path, os.R_OK):
        raise PermissionError(13, "may not be read", str(path))
    return Source(str(path), kind, facts.st_size, facts.st_mtime_ns)
