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
class _Reservation:
    tier_bytes: Mapping[Tier, int]
    device: torch.device
    unified: bool
    pending: bool


class Reservations:
    """Bytes per tier, by owner."""

    def __init__(self) -> None:
        self._entries: weakref.WeakKeyDictionary[object, _Reservation] = weakref.WeakKeyDictionary()

    def take(
        self,
        owner: object,
        tier_bytes: Mapping[Tier, int],
        device: Device,
        *,
        pending: bool = False,
    ) -> None:
        """Record the reservation of an engine; `pending` bytes are not allocated yet."""
        torch_device = device.torch_device
        self._entries[owner] = _Reservation(dict(tier_bytes), torch_device, device.unified, pending)

    def release(self, owner: object) -> None:
        """Remove the reservation of `owner`, if there is one."""
        self._entries.pop(owner, None)

    def ram(self) -> int:
        """Return the bytes of RAM reserved by all engines of the process."""
        return sum(
            entry.tier_bytes.get(Tier.HOST, 0)
            + entry.unified * entry.tier_bytes.get(Tier.DEVICE, 0)
            for entry in self._entries.values()
        )

    def total(self, tier: Tier) -> int:
        """Return the bytes of a tier reserved by all engines, over all devices."""
        return sum(entry.tier_bytes.get(tier, 0) for entry in self._entries.values())

    def on_device(self, device: Device, *, only_real: bool = False) -> int:
        """Return the bytes of `device` reserved by engines; `only_real` excludes pending ones."""
        return sum(
            entry.tier_bytes.get(Tier.DEVICE, 0)
            for entry in self._entries.values()
            if entry.device == device.torch_device and not (only_real and entry.pending)
        )


PROCESS = Reservations()
