"""Slow and failing disks, and freed slots that are overwritten: what no configuration offers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from torch import Tensor, nn

import infinity
from infinity import _aio
from infinity.config.schema import Config
from infinity.offload.slots import SlotLedger
from infinity.sizes import parse_size

Poison = Callable[[Tensor], None]


def fill(slot: Tensor) -> None:
    """NaN in every float type."""
    slot.fill_(255)


@contextmanager
def rough_io(**options: Any) -> Iterator[None]:
    """Native I/O engines that are made in here get `options`: `faults`, `slow_bytes_per_s`."""
    engine = _aio.Engine
    with mock.patch.object(_aio, "Engine", lambda **given: engine(**given, **options)):
        yield


@contextmanager
def poisoned(poison: Poison) -> Iterator[None]:
    """Slots of engines that are made in here are overwritten when they are freed."""
    begin, give_up = SlotLedger.__post_init__, SlotLedger.give_up

    def begin_poisoned(self: SlotLedger) -> None:
        def give_up_poisoned(unit: int) -> None:
            entry, slot = self.entries[unit], self.entries[unit].slot
            give_up(self, unit)
            if slot is not None and slot.arena is not None and slot.is_free():
                entry.ready.wait()
                poison(slot.alias())
                slot.free_after = self.device.compute_event()  # poisoning is compute

        begin(self)
        self.give_up = give_up_poisoned  # type: ignore[method-assign]

    with mock.patch.object(SlotLedger, "__post_init__", begin_poisoned):
        yield


def initialize(
    model: nn.Module,
    config: Mapping[str, Any] | Config,
    *,
    poison: Poison | None = fill,
    io: Mapping[str, Any] | None = None,
    **more: Any,
) -> tuple[Any, ...]:
    """`infinity.initialize`; `faults` and `slow_bytes_per_s`, in `io` or in the config's, too."""
    with ExitStack() as rough:
        if isinstance(config, Mapping):
            config, found = taken(config)
            io = {**found, **(io or {})}
        if io:
            rough.enter_context(rough_io(**io))
        if poison is not None:
            rough.enter_context(poisoned(poison))
        return infinity.initialize(model, config, **more)


def taken(config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The configuration without what only `rough_io` knows, and that."""
    rough, io = {}, dict(config.get("io", {}))
    if "faults" in io:
        rough["faults"] = io.pop("faults")
    if "slow_bytes_per_s" in io:
        rough["slow_bytes_per_s"] = parse_size(io.pop("slow_bytes_per_s"))
    return {**config, "io": io} if rough else dict(config), rough
