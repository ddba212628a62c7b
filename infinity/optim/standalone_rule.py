"""`CPUAdam` and `FusedAdam` passed to the engine: the built-in rule with their settings.

Their kernels are the engine's, but their state lies in the memory of a model; the engine keeps it
in its tiers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from infinity.errors import ConfigError
from infinity.optim.built_in import BuiltInRule
from infinity.optim.standalone import CPUAdam, FusedAdam

_PER_GROUP = ("lr", "betas", "eps", "weight_decay", "maximize")


@dataclass(frozen=True)
class SameRule:
    """A built-in rule, and the groups and defaults of the optimizer it stands for."""

    rule: BuiltInRule
    groups: list[dict[str, Any]]
    defaults: dict[str, Any]


def built_in_of(given: Any, groups: Sequence[dict[str, Any]]) -> SameRule | None:
    """What the engine runs for `given`: an instance, or the class itself; None if it is no such.

    The groups of an instance stay the same objects: schedulers over it keep working. Raises
    `ConfigError` for settings that the engine has not.
    """
    is_class = isinstance(given, type) and issubclass(given, CPUAdam | FusedAdam)
    if is_class:  # its defaults, from stand-ins of no size
        stand_in = nn.Parameter(torch.zeros(0))
        optimizer, groups = given([stand_in]), [dict(group) for group in groups]
    elif isinstance(given, CPUAdam | FusedAdam):
        optimizer, groups = given, given.param_groups
    else:
        return None
    name = type(optimizer).__name__
    if any(optimizer.state.values()):
        raise ConfigError(
            f"the {name} has state already",
            because="it has stepped, or loaded a state dict",
            remedy="pass one that is new, and load a checkpoint into the engine",
        )
    for group in groups:
        for key, value in optimizer.defaults.items():
            group.setdefault(key, value)
    modes = {bool(group["adamw_mode"]) for group in groups}
    if len(modes) > 1:
        raise ConfigError(
            f"groups of the {name} differ in adamw_mode: AdamW and Adam with L2 are two rules",
            remedy="one of them for all groups",
        )
    for key, wanted in (("bias_correction", True), ("amsgrad", False)):
        if any(bool(group[key]) is not wanted for group in groups):
            raise ConfigError(
                f"the {name} has {key}={not wanted}",
                because="no kernel of the engine does that",
                remedy=f"{key}={wanted}, or pass torch.optim.AdamW, which torch runs, slower",
            )
    rule = BuiltInRule("AdamW" if modes == {True} else "Adam", optimizer.moments)
    defaults = {key: optimizer.defaults[key] for key in _PER_GROUP}
    return SameRule(rule, list(groups), defaults)
