"""`initialize` with DeepSpeed's arguments and configurations."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch import nn

from infinity._initialize import initialize as initialize_engine
from infinity._initialize import starting
from infinity.config.schema import Config
from infinity.config.settings import Settings
from infinity.distributed.context import DistContext
from infinity.engine import Engine
from infinity.errors import ConfigError
from infinity.integrations.deepspeed.accelerate_state import check_accelerate
from infinity.integrations.deepspeed.engine import DeepSpeedEngine
from infinity.integrations.deepspeed.processes import init_distributed
from infinity.integrations.deepspeed.settings import DeepSpeedSettings, read_settings
from infinity.integrations.deepspeed.watched_engine import watch
from infinity.model.partitioner import UnitSpec
from infinity.optim.adapter_probe import OptimizerMaker
from infinity.optim.offloaded import OffloadedOptimizer
from infinity.storage.device import Device
from infinity.training.initial_write import Progress

_INFINITY_ORDER = ("model", "config")
_DEEPSPEED_ORDER = (
    "args", "model", "optimizer", "model_parameters", "training_data", "lr_scheduler",
    "distributed_port", "mpu", "dist_init_required", "collate_fn", "config", "mesh_param",
    "config_params",
)  # fmt: skip
_UNSUPPORTED = {
    "mpu": "it selects the processes that share a model; here the model is sharded over all",
    "mesh_param": "it arranges processes in a mesh; here the model is sharded over all",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepSpeedArguments:
    """Arguments of `initialize` by name: infinity's and DeepSpeed's.

    Attributes:
        args: Result of a parser; `args.deepspeed_config` may be the path of the configuration.
        config_params: Alias of `config` in DeepSpeed.
        distributed_port, dist_init_required: Ignored.
        mpu, mesh_param: Not supported; None.
    """

    model: nn.Module
    args: Any = None
    optimizer: torch.optim.Optimizer | OptimizerMaker | None = None
    model_parameters: Iterable[Any] | None = None
    training_data: Any = None
    lr_scheduler: Any = None
    distributed_port: Any = None
    mpu: Any = None
    dist_init_required: Any = None
    collate_fn: Callable[..., Any] | None = None
    config: Config | Settings | Mapping[str, Any] | str | Path | None = None
    mesh_param: Any = None
    config_params: Config | Mapping[str, Any] | str | Path | None = None
    batch_size: int | None = None
    units: Sequence[UnitSpec] | None = None
    device: Device | torch.device | str | None = None
    progress: Progress | None = None
    engine_class: type[Engine] | None = None
    ranks: DistContext | None = None

    @classmethod
    def of(cls, positional: Sequence[Any], named: Mapping[str, Any]) -> DeepSpeedArguments:
        """Assign the arguments of a call to names.

        If the first positional argument is a module, the order is (model, config), else
        DeepSpeed's. Raises `ConfigError` for too many arguments, an argument passed twice, a
        missing model, and arguments that are not supported.
        """
        order = (
            _INFINITY_ORDER
            if positional and isinstance(positional[0], nn.Module)
            else _DEEPSPEED_ORDER
        )
        if len(positional) > len(order):
            raise ConfigError(
                f"initialize() got {len(positional)} positional arguments; the order "
                f"is {', '.join(order)}",
                remedy="pass keyword arguments: initialize(model=..., config=...)",
            )
        given = dict(named)
        for name in given.keys() - {field.name for field in fields(cls)}:
            raise TypeError(f"initialize() got an unexpected keyword argument {name!r}")
        for name, value in zip(order, positional, strict=False):
            if given.get(name) is not None:
                raise ConfigError(
                    f"initialize() got {name} twice: as a positional and as a keyword argument",
                    because=f"the positional order is {', '.join(order)}",
                    remedy="pass keyword arguments: initialize(model=..., config=...)",
                )
            given[name] = value
        for name, reason in _UNSUPPORTED.items():
            if given.get(name) is not None:
                raise ConfigError(
                    f"initialize({name}=...) is not supported",
                    because=reason,
                    remedy="leave it out",
                )
        model = given.get("model")
        if not isinstance(model, nn.Module):
            kind = type(model).__name__
            got = "no model" if model is None else f"a {kind} where the model belongs"
            raise ConfigError(
                f"initialize() got {got}",
                because=f"the positional order is {', '.join(order)}" if positional else None,
                remedy="initialize(model=..., config=...), with a torch.nn.Module",
            )
        return cls(**given)


@wraps(initialize_engine)
def initialize(*positional: Any, **named: Any) -> tuple[Engine, OffloadedOptimizer, Any, Any]:
    """Call infinity's `initialize`; arguments and configuration may be DeepSpeed's.

    Args:
        *positional: ``model, config``, or DeepSpeed's ``args, model, optimizer, ...``.
        **named: Fields of `DeepSpeedArguments`.

    Returns:
        ``(engine, optimizer, dataloader, scheduler)``.
    """
    given = DeepSpeedArguments.of(positional, named)
    with starting(given.ranks) as (ranks, _):
        check_accelerate(ranks)
        settings = read_settings(
            given.config, given.config_params, given.args, given.batch_size, given.optimizer,
            given.lr_scheduler, given.model_parameters, ranks.count,
        )  # fmt: skip
    translation = settings.translation if isinstance(settings, DeepSpeedSettings) else None
    logger = logging.getLogger("infinity")
    if translation is not None and not ranks.rank and logger.isEnabledFor(logging.INFO):
        logger.info("%s", translation.describe())
    deepspeed_inputs = (translation, given.args, given.config_params)
    default = Engine if all(value is None for value in deepspeed_inputs) else DeepSpeedEngine
    engine_class = given.engine_class or default
    result = initialize_engine(
        given.model,
        replace(settings, shuffles=issubclass(engine_class, DeepSpeedEngine)),
        optimizer=given.optimizer,
        model_parameters=given.model_parameters,
        training_data=given.training_data,
        lr_scheduler=given.lr_scheduler,
        collate_fn=given.collate_fn,
        units=given.units,
        device=given.device,
        progress=given.progress,
        engine_class=engine_class,
        ranks=ranks,
    )
    if isinstance(engine := result[0], DeepSpeedEngine):
        with ExitStack() as undo:
            undo.callback(engine.close)
            with ranks.collective_section("initialize()"):
                watch(engine)
            undo.pop_all()
        if hasattr(given.args, "local_rank"):  # -1 if no launcher passed it
            given.args.local_rank = ranks.local_rank
    return result


def initialize_deepspeed(*args: Any, **kwargs: Any) -> tuple[Engine, OffloadedOptimizer, Any, Any]:
    """Call `initialize` and return a `DeepSpeedEngine` for a configuration of either format.

    Initializes torch's default process group first if a launcher started this process.
    """
    init_distributed()
    return initialize(*args, **{"engine_class": DeepSpeedEngine, **kwargs})
