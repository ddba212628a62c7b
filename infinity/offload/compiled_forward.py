"""Forward of a block, compiled by torch while its weights move between slots.

[Note: compiled blocks]
Only the block's `forward` is compiled; hooks stay outside. While it runs, the block's modules have
plain dicts of parameters, which the compiler supports. The parameters in them are graph inputs,
guarded by shape and dtype and not by address, so weights in another slot cause no recompilation,
and blocks of one class share a graph. CUDA graphs, which do hold addresses, are rejected. A block
that contains parameters of other units (experts, tied weights) cannot be compiled, since these are
fetched on attribute access.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from infinity.errors import ConfigError, TrainingError, first_lines
from infinity.model.parameter_map import ParameterMap

_WITH_CUDA_GRAPHS = ("reduce-overhead", "max-autotune")


class CompiledForward:
    """`forward` of a module, compiled at its first call with `options` of `torch.compile`.

    `read` returns the tensor to use for a parameter: while a slice runs, a gradient-capturing view.
    """

    def __init__(
        self,
        module: nn.Module,
        name: str,
        forward: Callable[..., Any],
        read: Callable[[nn.Parameter], Tensor],
        options: Mapping[str, Any],
    ) -> None:
        self._name = name
        self._read = read
        self._parameter_dicts = [
            (submodule, submodule._parameters, dict[str, Any](submodule._parameters))
            for submodule in module.modules()
            if isinstance(submodule._parameters, ParameterMap)
        ]
        self._run: Callable[..., Any] = torch.compile(forward, **options)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the compiled forward; raise `TrainingError` if the compiler rejects it."""
        try:
            for submodule, parameters, plain_parameters in self._parameter_dicts:
                for name, parameter in parameters.items():
                    plain_parameters[name] = None if parameter is None else self._read(parameter)
                submodule.__dict__["_parameters"] = plain_parameters
            return self._run(*args, **kwargs)
        except Exception as error:
            if type(error).__module__ != "torch._dynamo.exc":
                raise
            raise TrainingError(
                f"block {self._name!r} cannot be compiled: {first_lines(error)}",
                because="the whole forward of a block must be one graph",
                remedy="leave compile out, or change the block as advised by the error above",
            ) from error
        finally:
            for submodule, parameters, plain_parameters in self._parameter_dicts:
                submodule.__dict__["_parameters"] = parameters
                plain_parameters.update(parameters)  # drops taps, which are views of slots


def check_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options with `fullgraph` on by default; raise `ConfigError` for CUDA graphs."""
    merged = {"fullgraph": True, **options}
    inductor_options = merged.get("options") or {}
    if merged.get("mode") in _WITH_CUDA_GRAPHS or inductor_options.get("triton.cudagraphs"):
        raise ConfigError(
            "blocks cannot be compiled with CUDA graphs",
            because="a graph replays addresses, and weights are in another place every time",
            remedy='use mode="default" or "max-autotune-no-cudagraphs"',
        )
    return merged
