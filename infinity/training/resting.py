"""Weights that stay with their module when its engine is gone.

They rest where the engine left them, without optimizer state, until the module is asked for a
parameter: then all of them become ordinary tensors in RAM, in the dtype they computed in, unit by
unit. A module that dies first takes them along, and nothing is read.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from typing import Protocol

from torch import Tensor, nn

from infinity.common.sizes import format_size
from infinity.errors import DoesNotFitError
from infinity.model.offloaded_parameter import gone, name_engine, unname_engine
from infinity.model.parameters import ParameterBinding, RestingParameters
from infinity.offload.call_guard import CallGuard
from infinity.plan.machine import read_machine
from infinity.training.parameter_access import ParameterValues


class Closing(Protocol):
    """The parts of an engine that weights need to rest."""

    @property
    def closed(self) -> bool:
        """Whether everything was given back."""

    def close(self) -> None:
        """Give everything back."""


class Resting:
    """The weights of a module whose engine is gone; the module's dicts of parameters own this."""

    def __init__(
        self,
        modules: Iterable[nn.Module],
        binding: ParameterBinding,
        values: ParameterValues,
        guard: CallGuard,
        parts: Closing,
    ) -> None:
        self._modules = [weakref.ref(module) for module in modules]
        self._binding = binding
        self._values = values
        self._guard = guard
        self._parts = parts
        self._left = list(values.store.plan.units)  # still to be read, the last first
        self._lock = threading.RLock()
        self._finalizer = weakref.finalize(self, _close_here, guard, parts)

    def wake(self) -> None:
        """Give the module its values in RAM, and everything else back.

        Raises:
            DoesNotFitError: RAM has no room; the weights rest on.
            ResidencyError: This is a forked child.
        """
        with self._lock:
            self._guard.check()
            if self._parts.closed and self._left:
                raise gone()
            self._check_fits()
            while self._left:
                self._binding.restore(self._values.take(self._left[-1]))
                self._left.pop()
            unname_engine(self._binding.parameters)
            for reference in self._modules:
                module = reference()
                if module is not None and isinstance(module._parameters, RestingParameters):
                    module.__dict__["_parameters"] = dict(dict.items(module._parameters))
            self._finalizer()

    def fetch(self, parameter: nn.Parameter) -> Tensor:
        """Give the module its values, and return the parameter."""
        self.wake()
        return parameter

    def copy(self, parameter: nn.Parameter) -> Tensor:
        """Return a copy of the value, as `fetch` does."""
        return self.fetch(parameter).detach().clone()

    def version(self, parameter: nn.Parameter) -> int:
        """Values that rest do not change."""
        return 0

    def note_missing_gradient(self) -> None:
        """Without an engine there are no gradients to look for."""

    def answer(self) -> None:
        """Answer references to parameters that were kept; see `offloaded_parameter.Access`."""
        name_engine(self._binding.parameters, None, self)

    def _check_fits(self) -> None:
        store, most, now = self._values.store, 0, 0
        for unit in reversed(self._left):
            values = sum(s.numel * self._values.dtype(s.parameter).itemsize for s in unit.segments)
            most = max(most, now + values)
            now += values - store.freed_by_taking(unit.index)
        available = read_machine().host_available_bytes
        if most > available:
            raise DoesNotFitError(
                f"the module's weights take {format_size(most)} more RAM, and "
                f"{format_size(available)} are available",
                because="its engine was released, and left them in their tiers",
                remedy="free RAM and use the module again; or train, evaluate and save with one "
                "engine: engine.save_weights() before it is released",
            )


def _close_here(guard: CallGuard, parts: Closing) -> None:
    if guard.is_here():
        parts.close()
