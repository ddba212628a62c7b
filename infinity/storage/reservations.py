"""Reservations of the engines of this process: bytes per tier.

This is the only process-wide record of the library. Budgets apply to the process, so a second
engine must see the reservations of the first. The record holds numbers only, and the entry of an
engine is removed when the engine is garbage-collected.
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
        """Record the reservation of an engine; `promised` bytes are not allocated yet."""
        where = device.torch_device
        self._taken[owner] = _Taken(dict(tier_bytes), where, device.unified, promised)

    def release(self, owner: object) -> None:
        """Remove the reservation of `owner`, if there is one."""
        self._taken.pop(owner, None)

    def ram(self) -> int:
        """Return the bytes of RAM reserved by all engines of the process."""
        return sum(
            one.tier_bytes.get(Tier.HOST, 0) + one.unified * one.tier_bytes.get(Tier.DEVICE, 0)
            for one in self._taken.values()
        )

    def total(self, tier: Tier) -> int:
        """Return the bytes of a tier reserved by all engines, over all devices."""
        return sum(one.tier_bytes.get(tier, 0) for one in self._taken.values())

    def on_device(self, device: Device, *, only_real: bool = False) -> int:
        """Return the bytes of `device` reserved by engines; `only_real` excludes promised ones."""
        return sum(
            one.tier_bytes.get(Tier.DEVICE, 0)
            for one in self._taken.values()
            if one.device == device.torch_device and not (only_real and one.promised)
        )


PROCESS = Reservations()
