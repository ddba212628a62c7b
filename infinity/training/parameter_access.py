"""Values of an engine's offloaded parameters, and parameter indices of modules."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor, nn

from infinity.errors import ConfigError, InfinityWarning, ResidencyError
from infinity.model.stacks import full_gradient_error
from infinity.offload.call_guard import CallGuard
from infinity.offload.hooks import Hooks
from infinity.offload.window import AccumulationWindow
from infinity.training.parameter_values import ParameterValues


class ParameterAccess:
    """Implementation of `offloaded_parameter.Access` while the engine is alive."""

    def __init__(
        self,
        values: ParameterValues,
        hooks: Hooks,
        guard: CallGuard,
        parameters: Sequence[nn.Parameter],
        window: AccumulationWindow,
    ) -> None:
        self._values = values
        self._hooks = hooks
        self._guard = guard
        self._window = window
        self._warned = False
        self._index_of = {id(p): i for i, p in enumerate(parameters)}

    def wake(self) -> None:
        """Do nothing: the engine is alive."""

    def fetch(self, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
        """Make the parameters resident together; return the tensors to read.

        Raises:
            ResidencyError: A parameter is a stack of experts that is cut into ranges, or the slots
                do not hold all units.
        """
        tensors = self._hooks.touch_together(parameters)
        for index in (self._index_of[id(p)] for p in parameters):
            if self._is_cut(index):
                raise ResidencyError(
                    f"{self._values.name(index)!r} was read where autograd records: it is a stack "
                    "of experts that is cut into ranges, and is never resident as a whole",
                    remedy="read it under torch.no_grad(); add the gradient of a penalty with "
                    "engine.set_gradient(p, engine.gradient(p) + ...) between backward and step()",
                )
        return tensors

    def _is_cut(self, index: int) -> bool:
        return index in self._values.pieces and index not in self._values.materialized_dtypes

    def copy(self, parameter: nn.Parameter) -> Tensor | None:
        """Return a copy of the full value on the compute device; None during a call."""
        if self._guard.busy:
            return None
        value = self._values.read(self._index_of[id(parameter)])
        return value.to(self._values.device)

    def version(self, parameter: nn.Parameter) -> int:
        """Return a number that changes with each edit and, at its `step()`, each update."""
        ledger = self._values.ledger
        index = self._index_of[id(parameter)]
        _, segment = self._values.location_of(index)
        units = self._values.units_of(index)
        return sum(ledger.version(unit, trained=segment.trained) for unit in units)

    def check_gradient(self, parameter: nn.Parameter, what: str) -> None:
        """Raise `ResidencyError` if the parameter is cut into ranges and not materialized."""
        index = self._index_of[id(parameter)]
        if self._is_cut(index):
            raise full_gradient_error(self._values.name(index), what)

    def on_missing_gradient(self) -> None:
        """Warn once that `p.grad` is None although gradients have arrived."""
        has_gradients = self._window.is_open or self._window.has_external_gradients
        if self._warned or not has_gradients or self._guard.busy:
            return
        self._warned = True
        warnings.warn(
            "p.grad was read between backward and step, and is None: gradients are moved to the "
            "optimizer's tier as they arrive. So torch.nn.utils.clip_grad_norm_ clips nothing and "
            "returns 0, and an optimizer of your own updates nothing: engine.step() does. "
            "gradient_clipping in the configuration clips, engine.grad_norm is the norm after "
            "step(), engine.gradient(p) a copy of a gradient",
            InfinityWarning,
            stacklevel=3,
        )


def targets(
    target: nn.Module | nn.Parameter | Iterable[nn.Module | nn.Parameter],
    index_of: Mapping[int, int],
) -> Sequence[int]:
    """Return the parameter indices of a module, a parameter, or several of them.

    Raises:
        ConfigError: A parameter does not belong to the engine.
    """
    if isinstance(target, nn.Parameter):
        if id(target) not in index_of:
            raise ConfigError("this parameter does not belong to the engine's module")
        return [index_of[id(target)]]
    if isinstance(target, nn.Module):
        return [i for p in target.parameters() for i in targets(p, index_of)]
    return [i for item in target for i in targets(item, index_of)]
