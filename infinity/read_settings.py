"""What `initialize` is told: its arguments by name, and a configuration of ours or DeepSpeed's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from infinity.config.schema import Config, load_config
from infinity.deepspeed.config import Translation, find_translation
from infinity.errors import ConfigError

_OURS = ("model", "config")
_DEEPSPEED = (
    "args", "model", "optimizer", "model_parameters", "training_data", "lr_scheduler",
    "distributed_port", "mpu", "dist_init_required", "collate_fn", "config", "mesh_param",
    "config_params",
)  # fmt: skip
_REFUSED = {
    "mpu": "it says which processes share a model; here all share all of it",
    "mesh_param": "it lays processes out in a mesh; here all share all of the model",
}


@dataclass(frozen=True, slots=True)
class Settings:
    """A configuration of ours, and what a DeepSpeed configuration says beside it.

    `translation` is None where ours was given. `batch_size` is that of a loader, in samples.
    """

    config: Config
    translation: Translation | None
    batch_size: int
    drop_last: bool
    given: Any = None  # the configuration as it came

    @property
    def trains(self) -> bool:
        """False for a DeepSpeed configuration with nothing that would train."""
        return self.translation is None or self.translation.trains


def read_settings(
    config: Any,
    config_params: Any = None,
    args: Any = None,
    batch_size: int | None = None,
    optimizer: Any = None,
    lr_scheduler: Any = None,
    model_parameters: Any = None,
    ranks: int = 1,
) -> Settings:
    """Read `initialize`'s configuration, whichever argument it came by.

    `config` and `config_params` are a `Config`, a dict, a path, or a text; `args` is what a parser
    made, whose `deepspeed_config` is a path. `batch_size`, `optimizer` and `lr_scheduler`, where
    they are given, win over the configuration's. Without `optimizer` and `model_parameters` a
    DeepSpeed configuration need not say how to train: then `trains` is false. Its batch sizes are
    those of `ranks` processes. `Settings` that were
    read before are returned as they are. Raises `ConfigError` for no configuration, for several
    that differ, and for what is wrong in it.
    """
    if isinstance(config, Settings):
        return config
    ways = {
        "config": config,
        "config_params": config_params,
        "args.deepspeed_config": getattr(args, "deepspeed_config", None),
    }
    given = {name: value for name, value in ways.items() if value is not None}
    if not given:
        raise ConfigError(
            "initialize() got no configuration",
            remedy='after the model: initialize(model, config={"optimizer": {"lr": 1e-4}}), or the '
            "path of a file",
        )
    first, *others = given.values()
    if any(other is not first and other != first for other in others):
        raise ConfigError(
            f"initialize() got several configurations: {', '.join(given)}",
            remedy="keep one of them",
        )
    found = find_translation(
        first,
        client_optimizer=optimizer is not None,
        client_scheduler=lr_scheduler is not None,
        may_infer=(model_parameters is None or model_parameters == []) and optimizer is None,
        ranks=ranks,
    )
    if found is None:
        size = 1 if batch_size is None else batch_size
        return Settings(load_config(first), None, size, False, first)
    size = found.batch_size if batch_size is None else batch_size
    return Settings(found.config, found, size, found.drop_last, first)


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
