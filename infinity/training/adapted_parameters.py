"""peft's adapters of single parameters (`target_parameters`), over offloaded ones.

[Note: parametrized in a forward]
In every forward peft parametrizes the adapted parameter: `torch.nn.utils.parametrize` deletes it
from its module, changes the module's class, and undoes both afterwards. An engine holds the
parameters of its module and refuses that. So peft gets a stand-in module with the resident values,
which it parametrizes in place of the real one, and its parametrization is applied to what the real
module's attribute gives, once a forward. Which parametrization that is remains peft's choice.
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
    """Lets peft's layers of adapted parameters compute in a module that an engine owns."""

    def __init__(self, module: nn.Module) -> None:
        # Without an imported peft there are no adapters of it.
        kind = getattr(sys.modules.get("peft.tuners.lora.layer"), "ParamWrapper", ())
        self._layers = [layer for layer in module.modules() if isinstance(layer, kind)]
        for layer in self._layers:
            # Bound, so that a deep copy of the layer activates itself and not this one.
            vars(layer)[_ACTIVATE] = MethodType(_activate, layer)

    def remove(self) -> None:
        """Leave the layers as they were."""
        while self._layers:
            vars(self._layers.pop()).pop(_ACTIVATE, None)


@contextmanager
def _activate(layer: Any, active_adapters: Sequence[str]) -> Iterator[None]:
    """Add the adapters to the layer's parameter; see [Note: parametrized in a forward]."""
    base, name = layer.get_base_layer(), layer.parameter_name
    activated = type(layer)._activate_lora(layer, active_adapters)
    if not isinstance(base._parameters, ParameterMap):  # of a copy, or after the end
        with activated:
            yield
        return
    stand_in = nn.Module()
    # `.data`, for a version of its own: torch sets it to itself, which counts as an edit.
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
