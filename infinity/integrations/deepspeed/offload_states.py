"""Tiers of each kind of state, in DeepSpeed's terms."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch

from infinity.common.sizes import format_size
from infinity.errors import ConfigError
from infinity.plan.plan import Plan
from infinity.types import Tier


class OffloadStateTypeEnum(StrEnum):
    """Kinds of state, by DeepSpeed's names."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"


class OffloadDeviceEnum(StrEnum):
    """Offload targets, by DeepSpeed's names."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


@dataclass(frozen=True)
class OffloadDevice:
    """Slowest offload target of one kind of state."""

    device: OffloadDeviceEnum

    @staticmethod
    def of(tiers: Iterable[Tier]) -> OffloadDevice | None:
        """Return the slowest target among `tiers`; None if all state is on the compute device."""
        distinct = set(tiers)
        if Tier.DISK in distinct:
            return OffloadDevice(OffloadDeviceEnum.nvme)
        return OffloadDevice(OffloadDeviceEnum.cpu) if Tier.HOST in distinct else None


_FIELDS = {
    OffloadStateTypeEnum.optim_states: "state",
    OffloadStateTypeEnum.hp_params: "state",
    OffloadStateTypeEnum.lp_params: "weight",
    OffloadStateTypeEnum.lp_grads: "gradient",
    OffloadStateTypeEnum.contiguous_grad_buffer: "gradient",
}


# Device memory of each kind, by the names of `Plan.memory`; other names are shared by all kinds.
_MEMORY = {
    "state": ("state", "streaming", "optimizer matrices"),
    "weight": ("weights", "slots", "dequantizing"),
    "gradient": ("gradients",),
}


def state_devices(plan: Plan, device: torch.device, state: OffloadStateTypeEnum) -> set[Any]:
    """Return the torch devices, and "disk", on which the plan stores a kind of state."""
    field = _FIELDS[OffloadStateTypeEnum(state)]
    by_tier = {Tier.DEVICE: device, Tier.HOST: torch.device("cpu"), Tier.DISK: "disk"}
    return {by_tier[getattr(placement, field)] for placement in plan.placements}


def check_offload_states(plan: Plan, include: Any, device: Any) -> None:
    """Raise `ConfigError` if the plan reserves device memory for the states in `include`."""
    if str(getattr(device, "value", device)) != "cpu":
        raise ConfigError(
            f"offload_states(device={device!r})", remedy='"cpu", which means: off the GPU'
        )
    try:
        kinds = [OffloadStateTypeEnum(kind) for kind in include or OffloadStateTypeEnum]
    except ValueError as error:
        names = ", ".join(kind.value for kind in OffloadStateTypeEnum)
        raise ConfigError(str(error), remedy=f"of {names}") from None
    if plan.unified:  # CPU and compute device share one memory
        return
    excluded = _MEMORY.keys() - {_FIELDS[kind] for kind in kinds}
    ignored = {name for field in excluded for name in _MEMORY[field]}
    memory = plan.memory[Tier.DEVICE].items()
    reserved = {name: nbytes for name, nbytes in memory if nbytes and name not in ignored}
    if reserved:
        breakdown = ", ".join(f"{name} {format_size(nbytes)}" for name, nbytes in reserved.items())
        raise ConfigError(
            f"offload_states({', '.join(kind.value for kind in kinds)}): "
            f"{format_size(sum(reserved.values()))} on the GPU cannot be released temporarily",
            because=f"placement is fixed when the engine is made; the plan reserves: {breakdown}",
            remedy="plan less device memory (budget.device, placement.optimizer_state: host); or "
            "save_checkpoint(), close(), and initialize() and load_checkpoint() later",
        )
