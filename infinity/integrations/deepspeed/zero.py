"""DeepSpeed's `zero` module: building models without memory, gathering full parameter values.

[Note: DeepSpeed attributes]
Scripts check whether a parameter is offloaded: `hasattr(p, "ds_id")`, `p.ds_status`. Parameters of
a `DeepSpeedEngine` therefore have `ds_id`, `ds_numel`, `ds_shape` and `ds_status`. The status is
`AVAILABLE` in a block of `GatheredParameters` and `NOT_AVAILABLE` otherwise: outside the block
values are fetched when a module uses them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from enum import Enum
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

import infinity.model.meta_init as materialize
from infinity.config.schema import load_config
from infinity.engine import Engine
from infinity.errors import ConfigError, ResidencyError
from infinity.integrations.deepspeed.config import find_translation
from infinity.integrations.deepspeed.names import getter
from infinity.integrations.deepspeed.processes import get_world_size
from infinity.model.offloaded_parameter import engine_of


class ZeroParamStatus(Enum):
    """Availability of the full value of a parameter."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3

    def __reduce_ex__(self, protocol: Any) -> tuple[type, tuple[()]]:
        return set, ()  # loadable with weights_only=True; a pickled parameter holds its full value

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self


def mark(parameters: Iterable[nn.Parameter]) -> None:
    """Set the attributes that scripts read; see [Note: DeepSpeed attributes]."""
    for number, parameter in enumerate(parameters):
        vars(parameter).update(
            ds_id=number,
            ds_numel=parameter.numel(),
            ds_shape=parameter.shape,
            ds_status=ZeroParamStatus.NOT_AVAILABLE,
        )


def unmark(parameters: Iterable[nn.Parameter]) -> None:
    """Remove the attributes that `mark` has set."""
    for parameter in parameters:
        for name in ("ds_id", "ds_numel", "ds_shape", "ds_status"):
            vars(parameter).pop(name, None)


def is_zero_param(parameter: Any) -> bool:
    """Return True if the parameter belongs to an engine.

    Arguments are DeepSpeed's.
    """
    return hasattr(parameter, "ds_id")


