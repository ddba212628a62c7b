"""Reading of DeepSpeed configurations, distinguished from infinity's.

A source is a dict, a file (JSON with comments and trailing commas, Hjson, or YAML), JSON
text, or base64 of JSON text, which launchers pass. Hjson beyond JSON with comments (unquoted
strings and keys, lines without commas) needs the package hjson.
"""

from __future__ import annotations

import base64
import importlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infinity.config.schema import DEEPSPEED_KEYS, Config
from infinity.config.source import parse_json_with_duplicates, read_config_file
from infinity.errors import ConfigError

_DEEPSPEED_ONLY = (
    "zero_optimization", "train_batch_size", "train_micro_batch_size_per_gpu", "fp16", "bf16",
    "bfloat16",
)  # fmt: skip
_COMMON = ("optimizer", "scheduler", "gradient_clipping", "gradient_accumulation_steps", "compile")
_MAX_BYTES = 1 << 24  # file size limit: a weights file may be passed by mistake
_STRING = r'"(?:\\.|[^"\\])*"'
_COMMENTS = re.compile(rf"{_STRING}|//[^\n]*|#[^\n]*|/\*.*?\*/", re.DOTALL)
_COMMAS = re.compile(rf"{_STRING}|,(?=\s*[}}\]])", re.DOTALL)
_BASE64 = re.compile(r"[A-Za-z0-9_\-+/\s]{4,}=*\s*", re.ASCII)


@dataclass(frozen=True, slots=True)
class Source:
    """A DeepSpeed configuration before translation; `repeated` are keys given twice."""

    where: str
    raw: Mapping[str, Any]
    repeated: tuple[str, ...] = ()


def is_deepspeed(raw: Mapping[str, Any]) -> bool:
    """Return whether a mapping is a DeepSpeed configuration: it has keys that infinity lacks.

    If it has infinity's keys too, only the keys in `_DEEPSPEED_ONLY` count. If both formats have
    all keys, an optimizer with `params` is DeepSpeed's.
    """
    if any(name in _DEEPSPEED_ONLY for name in raw):
        return True
    if any(name in Config.model_fields and name not in _COMMON for name in raw):
        return False
    if any(name in DEEPSPEED_KEYS for name in raw) or isinstance(raw.get("compile"), Mapping):
        return True
    optimizer = raw.get("optimizer")
    return isinstance(optimizer, Mapping) and "params" in optimizer


def find_source(source: Any) -> Source | None:
    """Return the DeepSpeed configuration in `source`; None if it is another format.

    After None, `load_config` reads the source and reports its errors. Raises `ConfigError` if the
    source is DeepSpeed's, but cannot be parsed.
    """
    candidate = None
    if isinstance(source, Mapping):
        candidate = Source("the DeepSpeed configuration", source)
    elif isinstance(source, str | os.PathLike):
        text = os.fsdecode(source)
        path = Path(text).expanduser()
        if text.lstrip().startswith("{"):
            candidate = _parse("the JSON text", text)
        elif os.path.isfile(path):  # False if the name is too long, or has a null byte
            candidate = _from_file(path)
        elif isinstance(source, str):
            candidate = _from_base64(text)
    return candidate if candidate is not None and is_deepspeed(candidate.raw) else None


def _from_file(path: Path) -> Source | None:
    suffix = path.suffix.lower()
    if suffix in (".yaml", ".yml"):
        return Source(str(path), read_config_file(path))
    try:
        if path.stat().st_size > _MAX_BYTES:
            return None
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    try:
        return _parse(str(path), text)
    except ConfigError:
        if suffix != ".hjson" and not any(name in text for name in _DEEPSPEED_ONLY):
            return None
        raise


def _from_base64(text: str) -> Source | None:
    if not _BASE64.fullmatch(text):
        return None
    encoded = "".join(text.split()).rstrip("=")
    try:
        decoded = base64.urlsafe_b64decode(encoded + "=" * (-len(encoded) % 4)).decode()
    except ValueError:
        return None
    return _parse("the base64 text", decoded) if decoded.lstrip().startswith("{") else None


def _parse(where: str, text: str) -> Source:
    """Parse JSON, with or without comments and trailing commas, or Hjson."""
    try:
        raw, repeated = parse_json_with_duplicates(text)
    except (ValueError, RecursionError):
        try:
            raw, repeated = parse_json_with_duplicates(
                _COMMAS.sub(_blank, _COMMENTS.sub(_blank, text))
            )
        except (ValueError, RecursionError) as error:
            raw, repeated = _parse_hjson(where, text, error)
    if not isinstance(raw, dict):
        raise ConfigError(
            f"{where}: not a configuration", because="it is not a mapping of keys to values"
        )
    return Source(where, raw, tuple(repeated))


def _blank(match: re.Match[str]) -> str:
    """Replace a comment or comma by spaces; strings and line numbers stay unchanged."""
    text = match[0]
    return text if text.startswith('"') else re.sub(r"[^\n]", " ", text)


def _parse_hjson(where: str, text: str, problem: Exception) -> tuple[Any, list[str]]:
    """Parse Hjson; `problem` is the error of the JSON parser."""
    try:
        library = importlib.import_module("hjson")
    except ImportError:
        raise ConfigError(
            f"{where}: not valid JSON: {problem}",
            because="if it is Hjson: the package that reads it is not installed",
            remedy="pip install hjson; or write JSON, with comments and trailing commas if needed",
        ) from problem
    try:
        return parse_json_with_duplicates(text, library.loads)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: neither JSON ({problem}) nor Hjson ({error})") from error
