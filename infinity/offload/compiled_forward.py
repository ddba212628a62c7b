"""A block's forward, compiled by torch, while its weights come and go.

[Note: compiled blocks]
Hooks stay outside: what is compiled is the block's own `forward`. While it runs, the block's
modules have plain dicts of parameters, which the compiler knows; the parameters in them are
inputs of the graph, guarded by shape and dtype and not by address, so that weights in another
slot are no reason to compile again, and blocks of one kind share one graph. Graphs of CUDA,
which do hold addresses, are refused. A block with parameters of other units inside (experts,
tied weights) cannot be run so, since these are fetched as they are reached for.
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
    """`forward` of a module, compiled when it is first called; `options` are torch.compile's.

    `read` gives a parameter as a slice is to see it.
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
        self._owned = [
            (part, part._parameters, dict[str, Any](part._parameters))
            for part in module.modules()
            if isinstance(part._parameters, ParameterMap)
        ]
        self._run: Callable[..., Any] = torch.compile(forward, **options)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run it; raises `TrainingError` where the compiler breaks the graph."""
        try:
            for part, owned, plain in self._owned:
                for name, parameter in owned.items():
                    plain[name] = None if parameter is None else self._read(parameter)
                part.__dict__["_parameters"] = plain
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
            for part, owned, plain in self._owned:
                part.__dict__["_parameters"] = owned
                plain.update(owned)  # taps are views of slots


def check_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options for `torch.compile`, with one graph a block; raises `ConfigError` for CUDA graphs."""
    chosen = {"fullgraph": True, **options}
    inner = chosen.get("options") or {}
    if chosen.get("mode") in _WITH_CUDA_GRAPHS or inner.get("triton.cudagraphs"):
        raise ConfigError(
            "blocks cannot be compiled with CUDA graphs",
            because="a graph replays addresses, and weights are in another place every time",
            remedy='use mode="default" or "max-autotune-no-cudagraphs"',
        )
    return chosen
