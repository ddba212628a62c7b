"""Where the engine meets modules and autograd."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from infinity.errors import PresenceError
from infinity.memory.gradients import GradientStore
from infinity.memory.mover import Mover
from infinity.model.cut import UnitCut
from infinity.model.torch_private import (
    SavedTensorHooks,
    inside_function_transform,
    top_saved_tensors_hooks,
)
from infinity.training.owner import Owner
from infinity.training.saved_tensors import SavedTensors
from infinity.training.timeline import Timeline
from infinity.training.watch import MemoryWatch


@dataclass(frozen=True, slots=True)
class HookMark:
    """How deep the stacks of an engine call were before it."""

    depth: int
    pushed: int
    outer: SavedTensorHooks | None
    autocast_cache: bool


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
        self.num_arrived = 0  # gradients since the start, whoever called backward
        self.divisor = 1  # of gradients that arrive; not 1 only where their loss is not divided
        self.lent: Collection[int] = ()  # parameters that have a full value of their own now
        self.write_edits: Callable[[], None] = lambda: None  # before home is read
        self._owner = Owner()
        self._cuts = cuts
        self._parameters = parameters
        self._index_of = {id(p): i for i, p in enumerate(parameters)}
        self._unit_of = {i: u for u, cut in enumerate(cuts) for i in cut.parameters}
        self._handles: list[RemovableHandle] = []
        self._pushed: list[bool] = []
        self._borrowed: list[list[int]] = []  # units of parameters in arguments, beside `_pushed`
        for unit, cut in enumerate(cuts):
            for module in cut.modules:
                before = self._before(unit)
                self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
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

    def unit_of(self, index: int) -> int:
        """The unit of a parameter."""
        return self._unit_of[index]

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
        def hook(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            self._refuse_strangers()
            if self.timeline is not None:
                self.timeline.recompute()
            borrowed = self._borrow(unit, (*args, *kwargs.values()))
            try:
                if not self._is_lent(unit):
                    self._use(unit)
            except BaseException:
                self._give_back(borrowed)
                raise
            self.watch.saw(args)
            self.watch.at(unit, "forward")
            self.mover.entries[unit].entered += 1
            self._pushed.append(self.saved.push())
            self._borrowed.append(borrowed)
            if self.timeline is not None:
                self.timeline.enter(unit)

        return hook

    @property
    def timeline(self) -> Timeline | None:
        """Who is told of units, while a trace is recorded."""
        return self.saved.timeline

    @timeline.setter
    def timeline(self, timeline: Timeline | None) -> None:
        self.saved.timeline = timeline

    def around(self, unit: int) -> tuple[Callable[..., None], Callable[..., None]]:
        """What goes before and after a forward of the unit that is not a call of its module."""
        return self._before(unit), self._after(unit)

    def _borrow(self, unit: int, given: tuple[Any, ...]) -> list[int]:
        """Bring the units of parameters that another module reached for and hands over.

        Such a parameter may have left meanwhile; while it is computed with, it stays.
        """
        indices = [self._index_of.get(id(x), -1) for x in given if isinstance(x, nn.Parameter)]
        units = {self._unit_of[i] for i in indices if i >= 0 and i not in self.lent} - {unit}
        borrowed: list[int] = []
        try:
            for other in sorted(units):
                self._use(other)
                self.mover.entries[other].entered += 1
                borrowed.append(other)
        except BaseException:
            self._give_back(borrowed)
            raise
        return borrowed

    def _give_back(self, borrowed: list[int]) -> None:
        for unit in borrowed:
            self.mover.entries[unit].entered -= 1

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
            if self.timeline is not None:
                self.timeline.leave()
            self.mover.entries[unit].entered -= 1
            self._give_back(self._borrowed.pop())
            if self._pushed.pop():
                self.saved.pop()

        return hook

    def _arrived(self, index: int) -> Callable[[Tensor], None]:
        def hook(parameter: Tensor) -> None:
            gradient, parameter.grad = parameter.grad, None
            assert gradient is not None
            self.mover.await_consumed(self._unit_of[index])
            self.num_arrived += 1
            if self.divisor != 1:
                gradient = gradient.detach() / self.divisor
            self.gradients.receive(index, gradient)
            del gradient
            self.watch.at(self._unit_of[index], "backward")
            self.mover.tend()
            if self.saved.activations is not None:
                self.saved.activations.tend()
            if self.timeline is not None:
                self.timeline.backward(self._unit_of[index], arrived=True)

        return hook

    def mark(self) -> HookMark:
        """Where all stacks are now, for `restore`; a forward or a backward begins."""
        if self.timeline is not None:
            self.timeline.call()
        return HookMark(
            self.saved.depth,
            len(self._pushed),
            top_saved_tensors_hooks(),
            torch.is_autocast_cache_enabled(),
        )

    def restore(self, mark: HookMark) -> None:
        """Every stack as it was at the mark; may be repeated where it was interrupted."""
        self.saved.unwind(mark.depth, mark.outer)
        del self._pushed[mark.pushed :], self._borrowed[mark.pushed :]
        if self.timeline is not None:
            self.timeline.unwind(mark.pushed)
        torch.set_autocast_cache_enabled(mark.autocast_cache)

    def drop_gradients(self) -> None:
        """Forget gradients that an interrupted backward made, but did not hand over."""
        if self.timeline is not None:
            self.timeline.forget()
        for parameter in self._parameters:
            parameter.grad = None

    def keep(self, handles: Sequence[RemovableHandle]) -> None:
        """Take these hooks back as well, at the end."""
        self._handles.extend(handles)

    def remove(self) -> None:
        """Take every hook back."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self.watch.close()
        self.saved.close()
