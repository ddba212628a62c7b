"""Support for peft adapters of single parameters (`target_parameters`) that are offloaded.

[Note: parametrized in a forward]
In each forward peft parametrizes the adapted parameter: `torch.nn.utils.parametrize` deletes it
from its module, changes the module's class, and undoes both afterwards. A module whose parameters
an engine owns refuses that. peft is therefore given a stand-in module that holds the resident
values, and parametrizes that one. The resulting parametrization is applied, once per forward, to
the value that the real module's attribute returns. The choice of parametrization remains peft's.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from infinity.model.parameter_map import ParameterMap

_ACTIVATE = "_activate_lora"
_BASE = "get_base_layer"


class AdaptedParameters:
    """Replacement of `_activate_lora` in peft layers of a module that an engine owns."""

    def __init__(self, module: nn.Module) -> None:
        # If peft is not imported, the module has no peft adapters.
        layer_type = getattr(sys.modules.get("peft.tuners.lora.layer"), "ParamWrapper", ())
        self._layers = [layer for layer in module.modules() if isinstance(layer, layer_type)]
        for layer in self._layers:
            # A bound method: a deep copy of the layer then activates itself, not the original.
            vars(layer)[_ACTIVATE] = MethodType(_activate, layer)

    def remove(self) -> None:
        """Remove the replacements."""
        while self._layers:
            vars(self._layers.pop()).pop(_ACTIVATE, None)


@contextmanager
def _activate(layer: Any, active_adapters: Sequence[str]) -> Iterator[None]:
    """Apply the active adapters to the layer's parameter.

    See [Note: parametrized in a forward].
    """
    base, name = layer.get_base_layer(), layer.parameter_name
    activated = type(layer)._activate_lora(layer, active_adapters)
    if not isinstance(base._parameters, ParameterMap):  # a deep copy, or a closed engine
        with activated:
            yield
        return
    stand_in = nn.Module()
    # `.data` has a separate version: torch sets the tensor to itself, which counts as an edit.
    values = nn.Parameter(getattr(base, name).data, requires_grad=False)
    stand_in.register_parameter(name, values)
    vars(layer)[_BASE] = lambda: stand_in
    try:
        with activated:
            proxies: Any = ()
            if is_parametrized(stand_in, name):
                proxies = stand_in.get_submodule(f"parametrizations.{name}").children()
            with base._parameters.changed(name, list(proxies)):
                yield
    finally:
        del vars(layer)[_BASE]
