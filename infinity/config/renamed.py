"""Earlier names of configuration keys, accepted with a warning until the next release."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from infinity.errors import ConfigError, InfinityWarning


class Renamed(NamedTuple):
    """Current name of a key, and the conversion of a value given under the earlier name."""

    name: str
    value: Callable[[Any], Any] = lambda value: value


def _negated(value: Any) -> Any:
    return not value if isinstance(value, bool) else value


def _renamed_logits(value: Any) -> Any:
    return {"sliced": "chunked", "whole": "full"}.get(value, value) if str is type(value) else value


RENAMED = {
    "activations.logits": Renamed("activations.logits", _renamed_logits),  # values were renamed
    "durable_every": Renamed("commit_every"),
    "frozen.rest": Renamed("frozen.format"),
    "hints.weights_in_ram": Renamed("hints.max_params_in_cpu"),
    "io.stuck_after_s": Renamed("io.timeout_s"),
    "journal": Renamed("step_log"),
    "placement.moments": Renamed("placement.optimizer_state"),
    "placement.whole": Renamed("placement.reshard_after_forward", _negated),
}


def migrate_keys(raw: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a copy of a configuration with the current names of keys.

    Args:
        raw: Sections and keys of an engine's configuration, below `prefix`.
        prefix: Prefix of the engine's section, such as "engine.".

    Raises:
        ConfigError: A key is given under both names.
    """
    result = copy.deepcopy(dict(raw))
    for old in RENAMED:
        *path, key = f"{prefix}{old}".split(".")
        section: Any = result
        for part in path:
            section = section.get(part) if isinstance(section, dict) else None
        if not isinstance(section, dict) or key not in section:
            continue
        new = RENAMED[old].name.rpartition(".")[2]
        if new != key and new in section:
            raise ConfigError(
                f"{prefix}{old} and {prefix}{RENAMED[old].name} are given",
                because="they are one key: the first is its earlier name",
                remedy=f"leave {prefix}{old} out",
            )
        _, section[new] = current(f"{prefix}{old}", section.pop(key), prefix)
    return result


def current(name: str, value: Any, prefix: str = "", *, warns: bool = True) -> tuple[str, Any]:
    """Return the current dotted name of a key, and the converted value."""
    old = name.removeprefix(prefix)
    if not name.startswith(prefix) or old not in RENAMED:
        return name, value
    renamed = RENAMED[old]
    new_name, new_value = f"{prefix}{renamed.name}", renamed.value(value)
    if warns and (new_name, new_value) != (name, value):
        earlier, later = name, new_name
        if new_value != value:
            earlier, later = f"{name}: {json.dumps(value)}", f"{new_name}: {json.dumps(new_value)}"
        text = f"{earlier} is an earlier name of {later}; the next release refuses it"
        warnings.warn(text, InfinityWarning, stacklevel=4)
    return new_name, new_value


def migrate_stored_keys(stored: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Return values that an earlier release stored, by current dotted names."""
    return dict(current(name, value, prefix, warns=False) for name, value in stored.items())
