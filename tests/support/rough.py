"""Fault injection for engines: slow and failing disks, and freed slots that are overwritten."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

import infinity
from infinity import _aio
from infinity.common.sizes import parse_size
from infinity.config.schema import Config
from infinity.offload.slots import SlotLedger

Poison = Callable[[Tensor], None]


def fill(slot: Tensor) -> None:
    """Overwrite with NaN of every float type."""
    slot.fill_(255)


_of_thread = threading.local()  # options of engines that the thread makes: `io`, `poison`
_lock = threading.Lock()
_patched: dict[str, tuple[int, Any]] = {}  # by name: number of users of the patch, original value


@contextmanager
def _with(owner: Any, name: str, patch: Callable[..., Any], **options: Any) -> Iterator[None]:
    """Patch `owner.name`, and set options for engines that this thread makes.

    Ranks are threads, so the patch is counted and removed by its last user. Two overlapping mocks
    would leave the patch of the first one in place.
    """
    with _lock:
        count, before = _patched.get(name, (0, getattr(owner, name)))
        _patched[name] = count + 1, before
        setattr(owner, name, patch)
    outer = dict(vars(_of_thread))
    vars(_of_thread).update(options)
    try:
        yield
    finally:
        vars(_of_thread).clear()
        vars(_of_thread).update(outer)
        with _lock:
            count, before = _patched.pop(name)
            if count > 1:
                _patched[name] = count - 1, before
            else:
                setattr(owner, name, before)


@contextmanager
def rough_io(**options: Any) -> Iterator[None]:
    """Pass `faults` and `slow_bytes_per_s` to native I/O engines that this thread makes."""
    with _with(_aio, "Engine", _rough_engine, io=options):
        yield


_Engine, _begin = _aio.Engine, SlotLedger.__post_init__


def _rough_engine(**given: Any) -> Any:
    return _Engine(**given, **getattr(_of_thread, "io", {}))


@contextmanager
def poisoned(poison: Poison) -> Iterator[None]:
    """Overwrite freed slots of engines that this thread makes."""
    with _with(SlotLedger, "__post_init__", _begin_poisoned, poison=poison):
        yield


def _begin_poisoned(self: SlotLedger) -> None:
    _begin(self)
    poison: Poison | None = getattr(_of_thread, "poison", None)
    if poison is None:
        return

    def give_up_poisoned(unit: int) -> None:
        entry, slot = self.entries[unit], self.entries[unit].slot
        SlotLedger.evict(self, unit)
        if slot is not None and slot.arena is not None and slot.is_free():
            entry.ready.wait()
            poison(slot.alias())
            slot.free_after = self.device.compute_event()  # poisoning is compute

    self.evict = give_up_poisoned  # type: ignore[method-assign]


def initialize(
    model: nn.Module,
    config: Mapping[str, Any] | Config,
    *,
    poison: Poison | None = fill,
    io: Mapping[str, Any] | None = None,
    **more: Any,
) -> tuple[Any, ...]:
    """Call `infinity.initialize` with fault injection.

    `faults` and `slow_bytes_per_s` are taken from `io` or from the `io` section of the config.
    """
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
    """Split a configuration into that of the engine and the options of `rough_io`."""
    rough, io = {}, dict(config.get("io", {}))
    if "faults" in io:
        rough["faults"] = io.pop("faults")
    if "slow_bytes_per_s" in io:
        rough["slow_bytes_per_s"] = parse_size(io.pop("slow_bytes_per_s"))
    return {**config, "io": io} if rough else dict(config), rough
