"""Hooks of modules and parameters: fetch weights, and receive gradients.

[Note: calls]
Parameters that a call uses are bound while it runs, and released when it returns; see
`call_guard.py` and [Note: released] in `bound_units.py`. Calls are those of engine
methods, outermost calls of the model or of a unit's module, and backwards. Parameters accessed
outside a call stay bound, and so do parameters that a call returns.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from infinity.errors import ResidencyError, TrainingError
from infinity.model.partitioner import UnitModules
from infinity.model.torch_private import (
    SavedTensorHooks,
    after_backward,
    backward_task,
    inside_backward,
    inside_function_transform,
    is_backward_code,
    no_dispatch_modes,
    top_saved_tensors_hooks,
    without_torch_function,
)
from infinity.offload.activations import ActivationStore
from infinity.offload.call_guard import Call, CallGuard
from infinity.offload.expert_calls import ExpertCalls
from infinity.offload.gradients import GradientStore
from infinity.offload.prefetch import Prefetcher
from infinity.offload.saved_tensors import SavedTensors
from infinity.offload.slice_sums import SliceSums
from infinity.offload.window import AccumulationWindow
from infinity.profiling.memory_watch import MemoryWatch


@dataclass(frozen=True, slots=True)
class HookMark:
    """Depths of the hook stacks, and autocast state, before an engine call."""

    depth: int
    num_forwards: int
    outer: SavedTensorHooks | None
    autocast_cache: bool


class _Entered(NamedTuple):
    """Forward in progress, of a unit's module, or of another watched module (unit None)."""

    module: nn.Module
    unit: int | None
    pushed: bool
    held: list[int]  # units of parameters in its arguments


