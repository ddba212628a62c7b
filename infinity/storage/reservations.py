"""Reservations of the engines of this process: bytes per tier.

The one process-wide record of the library: budgets belong to the process, as its memory does, so
a second engine must see what the first one took. It holds numbers only, and a dead engine's line
vanishes with it.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from infinity.storage.device import Device
from infinity.types import Tier


@dataclass(frozen=True)
class _Taken:
    tier_bytes: Mapping[Tier, int]
    device: torch.device
    unified: bool
    promised: bool


class Reservations:
    """Bytes per tier, by owner."""

    def __init__(self) -> None:
        self._taken: weakref.WeakKeyDictionary[object, _Taken] = weakref.WeakKeyDictionary()

    def take(
        self,
        owner: object,
        tier_bytes: Mapping[Tier, int],
        device: Device,
        *,
        promised: bool = False,
    ) -> None:
        """Record the reservation of an engine on `device`; `promised` bytes are not taken yet."""
        where = device.torch_device
        self._taken[owner] = _Taken(dict(tier_bytes), where, device.unified, promised)

    def release(self, owner: object) -> None:
        """Forget it; idempotent."""
        self._taken.pop(owner, None)

    def ram(self) -> int:
        """Bytes of RAM that all engines of the process hold."""
        return sum(
            one.tier_bytes.get(Tier.HOST, 0) + one.unified * one.tier_bytes.get(Tier.DEVICE, 0)
            for one in self._taken.values()
        )

    def total(self, tier: Tier) -> int:
        """Bytes of a tier that they hold; those of all devices are one tier here."""
        return sum(one.tier_bytes.get(tier, 0) for one in self._taken.values())

    def on_device(self, device: Device, *, only_real: bool = False) -> int:
        """Return bytes of `device` that its engines hold, with or without promised ones."""
        return sum(
            one.tier_bytes.get(Tier.DEVICE, 0)
            for one in self._taken.values()
            if one.device == device.torch_device and not (only_real and one.promised)
        )


PROCESS = Reservations()