class Init:
    """Context manager that builds a model without memory, as `infinity.Init`.

    It has no effect inside another such block, nor if transformers opens it: transformers loads the
    weights into RAM right after. A transformers model larger than RAM needs
    `infinity.from_pretrained`. `initialize` decides the placement. Values are created in the dtype
    of the model's code and rounded once.

    Args:
        config_dict_or_path: A configuration; only its `seed` is used.
        config: Earlier name of `config_dict_or_path`.
        enabled: If False, the block has no effect.
        mpu: Must be None; quantization must be off.

    Other arguments are accepted for compatibility and have no effect.

    Raises:
        ConfigError: `mpu` or quantization is requested.

    Example:
        >>> with zero.Init():
        ...     model = Model()
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: Any = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: Any = None,
        config: Any = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: Any = None,
        zero_param_parallel_group: Any = None,
        zero_quantized_weights: bool = False,
        zero_quantized_nontrainable_weights: bool = False,
        sequence_data_parallel_group: Any = None,
        param_swapper: Any = None,
        tensor_overrides: Any = None,
    ) -> None:
        refused = {
            "mpu": (mpu is not None, "the model is sharded over all processes", "leave it out"),
            "zero_quantized_weights": (
                zero_quantized_weights,
                "weights are not quantized in communication",
                "leave it out",
            ),
            "zero_quantized_nontrainable_weights": (
                zero_quantized_nontrainable_weights,
                "the engine quantizes frozen weights when it is created",
                "set zero_optimization.zero_quantized_nontrainable_weights in the configuration",
            ),
        }
        for name, (is_given, reason, remedy) in refused.items():
            if is_given:
                what = f"zero.Init({name}=...) is not supported"
                raise ConfigError(what, because=reason, remedy=remedy)
        source = config_dict_or_path if config_dict_or_path is not None else config
        self._seed: int | None = None
        self._enabled = enabled
        if source is not None:
            translation = find_translation(source, lenient=True, ranks=get_world_size())
            self._seed = (load_config(source) if translation is None else translation.config).seed
            integration: Any = sys.modules.get("transformers.integrations.deepspeed")
            if integration is not None and integration.deepspeed_config() is source:
                self._enabled = False  # transformers opens the block with this object
        self._undo = ExitStack()

    def __enter__(self) -> Self:
        if self._enabled and not materialize.is_building():
            if self._seed is not None:
                torch.manual_seed(self._seed)
            self._undo.enter_context(materialize.Init())
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self._undo.__exit__(*exc_info)


class GatheredParameters:
    """Context manager in which parameters hold their full values; edits are written back on exit.

    Values are in the compute dtype; for fp32 masters use `engine.materialized(params,
    master=True)`.

    Args:
        params: A parameter, several, or `module.parameters()`. Parameters that an
            outer block has gathered are left to that block.
        modifier_rank: Rank whose values are broadcast to all ranks on exit, also for parameters
            without an engine. None: all ranks make the same edits.
        enabled: If False, the block has no effect.

    Other arguments are accepted for compatibility and have no effect.

    Raises:
        ResidencyError: A parameter has no values yet.
        ConfigError: The block is entered in a forward with autograd enabled; backward would need
            the values after the end of the block.
    """

    def __init__(
        self,
        params: Tensor | Iterable[Tensor],
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        tensors = [params] if isinstance(params, Tensor) else list(params)
        self._params = tensors if enabled else []
        self._modifier_rank = modifier_rank
        self._gathered: list[tuple[Engine, list[nn.Parameter]]] = []
        self._undo = ExitStack()

    def __enter__(self) -> Self:
        gathered: dict[int, tuple[Engine, list[nn.Parameter]]] = {}
        for parameter in {id(p): p for p in self._params}.values():
            engine = engine_of(parameter)
            if isinstance(engine, Engine) and isinstance(parameter, nn.Parameter):
                if torch.is_grad_enabled() and engine._components.hooks.saved.depth:
                    raise ConfigError(
                        "zero.GatheredParameters of a parameter of shape "
                        f"{tuple(parameter.shape)} in a forward that has a backward",
                        because="values are available until the end of the block, but backward "
                        "needs them later; without the block they are fetched on use, in backward "
                        "too",
                        remedy="remove the block; where a library opens it at stage 3, as TRL does "
                        'around a loss, write "stage": 2 in zero_optimization: offload_param works '
                        "at stage 2 too",
                    )
                if not engine.is_materialized(parameter):
                    gathered.setdefault(id(engine), (engine, []))[1].append(parameter)
            elif parameter.is_meta:
                raise ResidencyError(
                    f"a parameter of shape {tuple(parameter.shape)} has no values yet",
                    because="its model was built without memory",
                    remedy="call infinity.initialize(model, ...) first, or edit values inside the "
                    "`with zero.Init()` block",
                )
        with ExitStack() as undo:
            for engine, parameters in gathered.values():
                undo.enter_context(engine.materialized(parameters))
                for parameter in filter(is_zero_param, parameters):
                    facts = vars(parameter)
                    facts["ds_status"] = ZeroParamStatus.AVAILABLE
                    undo.callback(facts.update, ds_status=ZeroParamStatus.NOT_AVAILABLE)
            self._gathered, self._undo = list(gathered.values()), undo.pop_all()
        return self

    def __exit__(self, *exc_info: Any) -> None:
        if exc_info[0] is not None:
            self._undo.__exit__(*exc_info)
            return
        with self._undo:
            for engine, parameters in self._gathered:
                if self._modifier_rank is not None:
                    _broadcast_values(engine, parameters, self._modifier_rank)
        is_distributed = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        if is_distributed and self._modifier_rank is not None:
            uses_nccl = dist.get_backend() == "nccl"
            for parameter in self._params:
                if engine_of(parameter) is None:
                    value = parameter.detach()
                    buffer = value.cuda() if uses_nccl else value
                    dist.broadcast(buffer, self._modifier_rank)
                    value.copy_(buffer)


def _broadcast_values(engine: Engine, parameters: list[nn.Parameter], source: int) -> None:
    """Broadcast materialized values from rank `source`; each rank then writes back its shard."""
    if engine.ranks.count > 1:
        engine.ranks.synchronize("leaves gathered parameters")
        for parameter in parameters:
            value = parameter.detach().cpu().contiguous()
            engine.ranks.broadcast(value.view(-1).view(torch.uint8), source)
            parameter.detach().copy_(value)


@contextmanager
def unwrap_model_for_generation(model: Any) -> Iterator[Any]:
    """Yield the module of an engine, for generation between steps; weights are prefetched.

    Arguments are DeepSpeed's.
    """
    yield getattr(model, "module", model)


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Check the types of the arguments; registration is not needed to fetch a parameter.

    Raises `ConfigError` unless they are a module and a parameter. Arguments are DeepSpeed's.
    """
    if not isinstance(module, nn.Module) or not isinstance(parameter, nn.Parameter):
        raise ConfigError(
            f"a module and a parameter were expected, got {type(module).__name__} and "
            f"{type(parameter).__name__}"
        )


unregister_external_parameter = register_external_parameter


__getattr__ = getter("runtime.zero")
