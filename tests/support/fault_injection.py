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


_thread_options = threading.local()  # options of engines that the thread makes: `io`, `poison`
_lock = threading.Lock()
_patches: dict[str, tuple[int, Any]] = {}  # by name: number of users of the patch, original value


@contextmanager
def _patched_for_thread(
    owner: Any, name: str, patch: Callable[..., Any], **options: Any
) -> Iterator[None]:
    """Patch `owner.name`, and set options for engines that this thread makes.

    Ranks are threads, so the patch is counted and removed by its last user. Two overlapping mocks
    would leave the patch of the first one in place.
    """
    with _lock:
        users, original = _patches.get(name, (0, getattr(owner, name)))
        _patches[name] = users + 1, original
        setattr(owner, name, patch)
    outer_options = dict(vars(_thread_options))
    vars(_thread_options).update(options)
    try:
        yield
    finally:
        vars(_thread_options).clear()
        vars(_thread_options).update(outer_options)
        with _lock:
            users, original = _patches.pop(name)
            if users > 1:
                _patches[name] = users - 1, original
            else:
                setattr(owner, name, original)


@contextmanager
def faulty_io(**options: Any) -> Iterator[None]:
    """Pass `faults` and `slow_bytes_per_s` to native I/O engines that this thread makes."""
    with _patched_for_thread(_aio, "Engine", _rough_engine, io=options):
        yield


_Engine, _post_init = _aio.Engine, SlotLedger.__post_init__


def _rough_engine(**options: Any) -> Any:
    return _Engine(**options, **getattr(_thread_options, "io", {}))


@contextmanager
def poisoned(poison: Poison) -> Iterator[None]:
    """Overwrite freed slots of engines that this thread makes."""
    with _patched_for_thread(SlotLedger, "__post_init__", _post_init_poisoned, poison=poison):
        yield


def _post_init_poisoned(self: SlotLedger) -> None:
    _post_init(self)
    poison: Poison | None = getattr(_thread_options, "poison", None)
    if poison is None:
        return

    def evict_and_poison(unit: int) -> None:
        entry, slot = self.entries[unit], self.entries[unit].slot
        SlotLedger.evict(self, unit)
        if slot is not None and slot.arena is not None and slot.is_free():
            entry.ready.wait()
            poison(slot.alias())
            slot.free_after = self.device.compute_event()  # poisoning is compute

    self.evict = evict_and_poison  # type: ignore[method-assign]


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
    with ExitStack() as stack:
        if isinstance(config, Mapping):
            config, faults = taken(config)
            io = {**faults, **(io or {})}
        if io:
            stack.enter_context(faulty_io(**io))
        if poison is not None:
            stack.enter_context(poisoned(poison))
        return infinity.initialize(model, config, **more)


def taken(config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split a configuration into that of the engine and the options of `faulty_io`."""
    faults, io = {}, dict(config.get("io", {}))
    if "faults" in io:
        faults["faults"] = io.pop("faults")
    if "slow_bytes_per_s" in io:
        faults["slow_bytes_per_s"] = parse_size(io.pop("slow_bytes_per_s"))
    return {**config, "io": io} if faults else dict(config), faults
