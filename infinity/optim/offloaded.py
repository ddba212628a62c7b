"""`engine.optimizer`: a `torch.optim.Optimizer` whose groups configure the optimizer passes.

It holds parameter groups, so that any `torch.optim.lr_scheduler` works over it; moments and masters
are stored in the engine's tiers. `step()` calls the engine's step; `read_state` returns the state
of one parameter.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from infinity.errors import ConfigError, EngineClosedError
from infinity.model.torch_private import has_step_hooks
from infinity.optim.update import Rule

# Methods of `torch.optim.Optimizer` without the wrapper that imports `torch._dynamo`.
#
# torch decorates some of them so that `torch.compile` does not trace them. The first call of such a
# method imports the compiler: 80 MiB and at least two seconds in each program with an optimizer.


def optimizer_method(name: str) -> Callable[..., Any]:
    """Return the function `torch.optim.Optimizer.name`, undecorated unless dynamo is imported.

    Wrappers are removed by `inspect.unwrap`, so this does not depend on torch's decorators.
    """
    method: Callable[..., Any] = getattr(torch.optim.Optimizer, name)
    return method if "torch._dynamo" in sys.modules else inspect.unwrap(method)


class OffloadedOptimizer(torch.optim.Optimizer):
    """Parameter groups over offloaded state, with the keys of the update rule.

    `groups` are those of any torch optimizer. Their values may change at any time: `step()`
    captures the values of an optimizer pass by `rule.capture`, from each group.
    """

    def __init__(
        self,
        groups: list[nn.Parameter] | list[dict[str, Any]],
        defaults: dict[str, Any],
        *,
        rule: Rule,
    ) -> None:
        super().__init__(groups, defaults)
        self.rule = rule
        self._engine_step: weakref.WeakMethod[Callable[[], None]] | None = None
        self._drop_window: weakref.WeakMethod[Callable[[], None]] | None = None
        self._read_state: Callable[[nn.Parameter], dict[str, Any]] | None = None
        self._rows_of_stack: Mapping[int, Sequence[int]] = {}
        rule.reserve(self.param_groups)

    def connect(self, engine_step: Callable[[], None], drop: Callable[[], None]) -> None:
        """Set the engine's methods that `step()` and `zero_grad()` call.

        They are referenced weakly: otherwise the engine and its optimizer would form a cycle, and
        the engine would be freed by a later garbage collection, not with its last reference.
        """
        self._engine_step = weakref.WeakMethod(engine_step)
        self._drop_window = weakref.WeakMethod(drop)

    @property
    def loss_scale(self) -> float:
        """The engine's loss scale for the next backward pass."""
        return float(getattr(self._engine(), "loss_scale", 1.0))

    @property
    def overflow(self) -> bool:
        """True if the last step was skipped because gradients were not finite."""
        report = getattr(self._engine(), "last_report", None)
        return report is not None and bool(report.skipped)

    def _engine(self) -> Any:
        step = None if self._engine_step is None else self._engine_step()
        return getattr(step, "__self__", None)

    def connect_state(self, read_state: Callable[[nn.Parameter], dict[str, Any]]) -> None:
        """Set the function that `read_state` calls."""
        self._read_state = read_state

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Call the engine's `step()`; closures are not supported."""
        if closure is not None:
            raise ConfigError("engine steps take no closure", remedy="call engine.step()")
        self._call(self._engine_step)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group as in torch; raises `ConfigError` once the engine has reserved its state."""
        if getattr(self, "_engine_step", None) is not None:
            raise ConfigError(
                "a group cannot be added once the engine is made",
                remedy="pass all groups in initialize(model_parameters=[...]), with lr 0 if unused",
            )
        optimizer_method("add_param_group")(self, param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the groups' values; raises `ConfigError` for state, which the engine stores."""
        if state_dict.get("state"):
            raise ConfigError(
                f"optimizer state of {len(state_dict['state'])} parameters cannot be loaded",
                because="moments are in the engine's tiers, and loading them is not implemented",
                remedy="load the groups only: {**state, 'state': {}}",
            )
        groups = self.param_groups  # schedulers, and an optimizer that was passed, reference these
        optimizer_method("load_state_dict")(self, state_dict)
        for group, loaded in zip(groups, self.param_groups, strict=True):
            group.clear()
            group.update(loaded)
        self.param_groups = groups

    def state_dict(self) -> dict[str, Any]:
        """Return the groups in torch's format; moments are stored in the engine's tiers."""
        state: dict[str, Any] = optimizer_method("state_dict")(self)
        return state

    def read_state(self, parameter: nn.Parameter) -> dict[str, Any]:
        """Return the state of one parameter, by torch's names, with `step` if torch has it.

        Moments are new fp32 CPU tensors, decoded from their storage format. Blocks until pending
        updates are done. Raises `ConfigError` if the parameter has no state.
        """
        if self._read_state is None:
            raise ConfigError("this optimizer belongs to no engine", remedy="call initialize()")
        return self._read_state(parameter)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard the accumulation window, if a backward pass ran since the last `step()`.

        Otherwise do nothing: gradients are offloaded as they are computed, and `step()` consumes
        them.
        """
        self._call(self._drop_window)

    def _call(self, method: weakref.WeakMethod[Callable[[], None]] | None) -> None:
        """Call a method set by `connect`, if any."""
        if method is None:
            return
        call = method()
        if call is None:
            raise EngineClosedError(
                "the engine of this optimizer was dropped",
                because="the optimizer holds only a weak reference to it",
                remedy="keep a reference to the engine: engine, optimizer, _, _ = initialize(...)",
            )
        call()

    def params_by_index(self, index_of: Mapping[int, int]) -> dict[int, Any]:
        """Return the current values of each parameter's group, captured by the rule, by index."""
        captured: dict[int, Any] = {}
        for group in self.param_groups:
            rule_params = self.rule.capture(group)
            indices = [index_of[id(parameter)] for parameter in group["params"]]
            captured |= dict.fromkeys(indices, rule_params)
        for stack, rows in self._rows_of_stack.items():
            if stack in captured:
                captured |= dict.fromkeys(rows, captured[stack])
        return captured

    def set_stack_rows(self, pieces: Mapping[int, Sequence[int]]) -> None:
        """Set the indices of the row slices of a stacked parameter, by the index of the stack."""
        self._rows_of_stack = dict(pieces)

    def group_values(self) -> list[dict[str, Any]]:
        """Return the entries of the groups without parameters and their names."""
        excluded = ("params", "param_names")
        return [{k: v for k, v in g.items() if k not in excluded} for g in self.param_groups]


def mark_stepped(optimizer: torch.optim.Optimizer) -> None:
    """Mark the optimizer as stepped: otherwise torch's schedulers warn."""
    vars(optimizer)["_opt_called"] = True


def refuse_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Raise `ConfigError` if the optimizer has step hooks: they would be called for each tile."""
    if has_step_hooks(optimizer):
        raise ConfigError(
            f"the {type(optimizer).__name__} has hooks on its steps",
            because="they would be called for each tile of a parameter, on a copy, in a thread",
            remedy="do their work before or after engine.step()",
        )
