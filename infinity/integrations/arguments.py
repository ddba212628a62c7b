"""`initialize`'s arguments in either order: ours, or DeepSpeed's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from infinity.errors import ConfigError

_OURS = ("model", "config")
_DEEPSPEED = (
    "args", "model", "optimizer", "model_parameters", "training_data", "lr_scheduler",
    "distributed_port", "mpu", "dist_init_required", "collate_fn", "config", "mesh_param",
    "config_params",
)  # fmt: skip
_REFUSED = {
    "mpu": "it says which processes share a model; there is one process",
    "mesh_param": "it lays processes out in a mesh; there is one process",
}


def sort_arguments(positional: tuple[Any, ...], named: Mapping[str, Any]) -> dict[str, Any]:
    """All arguments by name. `named` holds what came by name, None where nothing did.

    A first positional argument that is a module begins our order (model, config), anything else
    DeepSpeed's. Raises `ConfigError` for too many, for one given twice, for no model, and for
    what only several processes can mean.
    """
    given = dict(named)
    order = _OURS if positional and isinstance(positional[0], nn.Module) else _DEEPSPEED
    if len(positional) > len(order):
        raise ConfigError(
            f"initialize() got {len(positional)} arguments without a name; in this order there are "
            f"{', '.join(order)}",
            remedy="pass all by name: initialize(model=..., config=...)",
        )
    for name, value in zip(order, positional, strict=False):
        if given.get(name) is not None:
            raise ConfigError(
                f"initialize() got {name} twice: by its place, and by its name",
                because=f"without names the order is {', '.join(order)}",
                remedy="pass all by name: initialize(model=..., config=...)",
            )
        given[name] = value
    for name, reason in _REFUSED.items():
        if given.get(name) is not None:
            raise ConfigError(
                f"initialize({name}=...) is not supported", because=reason, remedy="leave it out"
            )
    model = given.get("model")
    if not isinstance(model, nn.Module):
        got = "no model" if model is None else f"a {type(model).__name__} where the model belongs"
        raise ConfigError(
            f"initialize() got {got}",
            because=f"without names the order is {', '.join(order)}" if positional else None,
            remedy="initialize(model=..., config=...), with a torch.nn.Module",
        )
    return given
