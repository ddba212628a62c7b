"""Guard against merging peft adapters into weights that are not materialized."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any

from torch import nn

from infinity.errors import ResidencyError
from infinity.training.parameter_values import ParameterValues


class MergeGuard:
    """Guard of the peft methods that would lose edits of adapters; they raise before any change.

    `merge` and `unmerge` of a layer raise outside a `materialized` block: peft edits `.data`, which
    for an offloaded parameter is a temporary copy, so the edit would be lost while the layer is
    marked as merged. Everything in peft that merges (`merge_adapter`, `merge_and_unload`, a merged
    layer in `disable_adapter()`) calls these two methods. `merge_and_unload` and `unload` always
    raise: they permanently remove adapters whose weights and state the engine holds.
    """

    def __init__(
        self, module: nn.Module, values: ParameterValues, index_of: Mapping[int, int]
    ) -> None:
        self._values = values
        self._index_of = index_of
        self._guarded: list[tuple[nn.Module, str]] = []
        # If peft is not imported, the module has no peft adapters.
        peft = sys.modules.get("peft.tuners.tuners_utils")
        if peft is not None:
            layer, tuner = peft.BaseTunerLayer, peft.BaseTuner
            self._guard(module, layer, ("merge", "unmerge"), self._check_merge)
            self._guard(module, tuner, ("merge_and_unload", "unload"), self._refuse_unload)

    def remove(self) -> None:
        """Remove the guards."""
        while self._guarded:
            target, name = self._guarded.pop()
            vars(target).pop(name, None)

    def _guard(
        self,
        module: nn.Module,
        target_type: type[nn.Module],
        names: tuple[str, ...],
        check: Callable[[nn.Module, str], None],
    ) -> None:
        for target in [m for m in module.modules() if isinstance(m, target_type)]:
            for name in names:
                if name not in vars(target):
                    # A bound method: a deep copy then merges itself, not the original.
                    setattr(target, name, MethodType(_checked(name, check), target))
                    self._guarded.append((target, name))

    def _check_merge(self, layer: nn.Module, name: str) -> None:
        if not self._guarded:
            return  # the guard was removed, but a deep copy has one
        indices = [self._index_of.get(id(parameter)) for parameter in layer.parameters()]
        offloaded = sum(
            i is not None and i not in self._values.materialized_dtypes for i in indices
        )
        if offloaded:
            raise ResidencyError(
                f"{name}() of a {type(layer).__name__} layer of adapters: {offloaded} of its "
                f"{len(indices)} parameters are not materialized",
                because="an edit of offloaded weights is lost; nothing was changed",
                remedy=f"with engine.materialized(engine.module): engine.module.{name}_adapter()",
            )

    def _refuse_unload(self, tuner: nn.Module, name: str) -> None:
        if not self._guarded:
            return
        raise ResidencyError(
            f"{name}() of a model that an engine trains",
            because="it takes the adapters out of the model for good, and the engine holds "
            "their weights and optimizer state; nothing was changed",
            remedy=f"engine.close(restore=True), and then {name}(); or to merge and go on: "
            "with engine.materialized(engine.module): engine.module.merge_adapter()",
        )


def _checked(name: str, check: Callable[[nn.Module, str], None]) -> Callable[..., Any]:
    def checked(target: nn.Module, *args: Any, **kwargs: Any) -> Any:
        check(target, name)
        return getattr(type(target), name)(target, *args, **kwargs)

    return checked
