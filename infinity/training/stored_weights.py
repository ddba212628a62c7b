"""Weights that stay with their module after its engine was collected.

They stay in the tiers where the engine stored them, without optimizer state, until a parameter is
used: then all become ordinary tensors in RAM, in their compute dtype, unit by unit. If the module
is collected first, they are freed unread. The next engine of the module reads them one at a time if
they do not fit in RAM.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Protocol

from torch import Tensor, nn

from infinity.common.sizes import format_size
from infinity.distributed.context import DistContext
from infinity.errors import ConfigError, DoesNotFitError
from infinity.model.lazy_tensor import Read
from infinity.model.offloaded_parameter import attach_engine, detach_engine, released_error
from infinity.model.parameter_map import StoredParameters
from infinity.model.parameters import ParameterBinding
from infinity.offload.call_guard import CallGuard
from infinity.plan.machine import read_machine
from infinity.training.parameter_values import ParameterValues


class Closing(Protocol):
    """Components of an engine that stored weights depend on."""

    @property
    def closed(self) -> bool:
        """Return True if everything has been released."""

    def close(self) -> None:
        """Release everything."""


class StoredWeights:
    """Weights of a module without an engine, owned by the module's `StoredParameters`."""

    def __init__(
        self,
        modules: Iterable[nn.Module],
        binding: ParameterBinding,
        values: ParameterValues,
        guard: CallGuard,
        components: Closing,
    ) -> None:
        self._modules = [weakref.ref(module) for module in modules]
        self._binding = binding
        self._values = values
        self._guard = guard
        self._components = components
        self._unread = list(values.store.plan.units)  # to be read, the last one first
        self._lock = threading.RLock()
        self._finalizer = weakref.finalize(self, _close_in_process, guard, components)

    def wake(self) -> None:
        """Restore the module's parameters in RAM, and release everything else.

        Raises:
            DoesNotFitError: The values do not fit in RAM; they stay stored.
            EngineClosedError: The values have been released.
            ResidencyError: This is a forked child.
        """
        with self._lock:
            self._guard.check()
            if self._components.closed and self._unread:
                raise released_error()
            needed, available = self._sizes()
            if needed > available:
                raise DoesNotFitError(
                    f"the module's weights take {format_size(needed)} more RAM, and "
                    f"{format_size(available)} are available",
                    because="its engine was released, and left them in their tiers",
                    remedy="free RAM and use the module again; or train, evaluate and save with "
                    "one engine: engine.save_weights() before it is released",
                )
            while self._unread:
                self._binding.restore(self._values.take(self._unread[-1]))
                self._unread.pop()
            detach_engine(self._binding.parameters)
            for module in self._stored_modules():
                module.__dict__["_parameters"] = dict(dict.items(module._parameters))
            self._finalizer()

    def materialize(self) -> tuple[dict[int, Read], Callable[[], None]]:
        """Put the module's parameters on meta for the next engine, which reads them one at a time.

        Returns:
            Functions that read the stored values, by id of the parameter, and one that undoes this.

        Raises:
            ConfigError: Something else is tied to a parameter by more than a Python reference.
        """
        with self._lock:
            self._guard.check()
            binding, modules = self._binding, self._stored_modules()
            index_of = {id(p): i for i, p in enumerate(binding.parameters)}
            reads: dict[int, Read] = {
                id(p): partial(self._values.read, index_of[id(p)])
                for module in modules
                for p in module._parameters.values()
                if p is not None
            }
            parameters_of = {module: module._parameters for module in modules}

            def undo() -> None:
                binding.offload_from_meta()
                binding.settle()
                for unit in self._values.store.plan.units:
                    binding.free(unit.index)
                for module, parameters in parameters_of.items():
                    module.__dict__["_parameters"] = parameters
                self.answer()

            try:
                for module in modules:
                    module.__dict__["_parameters"] = dict(dict.items(module._parameters))
                binding.swap_to_meta(index_of[key] for key in reads)
            except ConfigError:
                undo()
                raise
            return reads, undo

    def _stored_modules(self) -> list[nn.Module]:
        modules = (reference() for reference in self._modules)
        return [m for m in modules if m is not None and isinstance(m._parameters, StoredParameters)]

    def fetch(self, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
        """Restore the module's parameters, and return these."""
        self.wake()
        return [*parameters]

    def copy(self, parameter: nn.Parameter) -> Tensor:
        """Restore the module's parameters, and return a copy of this one."""
        self.wake()
        return parameter.detach().clone()

    def version(self, parameter: nn.Parameter) -> int:
        """Return 0: stored values do not change."""
        return 0

    def on_missing_gradient(self) -> None:
        """Do nothing: without an engine there are no gradients."""

    def check_gradient(self, parameter: nn.Parameter, what: str) -> None:
        """Do nothing: without an engine no stack of experts is cut."""

    def answer(self) -> None:
        """Become the `offloaded_parameter.Access` of the parameters, for existing references."""
        attach_engine(self._binding.parameters, None, self)

    @property
    def fits(self) -> bool:
        """Return True if the values fit in half of the available RAM."""
        needed, available = self._sizes()
        return 2 * needed <= available

    def _sizes(self) -> tuple[int, int]:
        """Return the most bytes that `wake` adds to RAM at a time, and the available bytes."""
        store = self._values.store
        peak = current = 0
        for unit in reversed(self._unread):
            nbytes = sum(s.numel * self._values.dtype(s.parameter).itemsize for s in unit.segments)
            peak = max(peak, current + nbytes)
            current += nbytes - store.reclaimable_bytes(unit.index)
        return peak, read_machine().host_available_bytes


def take_over_stored_weights(
    model: nn.Module, ranks: DistContext, undo: ExitStack
) -> dict[int, Read]:
    """Return functions that read the values a collected engine left, by id of the parameter.

    Values that fit in RAM are restored to the module instead, and on several ranks all values,
    since each rank stores a shard. `undo` gets the functions that undo the change of the module.
    """
    sources = {
        id(stored): stored
        for module in model.modules()
        if isinstance(module._parameters, StoredParameters)
        if isinstance(stored := module._parameters.stored, StoredWeights)
    }
    reads: dict[int, Read] = {}
    for stored in sources.values():
        if ranks.count > 1 or stored.fits:
            stored.wake()
            continue
        try:
            functions, offload_from_meta = stored.materialize()
        except ConfigError:
            stored.wake()
        else:
            reads |= functions
            undo.callback(offload_from_meta)
    return reads


def _close_in_process(guard: CallGuard, components: Closing) -> None:
    if guard.in_creating_process():
        components.close()
