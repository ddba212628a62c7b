"""Sources of raw configuration: YAML and JSON files, and `key=value` overrides.

They are read into plain nested dicts with string keys, which `config/schema.py` interprets. A
repeated key is an error, because a dict would silently keep only one of its values.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import yaml

from infinity.errors import ConfigError

# Limits far beyond any configuration, against mistakes and malicious files.
MAX_BYTES = 1 << 20
MAX_DEPTH = 100
MAX_VALUES = 100_000  # with aliases expanded


class _Loader(yaml.SafeLoader):
    """PyYAML's loader of YAML 1.1, except that 1e-4 is a number and a repeated key an error."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = self._count = 0
        self._counts: dict[int, int] = {}  # id of a complete node -> its number of values

    def compose_node(self, parent: Any, index: Any) -> yaml.Node | None:
        """Compose a value, with its depth and size bounded (aliases expanded)."""
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        before = self._count
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise self._limit_error(f"nested deeper than {MAX_DEPTH} levels", event)
        node = super().compose_node(parent, index)
        self._depth -= 1
        if not isinstance(event, yaml.AliasEvent):
            self._count += 1
            self._counts[id(node)] = self._count - before
        elif id(node) in self._counts:
            self._count += self._counts[id(node)]
        else:
            raise self._limit_error(f"*{event.anchor} refers to itself", event)
        if self._count > MAX_VALUES:
            raise self._limit_error(f"more than {MAX_VALUES:,} values", event)
        return node

    @staticmethod
    def _limit_error(problem: str, event: Any) -> Exception:
        return yaml.composer.ComposerError(None, None, problem, event.start_mark)

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Compose a mapping; raise if it repeats a key."""
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


# PyYAML requires a dot and a signed exponent in a float, so it parses 1e-4 and 1.5e9 as text.
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?[0-9][0-9_]*(?:\.[0-9_]*)?[eE][-+]?[0-9]+", re.ASCII),
    list("-+0123456789"),
)


def short(text: str, limit: int = 200) -> str:
    """Return the first line of a text, at most `limit` characters, with "..." if it was cut."""
    first, *more = text.splitlines() or [""]
    return first if not more and len(first) <= limit else f"{first[:limit]}..."


def read_source(source: Any) -> tuple[str, dict[str, Any]]:
    """Return name and keys of a configuration, given as a mapping or the path of a file."""
    if isinstance(source, Mapping):
        return "the configuration", dict(source)
    try:
        path = Path(os.fsdecode(source)).expanduser()
    except TypeError as error:
        remedy = "give a dict, the path of a YAML or JSON file, or a Config"
        raise ConfigError(f"not a configuration: {source!r}", remedy=remedy) from error
    return str(path), read_config_file(path)


def read_config_file(path: Path) -> dict[str, Any]:
    """Return the mapping in a `.yaml`, `.yml` or `.json` file; an empty YAML file is `{}`.

    Raises `ConfigError` if the file cannot be read or parsed, exceeds the limits above, repeats a
    key, has a key that is not text, or is not a mapping.
    """
    suffix = path.suffix.lower()
    if suffix not in (".yaml", ".yml", ".json"):
        ending = f"ends in {short(path.suffix)!r}" if path.suffix else "has no ending"
        raise ConfigError(
            f"{short(str(path))}: not a configuration file",
            because=f"this was taken for the path of a file, and the name {ending}",
            remedy="use a .yaml, .yml or .json file, or give a dict",
        )
    try:
        text = _read(path)
    except (OSError, ValueError) as error:
        if isinstance(error, FileNotFoundError):
            remedy = "look for a slip in the path"
            raise ConfigError(f"{short(str(path))} does not exist", remedy=remedy) from None
        because = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"{short(str(path))}: cannot be read", because=because) from error
    kind = "JSON" if suffix == ".json" else "YAML"
    repeated: list[str] = []
    try:
        if kind == "JSON":
            raw, repeated = parse_json_with_duplicates(text)
        else:
            raw = _load_yaml(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid {kind}: {error}") from error
    if repeated:
        names = ", ".join(repr(key) for key in repeated)
        raise ConfigError(f"{path}: given twice in one object: {names}")
    if raw is None and kind == "YAML":
        return {}
    if not isinstance(raw, dict):
        held = "a list" if isinstance(raw, list) else f"the single value {raw!r}"
        because = f"the file holds {held} instead of keys and values"
        raise ConfigError(f"{path}: not a configuration", because=because)
    _check_keys(str(path), raw)
    return raw


def _read(path: Path) -> str:
    """Read a regular file of at most `MAX_BYTES`. Raises `OSError` or `ValueError`."""
    # Opening a pipe without a writer would block.
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError("it is a pipe or a device, not a file")
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise ValueError(f"it is larger than {MAX_BYTES >> 20} MiB")
    return data.decode()


def _load_yaml(text: str) -> Any:
    """Parse YAML; raise `ValueError` with the position of an error."""
    try:
        return yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None) or str(error)
        position = f" (line {mark.line + 1}, column {mark.column + 1})" if mark else ""
        raise ValueError(problem + position) from error
    except (ArithmeticError, AttributeError, LookupError, TypeError) as error:
        # PyYAML raises these for invalid tagged values: !!int '', !!bool maybe.
        raise ValueError(f"a value does not fit its !!tag: {error}") from error


def parse_json_with_duplicates(
    text: str, loads: Callable[..., Any] = json.loads
) -> tuple[Any, list[str]]:
    """Parse JSON; also return the keys that an object repeats. Raises like `loads`."""
    repeated: list[str] = []

    def mapping(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        repeated.extend(dict.fromkeys(key for key in keys if keys.count(key) > 1))
        return dict(pairs)

    return loads(text, object_pairs_hook=mapping), repeated


def _check_keys(where: str, raw: Any, depth: int = 1) -> None:
    if depth > MAX_DEPTH:
        raise ConfigError(f"{short(where)}: nested deeper than {MAX_DEPTH} levels")
    if isinstance(raw, list):
        for value in raw:
            _check_keys(where, value, depth + 1)
    for key, value in raw.items() if isinstance(raw, dict) else ():
        if not isinstance(key, str):
            remedy = f'put it in quotes: "{key}"'
            raise ConfigError(f"{where}: the key {key!r} is not text", remedy=remedy)
        _check_keys(f"{where}: {key}", value, depth + 1)


def apply_overrides(
    raw: Mapping[str, Any],
    overrides: Iterable[str],
    current: Callable[[str, Any], tuple[str, Any]] = lambda name, value: (name, value),
) -> dict[str, Any]:
    """Return a copy of `raw` with each "section.key=value" set; values are read as YAML.

    "io.queue_depth=16" gives an int, "placement.weights=disk" text, "step_log=" a null. Missing
    sections are created. `current` converts a name and value to the current ones.

    Raises one `ConfigError` that names every override without "=", with an empty name, with a value
    that is not YAML, or with a path through a value that is not a section.
    """
    result = deepcopy(dict(raw))
    problems: list[str] = []
    for override in overrides:
        name, equals, text = override.partition("=")
        keys = name.strip().split(".")
        if not equals or not all(keys):
            problems.append(f"{short(override)!r}: write key=value, for example io.queue_depth=16")
            continue
        if len(keys) > MAX_DEPTH:
            problems.append(f"{short(override)!r}: nested deeper than {MAX_DEPTH} levels")
            continue
        try:
            value = _load_yaml(text)
        except ValueError as error:
            problems.append(f"{short(override)!r}: the value is not YAML: {error}")
            continue
        name, value = current(".".join(keys), value)
        problem = _set_key(result, name.split("."), value)
        if problem:
            problems.append(f"{override!r}: {problem}")
    if problems:
        raise ConfigError("; ".join(problems))
    return result


def _set_key(target: dict[str, Any], keys: list[str], value: Any) -> str | None:
    for depth, key in enumerate(keys[:-1], start=1):
        section: object = target.setdefault(key, {})
        if section is None:
            section = target[key] = {}
        if not isinstance(section, dict):
            return f"{'.'.join(keys[:depth])} holds {section!r}, which has no keys of its own"
        target = section
    target[keys[-1]] = value
    return None
