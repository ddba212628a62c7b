"""Where raw configuration comes from: YAML and JSON files, and `key=value` overrides.

Gives back plain nested dicts with text keys; what the keys mean is `config.py`'s business. A key
written twice is an error here, because a dict would silently keep one of the two.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Hashable, Iterable, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import yaml

from infinity.errors import ConfigError


class _Loader(yaml.SafeLoader):
    """YAML 1.1 as PyYAML reads it, but 1e-4 is a number and a repeated key is an error."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Compose one mapping; every key must be new in it."""
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        seen: set[tuple[str, str]] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                name = (key.tag, key.value)
                if name in seen:
                    problem = f"the key {key.value!r} is given twice"
                    raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
                seen.add(name)
        return node


# PyYAML wants a dot and a signed exponent in a float, so it reads 1e-4 and 1.5e9 as text.
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?[0-9][0-9_]*(?:\.[0-9_]*)?[eE][-+]?[0-9]+", re.ASCII),
    list("-+0123456789"),
)


def short(text: str, limit: int = 200) -> str:
    """The beginning of a text that may be long, or have several lines."""
    first, *more = text.splitlines() or [""]
    return first if not more and len(first) <= limit else f"{first[:limit]}..."


def read_config_file(path: Path) -> dict[str, Any]:
    """Return the mapping in a `.yaml`, `.yml` or `.json` file; an empty YAML file is `{}`.

    Raises `ConfigError` if the file cannot be read or parsed, repeats a key, holds a key that is
    not text, or is not a mapping.
    """
    suffix = path.suffix.lower()
    if suffix not in (".yaml", ".yml", ".json"):
        ends = f"ends in {short(path.suffix)!r}" if path.suffix else "has no ending"
        raise ConfigError(
            f"{short(str(path))}: not a configuration file",
            because=f"this was taken for the path of a file, and the name {ends}",
            remedy="use a .yaml, .yml or .json file, or give a dict",
        )
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError, ValueError) as error:
        because = getattr(error, "strerror", None) or str(error)
        remedy = "look for a slip in the path" if isinstance(error, FileNotFoundError) else None
        raise ConfigError(
            f"{short(str(path))}: cannot be read", because=because, remedy=remedy
        ) from error
    raw = _parse_json(path, text) if suffix == ".json" else _parse_yaml(path, text)
    if not isinstance(raw, dict):
        because = f"the file holds {_kind(raw)} instead of keys and values"
        raise ConfigError(f"{path}: not a configuration", because=because)
    _check_keys(str(path), raw)
    return raw


def _parse_yaml(path: Path, text: str) -> Any:
    try:
        raw = yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{path}: not valid YAML: {_yaml_problem(error)}") from error
    return {} if raw is None else raw


def _yaml_problem(error: Exception) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or str(error)
    return f"{problem} (line {mark.line + 1}, column {mark.column + 1})" if mark else problem


def _parse_json(path: Path, text: str) -> Any:
    try:
        raw, repeated = json_and_repeated(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid JSON: {error}") from error
    if repeated:
        names = ", ".join(repr(key) for key in repeated)
        raise ConfigError(f"{path}: given twice in one object: {names}")
    return raw


def json_and_repeated(text: str, loads: Callable[..., Any] = json.loads) -> tuple[Any, list[str]]:
    """What JSON says, and the keys that one of its objects has twice; raises as `loads`."""
    repeated: list[str] = []

    def mapping(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        repeated.extend(dict.fromkeys(key for key in keys if keys.count(key) > 1))
        return dict(pairs)

    return loads(text, object_pairs_hook=mapping), repeated


def _kind(raw: object) -> str:
    return "a list" if isinstance(raw, list) else f"the single value {raw!r}"


def _check_keys(where: str, raw: Mapping[Hashable, Any]) -> None:
    for key, value in raw.items():
        if not isinstance(key, str):
            remedy = f'put it in quotes: "{key}"'
            raise ConfigError(f"{where}: the key {key!r} is not text", remedy=remedy)
        if isinstance(value, Mapping):
            _check_keys(f"{where}: {key}", value)


def apply_overrides(raw: Mapping[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """Return a copy of `raw` with each "section.key=value" set; values are read as YAML.

    "io.queue_depth=16" gives an int, "homes.weights=disk" text, "journal=" a null. Sections that do
    not exist yet are made. Raises one `ConfigError` that names every override that has no "=", an
    empty name, a value that is not YAML, or a path through something that is not a section.
    """
    result = deepcopy(dict(raw))
    problems: list[str] = []
    for override in overrides:
        name, equals, text = override.partition("=")
        keys = name.strip().split(".")
        if not equals or not all(keys):
            problems.append(f"{override!r}: write key=value, for example io.queue_depth=16")
            continue
        try:
            value = yaml.load(text, Loader=_Loader)
        except (yaml.YAMLError, ValueError) as error:
            problems.append(f"{override!r}: the value is not YAML: {_yaml_problem(error)}")
            continue
        problem = _set(result, keys, value)
        if problem:
            problems.append(f"{override!r}: {problem}")
    if problems:
        raise ConfigError("; ".join(problems))
    return result


def _set(target: dict[str, Any], keys: list[str], value: Any) -> str | None:
    for depth, key in enumerate(keys[:-1], start=1):
        section: object = target.setdefault(key, {})
        if section is None:
            section = target[key] = {}
        if not isinstance(section, dict):
            return f"{'.'.join(keys[:depth])} holds {section!r}, which has no keys of its own"
        target = section
    target[keys[-1]] = value
    return None
