"""What autograd saves while units compute: parts of slots, inputs of blocks, and all else.

[Note: saved tensors]
While a unit computes, a saved-tensor pair of ours is on top. A tensor that lives in a slot is
packed as a description (unit, update count, dtype, offset, size, stride) and unpacked onto
wherever the unit sits when backward asks; so nothing saved pins a slot. Unpacking after a later
update raises, as plain torch would. Any other tensor goes to the pair that was on top when ours
was pushed: checkpointing and save_on_cpu keep working. (Without that, non-reentrant
checkpointing would silently save everything and never recompute: equal numbers, no saving.)
With no outer pair it is kept detached with its version, which is checked on unpack; but inputs of
recomputed blocks, whoever recomputes them, go to `offload/activations.py` where there is one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from infinity.model.torch_private import (
    SavedTensorHooks,
    checkpoint_packs,
    saved_by_checkpoint,
    storage_address,
    top_saved_tensors_hooks,
)
from infinity.offload.activations import (
    ActivationStore,
    Away,
    graph_of_closed_engine,
    modified_in_place,
)
from infinity.offload.prefetch import Prefetcher
from infinity.offload.report import Timeline


@dataclass(frozen=True, slots=True)
class _InSlot:
    """A saved tensor that is part of a unit's weights."""

    unit: int
    updates: int
    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Outer:
    """A saved tensor that another pair of hooks packed, while `unit` computed.

    To unpack it may mean to compute again, with parameters that a closure holds.
    """

    unit: int
    unpack: Callable[[Any], Tensor]
    packed: Any


@dataclass(frozen=True, slots=True)
class _Kept:
    """A saved tensor kept as it is."""

    tensor: Tensor
    version: int


class SavedTensors:
    """Our pack/unpack pair. See [Note: saved tensors]."""

    def __init__(
        self,
        prefetcher: Prefetcher,
        expect: Callable[[int], None],
        join: Callable[[], None],
        activations: ActivationStore | None,
    ) -> None:
        self._prefetcher: Prefetcher | None = prefetcher
        self._join = join  # a backward wants weights
        self._expect = expect  # a unit's backward begins: its gradients will arrive soon
        self._expected = -1
        self._addresses = {}
        for slot in prefetcher.ledger.slots:
            probe = slot.residency
            if probe is None:
                assert slot.arena is not None
                probe = slot.arena.view(slot.offset, slot.nbytes)
            self._addresses[probe.data_ptr()] = slot
        self.timeline: Timeline | None = None  # while a trace is recorded
        self.activations = activations  # takes inputs of recomputed blocks
        # The context, our pair, and whether a checkpoint's pair is below it.
        self._stack: list[tuple[Any, SavedTensorHooks, bool]] = []

    def close(self) -> None:
        """Refer to nothing any more.

        After an exception in a backward, autograd keeps what was left of its graph in a queue,
        and the graph our pairs; they must not keep the engine's memory alive.
        """
        self._prefetcher = self.activations = None
        self._expect, self._join = (lambda unit: None), (lambda: None)
        self._addresses.clear()

    @property
    def prefetcher(self) -> Prefetcher:
        """The prefetcher; raises `EngineClosedError` where there is none any more."""
        if self._prefetcher is None:
            raise graph_of_closed_engine()
        return self._prefetcher

    def hide_from_compiler(self) -> None:
        """What torch compiles calls our pair at run time; it is not to be compiled itself.

        Imports the compiler.
        """
        hide: Any = torch.compiler.disable
        self._pack = hide(self._pack)  # type: ignore[method-assign]
        self._unpack = hide(self._unpack)  # type: ignore[method-assign]

    def push(self) -> bool:
        """Put our pair on top unless it is there already; whether it was pushed."""
        outer = top_saved_tensors_hooks()
        if outer is not None and self._stack and outer[0] is self._stack[-1][1][0]:
            return False

        def pack(tensor: Tensor) -> Any:
            return self._pack(tensor, outer)

        pair = (pack, self._unpack)
        context = torch.autograd.graph.saved_tensors_hooks(*pair)
        self._stack.append((context, pair, self.under_checkpoint or checkpoint_packs(outer)))
        context.__enter__()
        return True

    def pop(self) -> None:
        """Undo one `push`."""
        context, _, _ = self._stack.pop()
        context.__exit__(None, None, None)

    def unwind(self, depth: int, outer: SavedTensorHooks | None) -> None:
        """Back to `depth` pushes with `outer` on top, wherever an exception left both stacks."""
        bottom = outer[0] if outer is not None else None
        while (top := top_saved_tensors_hooks()) is not None and top[0] is not bottom:
            torch.autograd.graph.saved_tensors_hooks(*top).__exit__(None, None, None)
        del self._stack[depth:]

    @property
    def under_checkpoint(self) -> bool:
        """Whether what is saved now is thrown away, and computed again in backward."""
        return bool(self._stack) and self._stack[-1][2]

    @property
    def depth(self) -> int:
        """How many pushes are open."""
        return len(self._stack)

    def _pack(self, tensor: Tensor, outer: SavedTensorHooks | None) -> Any:
        slot = self._addresses.get(storage_address(tensor))
        if slot is not None and slot.owner is not None and tensor.numel():
            return _InSlot(
                slot.owner,
                self.prefetcher.entries[slot.owner].updates,
                tensor.dtype,
                int(tensor.storage_offset()),
                tensor.size(),
                tensor.stride(),
            )
        if outer is not None:
            return _Outer(self.prefetcher.current, outer[1], outer[0](tensor))
        if self.activations is not None and saved_by_checkpoint():
            away = self.activations.save(tensor)
            if away is not None:
                return away
        return _Kept(tensor.detach(), tensor._version)

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, _Outer):
            self._join()
            self.prefetcher.bind_if_resident(packed.unit)
            return packed.unpack(packed.packed)
        if isinstance(packed, Away):
            if self.activations is None:
                raise graph_of_closed_engine()
            if self.timeline is None:
                return self.activations.restore(packed)
            self.timeline.pause()
            restored = self.activations.restore(packed)
            self.timeline.resume()
            return restored
        if isinstance(packed, _Kept):
            if packed.tensor._version != packed.version:
                raise modified_in_place(
                    f"a tensor of shape {tuple(packed.tensor.shape)} is at version "
                    f"{packed.tensor._version}, expected {packed.version}"
                )
            return packed.tensor
        assert isinstance(packed, _InSlot)
        self._join()
        timeline = None
        if packed.unit != self._expected:
            self._expected, timeline = packed.unit, self.timeline
            self._expect(packed.unit)
        if timeline is not None:
            timeline.pause()
        self.prefetcher.use(packed.unit, bind=False)
        if timeline is not None:
            timeline.backward(packed.unit)
        entry = self.prefetcher.entries[packed.unit]
        if entry.updates != packed.updates:
            raise modified_in_place(
                f"the weights of unit {self.prefetcher.plan.units[packed.unit].name!r} were "
                "updated after this graph was made; call backward before step, or run the forward "
                "again"
            )
        assert entry.slot is not None
        assert entry.slot.residency is not None
        storage = entry.slot.residency.untyped_storage()
        alias = torch.empty(0, dtype=packed.dtype, device=entry.slot.residency.device)
        offset = entry.slot.residency.storage_offset() // packed.dtype.itemsize + packed.offset
        return alias.set_(storage, offset, packed.size, packed.stride)
