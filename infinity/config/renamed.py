"""Earlier names of configuration keys: taken with a warning until the next release."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import yaml

from infinity.errors import ConfigError, InfinityWarning


class Renamed(NamedTuple):
    """The name of a key today, and a value of it for one under the earlier name."""

    name: str
    value: Callable[[Any], Any] = lambda value: value


def _opposite(value: Any) -> Any:
    return not value if isinstance(value, bool) else value


def _logits(value: Any) -> Any:
    return {"sliced": "chunked", "whole": "full"}.get(value, value) if str is type(value) else value


RENAMED = {
    "activations.logits": Renamed("activations.logits", _logits),  # its values had other names
    "durable_every": Renamed("commit_every"),
    "frozen.rest": Renamed("frozen.format"),
    "hints.weights_in_ram": Renamed("hints.max_params_in_cpu"),
    "io.stuck_after_s": Renamed("io.timeout_s"),
    "journal": Renamed("step_log"),
    "placement.moments": Renamed("placement.optimizer_state"),
    "placement.whole": Renamed("placement.reshard_after_forward", _opposite),
}


def with_current_names(raw: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a copy of a configuration with today's names.

    Args:
        raw: Sections and keys of an engine's configuration, below `prefix`.
        prefix: Of the section that is the engine's, as "engine.".

    Raises:
        ConfigError: A key is there under both names.
    """
    result = copy.deepcopy(dict(raw))
    for old in RENAMED:
        *path, key = f"{prefix}{old}".split(".")
        section: Any = result
        for part in path:
            section = section.get(part) if isinstance(section, dict) else None
        if not isinstance(section, dict) or key not in section:
            continue
        name, value = _current(old, section[key])
        new = name.rpartition(".")[2]
        if new != key and new in section:
            raise ConfigError(
                f"{prefix}{old} and {prefix}{name} are given",
                because="they are one key: the first is its earlier name",
                remedy=f"leave {prefix}{old} out",
            )
        if (new, value) != (key, section[key]):
            _warn(f"{prefix}{old}", f"{prefix}{name}", section[key], value)
        section[new] = value
        if new != key:
            del section[key]
    return result


def override_with_current_name(override: str, prefix: str = "") -> str:
    """Return a text "section.key=value" with today's name of the key."""
    old, equals, text = override.partition("=")
    name = old.strip()
    if not equals or not name.startswith(prefix) or name.removeprefix(prefix) not in RENAMED:
        return override
    try:
        given = yaml.safe_load(text)
    except yaml.YAMLError:
        return override  # which is refused later, with the reason
    new, value = _current(name.removeprefix(prefix), given)
    if (f"{prefix}{new}", value) == (name, given):
        return override
    _warn(name, f"{prefix}{new}", given, value)
    return f"{prefix}{new}={json.dumps(value)}"


def dotted_with_current_names(found: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return values by dotted name, as an earlier release stored them, by today's names."""
    result = {}
    for name, value in found.items():
        old = name.removeprefix(prefix)
        if name.startswith(prefix) and old in RENAMED:
            old, value = _current(old, value)
            name = prefix + old
        result[name] = value
    return result


def with_current_overrides(overrides: Iterable[str], prefix: str = "") -> list[str]:
    """Return texts "section.key=value" with today's names."""
    return [override_with_current_name(one, prefix) for one in overrides]


def _current(old: str, value: Any) -> tuple[str, Any]:
    renamed = RENAMED[old]
    return renamed.name, renamed.value(value)


def _warn(old: str, new: str, before: Any, after: Any) -> None:
    def written(name: str, value: Any) -> str:
        return name if before == after else f"{name}: {json.dumps(value)}"

    text = f"{written(old, before)} is an earlier name of {written(new, after)}"
    warnings.warn(f"{text}; the next release refuses it", InfinityWarning, stacklevel=5)
