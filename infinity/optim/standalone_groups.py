"""The numbers of `CPUAdam` and `FusedAdam`: read from their groups, or refused by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from infinity.errors import ConfigError
from infinity.optim.hypers import hyper_of
from infinity.optim.rules import Hyper

_NUMBERS = ("lr", "betas", "eps", "weight_decay")
_FP32_MAX = torch.finfo(torch.float32).max


def group_hyper(group: Mapping[str, Any]) -> Hyper:
    """A group's hyper-parameters now; raises `ConfigError` for what makes no sense."""
    if group["amsgrad"]:
        raise ConfigError(
            "amsgrad is not supported", remedy="use torch.optim.AdamW(amsgrad=True), or leave it"
        )
    try:
        return hyper_of("AdamW" if group["adamw_mode"] else "Adam", group)
    except (TypeError, ValueError, RuntimeError) as error:  # of `float`, also of a tensor
        shown = ", ".join(f"{name}={group[name]!r}" for name in _NUMBERS)
        raise ConfigError(
            f"a parameter group has {shown}",
            because=str(error),
            remedy="numbers, or tensors of one element; two of them for betas",
        ) from error


def taken_groups(
    ours: Iterable[Mapping[str, Any]],
    theirs: Iterable[Mapping[str, Any]],
    defaults: Iterable[str],
) -> list[dict[str, Any]]:
    """Given groups, complete; raises `ConfigError` if they cannot go on where they were saved.

    What a given group does not say stays as it is in ours: torch's know fewer names.
    """
    taken = []
    for group, given in zip(ours, theirs, strict=True):
        decoupled = given.get("adamw_mode", given.get("decoupled_weight_decay"))
        if decoupled is not None and bool(decoupled) != bool(group["adamw_mode"]):
            rules = "Adam with L2", "AdamW"
            raise ConfigError(
                f"the state is of {rules[bool(decoupled)]}, this optimizer is "
                f"{rules[not decoupled]}",
                remedy=f"make it with adamw_mode={bool(decoupled)}",
            )
        merged = {**{name: group[name] for name in defaults if name in group}, **given}
        group_hyper(merged)
        taken.append(merged)
    return taken


def finite_scale(given: Any) -> float:
    """`given` as a number that is finite in fp32, in which the kernels compute."""
    try:
        scale = float(given)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"grad_scale is {given!r}", remedy="a number") from error
    if not abs(scale) <= _FP32_MAX:
        raise ConfigError(
            f"grad_scale is {scale}",
            because="a norm or a loss scale is not finite: the parameters would not be either",
            remedy="leave this step out",
        )
    return scale
