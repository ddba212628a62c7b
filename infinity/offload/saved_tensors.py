"""Saved-tensor hooks: views of slots are packed as descriptions, inputs of blocks offloaded.

[Note: saved tensors]
While a unit computes, the (pack, unpack) pair of `SavedTensors` is the innermost pair of
saved-tensor hooks. A tensor in a slot is packed as a description (unit, update count, dtype,
offset, size, stride) and unpacked as a view of the slot that the unit has in backward; so no saved
tensor pins a slot. Unpacking after a later update raises, as in plain torch. Any other tensor is
passed to the pair that was innermost before, so checkpointing and save_on_cpu keep working.
(Otherwise non-reentrant checkpointing would silently save everything and never recompute: equal
results, but no memory saved.) Without an outer pair, inputs of recomputed blocks go to the
activation store (`offload/activations.py`) if there is one, also if the model itself checkpoints
the blocks; any other tensor is saved detached, with its version, which unpacking checks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from infinity.model.torch_private import (
    SavedTensorHooks,
    is_checkpoint_pair,
    negated_view,
    saves_checkpoint_input,
    storage_address,
    top_saved_tensors_hooks,
)
from infinity.offload.activations import (
    ActivationStore,
    SavedHandle,
    graph_of_closed_engine,
    modified_in_place,
)
from infinity.offload.prefetch import Prefetcher
from infinity.offload.slots import SlotLedger
from infinity.profiling.step_tracer import StepTracer

# Autograd packs some forty tensors per block, so packed values are tuples, which are cheap. A
# tensor that is neither in a slot nor offloaded is packed as (tensor, version).


class _InSlot(NamedTuple):
    """Description of a saved tensor that lies in the slot of a unit."""

    unit: int
    updates: int
    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]
    conj: bool  # torch's lazy bits: the memory holds the conjugate, or (`neg`) the negative
    neg: bool


class _Outer(NamedTuple):
    """Saved tensor that an outer pair of hooks packed while `unit` computed.

    Unpacking may run a recomputation whose closure holds parameters of the unit.
    """

    unit: int
    unpack: Callable[[Any], Tensor]
    packed: Any


class SavedTensors:
    """Pack and unpack hooks of one engine; see [Note: saved tensors]."""

    def __init__(
        self,
        prefetcher: Prefetcher,
        begin_backward: Callable[[int], None],
        register_backward: Callable[[], None],
        activations: ActivationStore | None,
    ) -> None:
        self._prefetcher: Prefetcher | None = prefetcher
        ledger = prefetcher.ledger
        self._ledger: SlotLedger | None = ledger
        self._entries = ledger.entries
        self._register_backward = register_backward  # registers a running backward as a call
        self._begin_backward = begin_backward  # called when a unit's backward begins
        self._backward_unit = -1
        self._slots_by_address = {}
        self._first_address, self._end_address = 0, 0  # range of addresses that holds all slots
        for slot in ledger.slots:
            address = slot.memory.data_ptr()
            if not address:  # a slot of parameters without elements has no memory
                continue
            self._slots_by_address[address] = slot
            self._first_address = min(self._first_address or address, address)
            self._end_address = max(self._end_address, address + slot.memory.numel())
        self.timeline: StepTracer | None = None  # set while a trace is recorded
        self.activations = activations  # stores inputs of recomputed blocks
        # For each push: its context, its pair, and whether a checkpoint's pair is below it.
        self._stack: list[tuple[Any, SavedTensorHooks, bool]] = []

    def close(self) -> None:
        """Drop all references to the engine.

        After an exception in a backward, autograd holds the rest of its graph in a queue, and the
        graph holds these hooks, which must not keep the engine's memory alive.
        """
        self._prefetcher = self._ledger = self.activations = None
        self._entries = []
        self._begin_backward, self._register_backward = (lambda unit: None), (lambda: None)
        self._slots_by_address.clear()

    @property
    def prefetcher(self) -> Prefetcher:
        """The prefetcher; raises `EngineClosedError` after `close`."""
        if self._prefetcher is None:
            raise graph_of_closed_engine()
        return self._prefetcher

    def disable_compile(self) -> None:
        """Exclude the hooks from compilation: compiled code calls them at run time.

        Imports the compiler.
        """
        disable: Any = torch.compiler.disable
        self._pack = disable(self._pack)  # type: ignore[method-assign]
        self._unpack = disable(self._unpack)  # type: ignore[method-assign]

    def push(self) -> bool:
        """Push the hooks unless they are innermost already; return True if they were pushed."""
        outer = top_saved_tensors_hooks()
        if outer is not None and self._stack and outer[0] is self._stack[-1][1][0]:
            return False

        pack = self._pack if outer is None else partial(self._pack, outer=outer)
        pair = (pack, self._unpack)
        context = torch.autograd.graph.saved_tensors_hooks(*pair)
        self._stack.append((context, pair, self.under_checkpoint or is_checkpoint_pair(outer)))
        context.__enter__()
        return True

    def pop(self) -> None:
        """Undo one `push`."""
        context, _, _ = self._stack.pop()
        context.__exit__(None, None, None)

    def unwind(self, depth: int, outer: SavedTensorHooks | None) -> None:
        """Pop to `depth` pushes with `outer` innermost, in any state that an exception left."""
        bottom = outer[0] if outer is not None else None
        while (top := top_saved_tensors_hooks()) is not None and top[0] is not bottom:
            torch.autograd.graph.saved_tensors_hooks(*top).__exit__(None, None, None)
        del self._stack[depth:]

    @property
    def under_checkpoint(self) -> bool:
        """Return True if saved tensors are dropped now, and recomputed in backward."""
        return bool(self._stack) and self._stack[-1][2]

    @property
    def depth(self) -> int:
        """Number of open pushes."""
        return len(self._stack)

    def _pack(self, tensor: Tensor, outer: SavedTensorHooks | None = None) -> Any:
        """Pack a tensor; `outer` is the pair of hooks below this one, if any."""
        try:
            address = tensor.data_ptr()
        except RuntimeError:  # some subclasses have no memory
            address = 0
        if self._first_address <= address < self._end_address:  # true of few tensors
            description = self._describe(tensor)
            if description is not None:
                return description
        if outer is not None:
            unit = -1 if self._ledger is None else self._ledger.current
            return _Outer(unit, outer[1], outer[0](tensor))
        if self.activations is not None and saves_checkpoint_input():
            handle = self.activations.save(tensor)
            if handle is not None:
                return handle
        return tensor.detach(), tensor._version

    def _describe(self, tensor: Tensor) -> _InSlot | None:
        """Return the description of a tensor in a slot, or None for any other tensor."""
        slot = self._slots_by_address.get(storage_address(tensor))
        if slot is None or slot.owner is None or not tensor.numel():
            return None
        updates = self._entries[slot.owner].updates
        geometry = int(tensor.storage_offset()), tensor.size(), tensor.stride()
        lazy_bits = tensor.is_conj(), tensor.is_neg()
        return _InSlot(slot.owner, updates, tensor.dtype, *geometry, *lazy_bits)

    def _unpack(self, packed: Any) -> Tensor:
        if type(packed) is tuple:
            tensor: Tensor
            tensor, version = packed
            if tensor._version != version:
                raise modified_in_place(
                    f"a tensor of shape {tuple(tensor.shape)} is at version "
                    f"{tensor._version}, expected {version}"
                )
            return tensor
        if isinstance(packed, _InSlot):
            return self._view_of(packed)
        if isinstance(packed, _Outer):
            self._register_backward()
            self.prefetcher.bound.bind_if_resident(packed.unit)
            return packed.unpack(packed.packed)
        assert isinstance(packed, SavedHandle)
        if self.activations is None:
            raise graph_of_closed_engine()
        if self.timeline is None:
            return self.activations.restore(packed)
        self.timeline.pause()
        restored = self.activations.restore(packed)
        self.timeline.resume()
        return restored

    def _view_of(self, packed: _InSlot) -> Tensor:
        """Return the described view of the slot that the unit has now."""
        self._register_backward()
        timeline = None
        if packed.unit != self._backward_unit:
            self._backward_unit, timeline = packed.unit, self.timeline
            self._begin_backward(packed.unit)
        if timeline is not None:
            timeline.pause()
        prefetcher = self.prefetcher
        prefetcher.use(packed.unit, bind=False)
        if timeline is not None:
            timeline.backward(packed.unit)
        entry = self._entries[packed.unit]
        if entry.updates != packed.updates:
            raise modified_in_place(
                f"the weights of unit {prefetcher.ledger.name_of(packed.unit)!r} were "
                "updated after this graph was made; call backward before step, or run the forward "
                "again"
            )
        assert entry.slot is not None
        flat = entry.slot.flat(packed.dtype)
        view = flat.as_strided(packed.size, packed.stride, packed.offset)
        view = view.conj() if packed.conj else view
        return negated_view(view) if packed.neg else view
