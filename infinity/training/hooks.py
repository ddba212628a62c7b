"""Where the engine meets modules and autograd.

[Note: saved tensors]
While a unit computes, a saved-tensor pair of ours is on top. A tensor that lives in a slot is
packed as a description (unit, update count, dtype, offset, size, stride) and unpacked onto
wherever the unit sits when backward asks; so nothing saved pins a slot. Unpacking after a later
update raises, as plain torch would. Any other tensor goes to the pair that was on top when ours
was pushed: checkpointing and save_on_cpu keep working. (Without that, non-reentrant
checkpointing would silently save everything and never recompute: equal numbers, no saving.)
With no outer pair it is kept detached with its version, which is checked on unpack.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from infinity.errors import EngineClosedError, PresenceError
from infinity.memory.gradients import GradientStore
from infinity.memory.mover import Mover
from infinity.model.cut import UnitCut
from infinity.model.torch_private import (
    SavedTensorHooks,
    inside_function_transform,
    top_saved_tensors_hooks,
)
from infinity.training.owner import Owner
from infinity.training.watch import MemoryWatch


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
    """A saved tensor that another pair of hooks packed."""

    unpack: Callable[[Any], Tensor]
    packed: Any


@dataclass(frozen=True, slots=True)
class _Kept:
    """A saved tensor kept as it is."""

    tensor: Tensor
    version: int


@dataclass(frozen=True, slots=True)
class HookMark:
    """How deep the stacks of an engine call were before it."""

    depth: int
    pushed: int
    outer: SavedTensorHooks | None
    autocast_cache: bool


class SavedTensors:
    """Our pack/unpack pair. See [Note: saved tensors]."""

    def __init__(self, mover: Mover, expect: Callable[[int], None]) -> None:
        self._mover: Mover | None = mover
        self._expect = expect  # a unit's backward begins: its gradients will arrive soon
        self._expected = -1
        self._addresses = {}
        for slot in mover.ledger.slots:
            probe = slot.residency
            if probe is None:
                assert slot.arena is not None
                probe = slot.arena.view(slot.offset, slot.nbytes)
            self._addresses[probe.data_ptr()] = slot
        self._stack: list[tuple[Any, SavedTensorHooks]] = []

    def close(self) -> None:
        """Refer to nothing any more.

        After an exception in a backward, autograd keeps what was left of its graph in a queue,
        and the graph our pairs; they must not keep the engine's memory alive.
        """
        self._mover = None
        self._expect = lambda unit: None
        self._addresses.clear()

    @property
    def mover(self) -> Mover:
        """The mover; raises `EngineClosedError` where there is none any more."""
        if self._mover is None:
            raise EngineClosedError(
                "backward through a graph of an engine that is closed",
                remedy="call engine.backward(loss) before engine.close()",
            )
        return self._mover

    def push(self) -> bool:
        """Put our pair on top unless it is there already; whether it was pushed."""
        outer = top_saved_tensors_hooks()
        if outer is not None and self._stack and outer[0] is self._stack[-1][1][0]:
            return False

        def pack(tensor: Tensor) -> Any:
            return self._pack(tensor, outer)

        pair = (pack, self._unpack)
        context = torch.autograd.graph.saved_tensors_hooks(*pair)
        self._stack.append((context, pair))
        context.__enter__()
        return True

    def pop(self) -> None:
        """Undo one `push`."""
        context, _ = self._stack.pop()
        context.__exit__(None, None, None)

    def unwind(self, depth: int, outer: SavedTensorHooks | None) -> None:
        """Back to `depth` pushes with `outer` on top, wherever an exception left both stacks."""
        bottom = outer[0] if outer is not None else None
        while (top := top_saved_tensors_hooks()) is not None and top[0] is not bottom:
            torch.autograd.graph.saved_tensors_hooks(*top).__exit__(None, None, None)
        del self._stack[depth:]

    @property
    def depth(self) -> int:
        """How many pushes are open."""
        return len(self._stack)

    def _pack(self, tensor: Tensor, outer: SavedTensorHooks | None) -> Any:
        slot = self._addresses.get(tensor.untyped_storage().data_ptr())
        if slot is not None and slot.owner is not None and tensor.numel():
            return _InSlot(
                slot.owner,
                self.mover.entries[slot.owner].updates,
                tensor.dtype,
                int(tensor.storage_offset()),
                tensor.size(),
                tensor.stride(),
            )
        if outer is not None:
            return _Outer(outer[1], outer[0](tensor))
        return _Kept(tensor.detach(), tensor._version)

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, _Outer):
            return packed.unpack(packed.packed)
        if isinstance(packed, _Kept):
            if packed.tensor._version != packed.version:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by "
                    f"an inplace operation: a tensor of shape {tuple(packed.tensor.shape)} is at "
                    f"version {packed.tensor._version}, expected {packed.version}"
                )
            return packed.tensor
        assert isinstance(packed, _InSlot)
        if packed.unit != self._expected:
            self._expected = packed.unit
            self._expect(packed.unit)
        self.mover.use(packed.unit)
        entry = self.mover.entries[packed.unit]
        if entry.updates != packed.updates:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: the weights of unit "
                f"{self.mover.plan.units[packed.unit].name!r} were updated after this graph was "
                "made; call backward before step, or run the forward again"
            )
        assert entry.slot is not None
        assert entry.slot.residency is not None
        storage = entry.slot.residency.untyped_storage()
        alias = torch.empty(0, dtype=packed.dtype, device=entry.slot.residency.device)
        offset = entry.slot.residency.storage_offset() // packed.dtype.itemsize + packed.offset
        return alias.set_(storage, offset, packed.size, packed.stride)


class Hooks:
    """Module hooks of all units, gradient hooks of all parameters, and their removal."""

    def __init__(
        self,
        mover: Mover,
        gradients: GradientStore,
        cuts: Sequence[UnitCut],
        parameters: Sequence[nn.Parameter],
        trained: Sequence[bool],
    ) -> None:
        self.mover = mover
        self.watch: MemoryWatch  # set by whoever makes hooks, before the first forward
        self.gradients = gradients
        self.saved = SavedTensors(mover, gradients.expect)
        self.lent: Collection[int] = ()  # parameters that have a full value of their own now
        self.write_edits: Callable[[], None] = lambda: None  # before home is read
        self._owner = Owner()
        self._cuts = cuts
        self._parameters = parameters
        self._index_of = {id(p): i for i, p in enumerate(parameters)}
        self._unit_of = {i: u for u, cut in enumerate(cuts) for i in cut.parameters}
        self._handles: list[RemovableHandle] = []
        self._pushed: list[bool] = []
        for unit, cut in enumerate(cuts):
            for module in cut.modules:
                self._handles.append(module.register_forward_pre_hook(self._before(unit)))
                self._handles.append(
                    module.register_forward_hook(self._after(unit), always_call=True)
                )
        for index, parameter in enumerate(parameters):
            if trained[index]:
                requires = parameter.requires_grad
                parameter.requires_grad_(True)  # the hook needs an accumulator
                register: Any = parameter.register_post_accumulate_grad_hook
                self._handles.append(register(self._arrived(index)))
                parameter.requires_grad_(requires)

    def touch(self, parameter: nn.Parameter) -> None:
        """A parameter is being reached for through its module."""
        self._refuse_strangers()
        index = self._index_of[id(parameter)]
        if index not in self.lent:
            self._is_lent(self._unit_of[index])  # raises where a sibling is
            self._use(self._unit_of[index])

    def _use(self, unit: int) -> None:
        self.write_edits()
        if not torch.is_inference_mode_enabled():
            self.mover.use(unit)
            return
        with torch.inference_mode(False):  # what is bound now may be trained with later
            self.mover.use(unit)

    def _refuse_strangers(self) -> None:
        self._owner.check()
        if inside_function_transform():
            raise PresenceError(
                "torch.func transforms (grad, vmap, functional_call, ...) cannot run over an "
                "offloaded module",
                because="they replace parameters or saved tensors behind the engine's back",
                remedy="use engine(...) and engine.backward(loss), or a plain copy of the module",
            )

    def _before(self, unit: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any) -> None:
            self._refuse_strangers()
            if not self._is_lent(unit):
                self._use(unit)
            self.watch.saw(args)
            self.watch.at(unit, "forward")
            self.mover.entries[unit].entered += 1
            self._pushed.append(self.saved.push())

        return hook

    def _is_lent(self, unit: int) -> bool:
        if not self.lent:
            return False
        lent = [i in self.lent for i in self._cuts[unit].parameters]
        if any(lent) and not all(lent):
            raise PresenceError(
                f"unit {self.mover.plan.units[unit].name!r} computes while some of its "
                "parameters are materialized",
                remedy="leave the `with engine.materialized(...)` block first, or materialize "
                "the whole module",
            )
        return any(lent)

    def _after(self, unit: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if not self._pushed:  # an exception came before our pre-hook
                return
            self.mover.entries[unit].entered -= 1
            if self._pushed.pop():
                self.saved.pop()

        return hook

    def _arrived(self, index: int) -> Callable[[Tensor], None]:
        def hook(parameter: Tensor) -> None:
            gradient, parameter.grad = parameter.grad, None
            assert gradient is not None
            self.mover.await_consumed(self._unit_of[index])
            self.gradients.receive(index, gradient)
            del gradient
            self.watch.at(self._unit_of[index], "backward")
            self.mover.tend()

        return hook

    def mark(self) -> HookMark:
        """Where all stacks are now, for `restore`."""
        return HookMark(
            self.saved.depth,
            len(self._pushed),
            top_saved_tensors_hooks(),
            torch.is_autocast_cache_enabled(),
        )

    def restore(self, mark: HookMark) -> None:
        """Every stack as it was at the mark; may be repeated where it was interrupted."""
        self.saved.unwind(mark.depth, mark.outer)
        del self._pushed[mark.pushed :]
        torch.set_autocast_cache_enabled(mark.autocast_cache)

    def drop_gradients(self) -> None:
        """Forget gradients that an interrupted backward made, but did not hand over."""
        for parameter in self._parameters:
            parameter.grad = None

    def remove(self) -> None:
        """Take every hook back."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self.watch.close()
        self.saved.close()