class Hooks:
    """Module hooks of all units and gradient hooks of all parameters.

    `materialized_dtypes` are the indices of materialized parameters. `write_edits` writes pending
    edits of stored values; it runs before a unit is fetched.
    """

    def __init__(
        self,
        prefetcher: Prefetcher,
        gradients: GradientStore,
        window: AccumulationWindow,
        guard: CallGuard,
        watch: MemoryWatch,
        activations: ActivationStore | None,
        materialized_dtypes: Collection[int],
        write_edits: Callable[[], None],
        cuts: Sequence[UnitModules],
        parameters: Sequence[nn.Parameter],
        trained: Sequence[bool],
    ) -> None:
        self.prefetcher = prefetcher
        self.device = prefetcher.ledger.device
        self._ledger = prefetcher.ledger
        self._entries = prefetcher.ledger.entries
        self._bound = prefetcher.bound
        self._handover = prefetcher.handover
        self.window = window
        self.guard = guard
        self.watch = watch
        self.gradients = gradients
        self.sums = SliceSums()
        self.expert_calls = ExpertCalls()
        self.saved = SavedTensors(
            prefetcher, gradients.expect, self._register_backward, activations
        )
        self.materialized_dtypes = materialized_dtypes
        self.write_edits = write_edits
        self._call: Call | None = None  # begun by a module hook
        self._last_task = -1  # the last backward registered as a call
        self._cuts = cuts
        self._parameters = parameters
        self.unit_of = {i: u for u, cut in enumerate(cuts) for i in cut.parameters}
        # By id, without stacks that are cut: only their rows belong to units.
        self._index_of = {id(p): i for i, p in enumerate(parameters) if i in self.unit_of}
        self._cut_stacks = {id(p): i for i, p in enumerate(parameters) if i not in self.unit_of}
        self._handles: list[RemovableHandle] = []
        self._forwards: list[_Entered] = []
        for unit, cut in enumerate(cuts):
            for module in cut.modules:
                before = self._pre_forward_hook(unit)
                self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
                self._handles.append(
                    module.register_forward_hook(self._post_forward_hook(unit), always_call=True)
                )
        for index, parameter in enumerate(parameters):
            if trained[index] and index in self.unit_of:
                parameter.grad = None  # of a backward before the engine existed
                required_grad = parameter.requires_grad
                parameter.requires_grad_(True)  # needed to register the hook
                register: Any = parameter.register_post_accumulate_grad_hook
                self._handles.append(register(self._gradient_hook(index)))
                parameter.requires_grad_(required_grad)

    @property
    def slice_summed_units(self) -> set[int]:
        """Units whose last gradients were sums of slices."""
        return {self.unit_of[index] for index in self.sums.summed}

    def touch(self, parameter: nn.Parameter) -> Tensor:
        """Fetch the unit of a parameter on attribute access, and return the tensor to use."""
        if id(parameter) in self._cut_stacks:
            return self._cut_stack(parameter)
        index = self._index_of[id(parameter)]
        unit = self.unit_of[index]
        if self._computes(unit):
            self.device.sync_compute_stream()  # the current stream may have changed
            return self.sums.read(index, parameter)
        self._check_caller()
        if index in self.materialized_dtypes:
            return parameter
        self._is_materialized(unit)  # raises if a sibling is
        self._use(unit)
        return self.sums.read(index, parameter)

    def touch_together(self, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
        """Fetch the units of parameters that one operation uses; none evicts another's.

        Raises `ResidencyError` if the slots do not hold all of them.
        """
        tensors: list[Tensor] = []
        held: list[int] = []
        try:
            for parameter in parameters:
                tensors.append(self.touch(parameter))
                if id(parameter) in self._index_of:
                    held.append(self.unit_of[self._index_of[id(parameter)]])
                    self._entries[held[-1]].forward_depth += 1
            return tensors
        finally:
            self._release_held(held)

    def _cut_stack(self, parameter: nn.Parameter) -> Tensor:
        """Return a stack that is cut into ranges; raise during calls unless it is materialized."""
        self._check_caller()
        if self.guard.busy and self._cut_stacks[id(parameter)] not in self.materialized_dtypes:
            raise ResidencyError(
                f"a stack of experts of shape {tuple(parameter.shape)} was read in full during a "
                "call, and its experts are stored in ranges",
                because="the module computes with another implementation of its experts than it "
                "did at initialize(), or something else reads its weights or their shape",
                remedy="compute ranges of it: infinity.model.stacks.compute_ranges; or in "
                "engine.materialized(module)",
            )
        return parameter

    def _computes(self, unit: int) -> bool:
        """Return True if this thread runs the unit's forward and its parameters are bound."""
        entry = self._entries[unit]
        return (
            entry.forward_depth > 0
            and entry.bound
            and unit == self._ledger.current
            and not self.prefetcher.must_retry
            and not self.materialized_dtypes
            and self.guard.in_current_call()
            and not inside_function_transform()
        )

    def read(self, parameter: nn.Parameter) -> Tensor:
        """Return a resident parameter, or its gradient-capturing view while a slice runs."""
        return self.sums.read(self._index_of[id(parameter)], parameter)

    def _use(self, unit: int) -> None:
        with no_dispatch_modes():  # hide transfers from selective checkpointing
            self._join_backward()
            self.write_edits()
            if not torch.is_inference_mode_enabled():
                self.prefetcher.use(unit)
            else:
                with torch.inference_mode(False):  # views bound here may be used to train later
                    self.prefetcher.use(unit)
            self._bound.checksum_for_edits(unit, reached=not self.guard.busy)

    # --- calls -----------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Begin a call for the frame that calls the hook, unless one is in progress."""
        self._check_caller()
        if self.guard.busy or inside_backward():
            return
        self.device.sync_compute_stream()  # raises before anything begins
        self._call = self.guard.enter(sys._getframe(2))
        try:
            self._bound.verify()
        except BaseException:
            self._end()
            raise

    def _end(self) -> None:
        call, self._call = self._call, None
        self.guard.leave(call)

    def _enter(self, module: nn.Module, unit: int | None, held: list[int]) -> None:
        self._forwards.append(_Entered(module, unit, self.saved.push(), held))

    def _is_innermost(self, module: nn.Module, unit: int | None) -> bool:
        """Return True if the pre-hook succeeded: torch runs the post-hook even if it raised."""
        if self.guard.elsewhere() is not None or not self._forwards:
            return False
        return self._forwards[-1].module is module and self._forwards[-1].unit == unit

    def _leave(self, output: object) -> None:
        """End the innermost forward; the outermost one ends the call."""
        entered = self._forwards.pop()
        self._release_held(entered.held)
        if entered.pushed:
            self.saved.pop()
        if self._forwards or self._call is None:
            return
        try:
            self.release(output)
        finally:
            self._end()

    def release(self, output: object) -> None:
        """Unbind the units of a call, except those of parameters in its `output`."""
        for value in _items((output,)):
            index = self._index_of.get(id(value)) if isinstance(value, nn.Parameter) else None
            if index is not None and self._entries[self.unit_of[index]].bound:
                self._bound.checksum_for_edits(self.unit_of[index], reached=True)
        self._bound.release_all()

    def _join_backward(self) -> None:
        """Register a backward that was not started through the engine as a call."""
        if self.guard.busy or not inside_backward():
            return
        # Starts at the caller's frame: a frame that refers to itself is a cycle, which would keep
        # its callers, and the weights they hold, alive until a garbage collection.
        outermost = sys._getframe(1)
        frame: FrameType | None = outermost
        while frame is not None:  # up to the outermost backward
            outermost = frame if is_backward_code(frame.f_code) else outermost
            frame = frame.f_back
        call = self.guard.enter(outermost)

        def end() -> None:
            try:
                self._bound.release_all()
            finally:
                self.guard.leave(call)

        after_backward(end)

    def _register_backward(self) -> None:
        """Register the running backward with the engine, once per graph task."""
        task = backward_task()
        if task == self._last_task and task >= 0:
            return
        self.guard.check()
        self._join_backward()
        self._last_task = task

    def register_call_hooks(
        self, root: nn.Module, begin: Callable[[], None], end: Callable[[], None]
    ) -> None:
        """Treat calls of this module as calls of the engine; run `begin` and `end` around them."""

        def before(module: nn.Module, args: Any) -> None:
            self._begin()
            begin()
            self._enter(module, None, [])

        def after(module: nn.Module, args: Any, output: Any) -> None:
            if self._is_innermost(module, None):
                self.expert_calls.see(output)
                end()
                self._leave(output)

        self._handles.append(root.register_forward_pre_hook(before, prepend=True))
        self._handles.append(root.register_forward_hook(after, always_call=True))

    # --- units -----------------------------------------------------------------------------------

    def _check_caller(self) -> None:
        self.guard.check()
        if inside_function_transform():
            raise ResidencyError(
                "torch.func transforms (grad, vmap, functional_call, ...) cannot run over an "
                "offloaded module",
                because="they replace parameters or saved tensors behind the engine's back",
                remedy="use engine(...) and engine.backward(loss), or a plain copy of the module",
            )

    def _pre_forward_hook(self, unit: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            self._begin()
            if (timeline := self.saved.timeline) is not None:
                timeline.recompute()
            held: list[int] = []
            try:
                held += self._hold_arguments(unit, (*args, *kwargs.values()))
                if not self._is_materialized(unit):
                    self._use(unit)
                self.watch.saw(args)
                self.watch.at(unit, "forward")
            except BaseException:
                self._release_held(held)
                if not self._forwards:
                    self._end()
                raise
            self._entries[unit].forward_depth += 1
            self._enter(module, unit, held)
            if timeline is not None:
                timeline.enter(unit)

        return hook

    def around(self, unit: int) -> tuple[Callable[..., None], Callable[..., None]]:
        """Return the pre-hook and post-hook, to run around a forward without a module call."""
        return self._pre_forward_hook(unit), self._post_forward_hook(unit)

    def _hold_arguments(self, unit: int, arguments: Iterable[Any]) -> list[int]:
        """Fetch the units of parameters in a module's arguments; they stay until it returns.

        A parameter accessed by another module may have been evicted before it is passed on.
        """
        indices = [self._index_of[id(x)] for x in _items(arguments) if id(x) in self._index_of]
        if not indices:
            return []
        units = {self.unit_of[i] for i in indices if i not in self.materialized_dtypes} - {unit}
        held: list[int] = []
        try:
            for held_unit in sorted(units):
                self._use(held_unit)
                self._entries[held_unit].forward_depth += 1
                held.append(held_unit)
        except BaseException:
            self._release_held(held)
            raise
        return held

    def _release_held(self, held: list[int]) -> None:
        for unit in held:
            self._entries[unit].forward_depth -= 1

    def _is_materialized(self, unit: int) -> bool:
        if not self.materialized_dtypes:
            return False
        flags = [i in self.materialized_dtypes for i in self._cuts[unit].parameters]
        if any(flags) and not all(flags):
            raise ResidencyError(
                f"unit {self._cuts[unit].name!r} computes while some of its "
                "parameters are materialized",
                remedy="leave the `with engine.materialized(...)` block first, or materialize "
                "the whole module",
            )
        return any(flags)

    def _post_forward_hook(self, unit: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if not self._is_innermost(module, unit):
                return
            if (timeline := self.saved.timeline) is not None:
                timeline.leave()
            self._entries[unit].forward_depth -= 1
            self._leave(output)

        return hook

    def _gradient_hook(self, index: int) -> Callable[[Tensor], None]:
        unit = self.unit_of[index]

        def hook(parameter: Tensor) -> None:
            with without_torch_function():
                gradient, parameter.grad = parameter.grad, None
            gradient = self.sums.take(index, gradient)
            if gradient is None:
                if not self.sums.is_used:
                    raise TrainingError(
                        f"a gradient of unit {self._cuts[unit].name!r} was dropped "
                        "before it arrived",
                        because="a hook that was there before initialize() set .grad to None, "
                        "as an optimizer that steps in backward does",
                        remedy="take that hook away: the engine updates in step()",
                    )
                return
            self.receive(index, gradient)

        return hook

    def receive(self, index: int, gradient: Tensor) -> None:
        """Accumulate a parameter's gradient of the running backward."""
        self._register_backward()
        unit = self.unit_of[index]
        self._handover.wait_gradients_read(unit)
        self.window.arrived += 1
        if self.window.divisor != 1:
            gradient = gradient.detach() / self.window.divisor
        self.gradients.receive(index, gradient)
        del gradient
        self.watch.at(unit, "backward")
        self.prefetcher.poll()
        if (activations := self.saved.activations) is not None:
            activations.poll()
        if (timeline := self.saved.timeline) is not None:
            timeline.backward(unit, arrived=True)

    def expect(self, indices: Mapping[str, int]) -> None:
        """Start to read the saved gradients of these parameters' units."""
        for unit in {self.unit_of[index] for index in indices.values()}:
            self.gradients.expect(unit)

    def trainable_parameters(self, module: nn.Module) -> dict[int, nn.Parameter]:
        """Return a module's parameters that require a gradient, by index, without cut stacks."""
        indexed = ((self._index_of.get(id(p)), p) for p in module.parameters())
        return {index: p for index, p in indexed if index is not None and p.requires_grad}

    def mark(self, *, backward: bool = False) -> HookMark:
        """Return the depths of all stacks, for `restore`, when a forward or a backward begins."""
        self.device.sync_compute_stream()
        if backward:
            self.watch.turn()
        if (timeline := self.saved.timeline) is not None:
            timeline.call()
        return HookMark(
            self.saved.depth,
            len(self._forwards),
            top_saved_tensors_hooks(),
            torch.is_autocast_cache_enabled(),
        )

    def restore(self, mark: HookMark) -> None:
        """Restore every stack to its depth at the mark."""
        self.saved.unwind(mark.depth, mark.outer)
        if (timeline := self.saved.timeline) is not None:
            timeline.unwind(sum(e.unit is not None for e in self._forwards[: mark.num_forwards]))
        del self._forwards[mark.num_forwards :]
        torch.set_autocast_cache_enabled(mark.autocast_cache)

    def drop_gradients(self) -> None:
        """Discard gradients of a failed backward that were not accumulated."""
        if (timeline := self.saved.timeline) is not None:
            timeline.free()
        self.sums.drop()
        self.expert_calls.reset()
        for parameter in self._parameters:
            parameter.grad = None

    def keep(self, handles: Sequence[RemovableHandle]) -> None:
        """Add handles of hooks that `remove` removes."""
        self._handles.extend(handles)

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self.watch.close()
        self.saved.close()
        self.sums.drop()


def is_infinity_hook(hook: Any) -> bool:
    """Return True if a hook of a module was added by this package."""
    return str(getattr(hook, "__module__", "")).startswith("infinity.")


def _items(values: Iterable[Any]) -> Iterator[Any]:
    """Yield the values, and those nested in lists, tuples, mappings and dataclasses."""
    for value in values:
        if isinstance(value, Tensor):  # the most frequent case
            yield value
        elif isinstance(value, Mapping):
            yield from _items(value.values())
        elif isinstance(value, list | tuple):
            yield from _items(value)
        elif is_dataclass(value) and not isinstance(value, type):
            yield from _items(getattr(value, field.name, None) for field in fields(value))
        else:
            yield value
