"""Which model is meant: a size people know, a Hugging Face config.json, or a directory with one.

What comes back is an outline, or a module on meta, and what only modules know of it: which
parameters are looked up, which one makes the logits, and which see only some of the tokens.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infinity.errors import ConfigError, first_lines
from infinity.model.outline import Outline, is_lookup
from infinity.model.skeleton import (
    MAX_CONFIG_BYTES,
    NAMED,
    build_skeleton,
    read_model_config,
)

if TYPE_CHECKING:
    from torch import nn

# Far above every published model; more is a slip of the pen, and takes minutes to build.
MAX_LAYERS = 4096
MAX_MODULES = 65536
_LAYER_KEYS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
_EXPERT_KEYS = ("num_local_experts", "num_experts", "n_routed_experts")
# A file with one of these is a model's, even if it does not say of which family.
_MODEL_KEYS = ("model_type", "architectures", "hidden_size", "n_embd", "num_hidden_layers")


@dataclass(frozen=True)
class Target:
    """A model to plan for. Parameters are known by their indices in module order.

    `lookups` are only indexed into (embeddings that are not tied to a head), `heads` make the
    logits, `shares` hold the part of all tokens that an expert's parameters see, where not all.
    """

    name: str
    family: str
    module: nn.Module | Outline
    lookups: frozenset[int]
    heads: frozenset[int]
    shares: Mapping[int, float]


def names_a_model(text: str) -> bool:
    """Whether `text` means a model, rather than a configuration of a run; looks into files.

    Raises `ConfigError` if it is neither a name nor a file.
    """
    path = Path(text).expanduser()
    if text.lower() in NAMED or path.is_dir():
        return True
    if not path.is_file():
        raise _nowhere(text, path)
    if path.suffix.lower() in (".yaml", ".yml"):
        return False
    try:
        raw = json.loads(path.read_bytes()) if path.stat().st_size <= MAX_CONFIG_BYTES else {}
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    return not isinstance(raw, dict) or any(key in raw for key in _MODEL_KEYS)


def find_model(text: str) -> Target:
    """The model that `text` names, without values.

    Raises `ConfigError` for what is not there, is no model's config, or has senseless numbers.
    """
    config = NAMED.get(text.lower())
    if config is None:
        path = Path(text).expanduser()
        if not path.is_dir() and not path.is_file():
            raise _nowhere(text, path)
        try:
            config = read_model_config(path)
        except RecursionError as error:
            raise ConfigError(f"{path} is not JSON: it is nested too deeply") from error
    _check_counts(config)
    try:
        module = build_skeleton(config)
    except (RuntimeError, OverflowError) as error:  # torch counts bytes in 64 bits
        raise ConfigError(
            f"{text} describes a model that cannot be: {first_lines(error)}",
            remedy="look for a zero too many among its sizes",
        ) from error
    return target_of(text, module, config)


def target_of(name: str, module: nn.Module | Outline, config: Mapping[str, Any]) -> Target:
    """What the plan must know of a module and of the config it was built from."""
    names = [n for n, _ in module.named_parameters()]
    index = {id(p): i for i, p in enumerate(module.parameters())}
    owners: dict[int, list[nn.Module | Outline]] = {i: [] for i in index.values()}
    for owner in module.modules():
        for parameter in owner.parameters(recurse=False):
            owners[index[id(parameter)]].append(owner)
    embedded = {i for i, o in owners.items() if any(map(is_lookup, o))}
    lookups = {i for i in embedded if all(map(is_lookup, owners[i]))}
    heads = embedded - lookups
    if not heads and lookups:  # the last matrix with a row for each token
        parameters: list[Any] = list(module.parameters())
        rows = max(parameters[i].shape[0] for i in lookups)
        same = [
            i
            for i, p in enumerate(parameters)
            if i not in lookups and p.dim() == 2 and p.shape[0] == rows
        ]
        heads = set(same[-1:])
    return Target(
        name=name,
        family=str(config.get("model_type")),
        module=module,
        lookups=frozenset(lookups),
        heads=frozenset(heads),
        shares=_shares(names, config),
    )


def _shares(names: list[str], config: Mapping[str, Any]) -> dict[int, float]:
    """Experts see the tokens that are sent to them; those that all see are called otherwise."""
    total = next((config[key] for key in _EXPERT_KEYS if _is_count(config.get(key))), 0)
    chosen = config.get("num_experts_per_tok") or 2  # Mixtral's default
    if not total or not _is_count(chosen):
        return {}
    share = min(chosen / total, 1.0)
    return {i: share for i, name in enumerate(names) if ".experts." in name}


def _check_counts(config: Mapping[str, Any]) -> None:
    """Refuse more layers, or layers times experts, than are built in seconds."""
    modules = 1
    for keys, most, what in (
        (_LAYER_KEYS, MAX_LAYERS, "layers"),
        (_EXPERT_KEYS, MAX_MODULES, "layers times experts"),
    ):
        given = {key: config[key] for key in keys if _is_count(config.get(key))}
        if not given:
            continue
        key = max(given, key=lambda name: given[name])  # others are names of the same number
        modules *= given[key]
        if modules > most:
            raise ConfigError(
                f"the model's config has {key}={given[key]}",
                because=f"more than {most} {what} take minutes",
                remedy="look for a digit too many among its numbers",
            )


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _nowhere(text: str, path: Path) -> ConfigError:
    """Neither a name nor a place: say which it may have meant to be."""
    remedy = f"give one of {', '.join(NAMED)}, a config.json, or a directory that holds one"
    if path.exists():
        return ConfigError(f"{path} is neither a file nor a directory", remedy=remedy)
    if "/" in text or path.suffix.lower() in (".json", ".yaml", ".yml"):
        return ConfigError(f"{path} does not exist", remedy=remedy)
    near = difflib.get_close_matches(text.lower(), NAMED, n=1, cutoff=0.4)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return ConfigError(f"{text!r} is no model known by name, and no file{hint}", remedy=remedy)
