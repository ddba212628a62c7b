"""DeepSpeed's `zero`: building models without memory, and full values of parameters.

[Note: marks]
Scripts ask a parameter whether its values are away: `hasattr(p, "ds_id")`, `p.ds_status`. So those
of a `DeepSpeedEngine` have `ds_id`, `ds_numel`, `ds_shape`, and a status that is `NOT_AVAILABLE`
but in a block of `GatheredParameters`: elsewhere values come where a module uses them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from enum import Enum, IntEnum
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

import infinity.model.meta_init as materialize
from infinity.config.schema import load_config
from infinity.deepspeed.config import find_translation
from infinity.deepspeed.names import getter
from infinity.engine import Engine
from infinity.errors import ConfigError, ResidencyError
from infinity.model.offloaded_parameter import engine_of


class ZeroParamType(Enum):
    """Where a parameter's values may rest: here all are `NORMAL`."""

    NORMAL = 1
    PARTITIONED = 2
    REMOTE = 3


class ZeroParamStatus(Enum):
    """Whether a parameter holds its full value now."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3

    def __reduce_ex__(self, protocol: Any) -> tuple[type, tuple[()]]:
        return set, ()  # what torch's safe loader knows: a parameter that is pickled has its value

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self


class ZeroStageEnum(IntEnum):
    """What DeepSpeed's stages share between GPUs; here all of it is shared at any."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3


def mark(parameters: Iterable[nn.Parameter]) -> None:
    """Answer what scripts ask of parameters: see the note."""
    for number, parameter in enumerate(parameters):
        vars(parameter).update(
            ds_id=number,
            ds_numel=parameter.numel(),
            ds_shape=parameter.shape,
            ds_status=ZeroParamStatus.NOT_AVAILABLE,
        )


def unmark(parameters: Iterable[nn.Parameter]) -> None:
    """Take the answers back."""
    for parameter in parameters:
        for name in ("ds_id", "ds_numel", "ds_shape", "ds_status"):
            vars(parameter).pop(name, None)


def is_zero_param(parameter: Any) -> bool:
    """Whether an engine has the parameter's values."""
    return hasattr(parameter, "ds_id")


class Init:
    """`infinity.Init` with DeepSpeed's arguments: `with zero.Init(): model = Build()`.

    Where parameters go is said to `initialize`, so `remote_device`, `pin_memory` and process groups
    change nothing. Values are made in the dtype they are written in and rounded once, so `dtype`
    changes nothing either. `module`: a model that is built already stays as it is, `initialize`
    takes it over. With `enabled=False`, and inside another such block, nothing happens; nor where
    transformers asks, which fills the model in RAM right after. A model of its that RAM cannot
    hold: `infinity.from_pretrained`. `tensor_overrides` are for what DeepSpeed patches in torch.
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
            "mpu": mpu is not None,
            "zero_quantized_weights": zero_quantized_weights,
            "zero_quantized_nontrainable_weights": zero_quantized_nontrainable_weights,
        }
        for name in (name for name, given in refused.items() if given):
            raise ConfigError(
                f"zero.Init({name}=...) is not supported",
                because="it is for several processes",
                remedy="leave it out",
            )
        source = config_dict_or_path if config_dict_or_path is not None else config
        self._seed = None if source is None else _seed_in(source)
        self._enabled = enabled and not _is_transformers(source)
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
    """In the block these parameters hold full values; edits are kept, on all ranks.

    `params` is a parameter, several of them, or a module's `parameters()`. Other tensors, and
    parameters of an outer block, are left as they are. Leaving the block writes edits where they
    rest: those of `modifier_rank`, on all ranks, also of parameters that no engine owns yet; where
    that is None, all ranks make the same. Values are in the dtype that is computed in; for fp32
    masters use `engine.materialized(params, master=True)`.

    Raises `ResidencyError` for parameters that have no values yet, and `ConfigError` in a forward
    that has a backward: the block would lend values until its end, and backward comes later.
    """

    def __init__(
        self,
        params: Tensor | Iterable[Tensor],
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        given = [params] if isinstance(params, Tensor) else list(params)
        self._params = given if enabled else []
        self._modifier_rank = modifier_rank
        self._owned: list[tuple[Engine, list[nn.Parameter]]] = []
        self._undo = ExitStack()

    def __enter__(self) -> Self:
        owned: dict[int, tuple[Engine, list[nn.Parameter]]] = {}
        for parameter in {id(p): p for p in self._params}.values():
            engine = engine_of(parameter)
            if isinstance(engine, Engine) and isinstance(parameter, nn.Parameter):
                if torch.is_grad_enabled() and engine._parts.hooks.saved.depth:
                    raise _in_a_forward(parameter)
                if not engine.is_materialized(parameter):
                    owned.setdefault(id(engine), (engine, []))[1].append(parameter)
            elif parameter.is_meta:
                raise ResidencyError(
                    f"a parameter of shape {tuple(parameter.shape)} has no values yet",
                    because="its model was built without memory",
                    remedy="call infinity.initialize(model, ...) first, or edit values inside the "
                    "`with zero.Init()` block",
                )
        with ExitStack() as undo:
            for engine, parameters in owned.values():
                undo.enter_context(engine.materialized(parameters))
                undo.enter_context(_available(parameters))
            self._owned, self._undo = list(owned.values()), undo.pop_all()
        return self

    def __exit__(self, *exc_info: Any) -> None:
        if exc_info[0] is not None:
            self._undo.__exit__(*exc_info)
            return
        with self._undo:
            for engine, parameters in self._owned:
                if self._modifier_rank is not None:
                    _share_values(engine, parameters, self._modifier_rank)
        many = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        if many and self._modifier_rank is not None:
            gpu = dist.get_backend() == "nccl"
            for parameter in self._params:
                if engine_of(parameter) is None:
                    value = parameter.detach()
                    sent = value.cuda() if gpu else value
                    dist.broadcast(sent, self._modifier_rank)
                    value.copy_(sent)


def _in_a_forward(parameter: nn.Parameter) -> ConfigError:
    return ConfigError(
        f"zero.GatheredParameters of a parameter of shape {tuple(parameter.shape)} in a forward "
        "that has a backward",
        because="the block lends values until its end, and backward comes later; without it they "
        "are fetched where they are used, then too",
        remedy="leave the block out; where a library opens it at stage 3, as TRL does around a "
        'loss, write "stage": 2 in zero_optimization: offload_param works there too',
    )


def _share_values(engine: Engine, parameters: list[nn.Parameter], source: int) -> None:
    """Make values that are at hand, on all ranks, those of one: each writes a shard of its own."""
    if engine.ranks.count > 1:
        engine.ranks.meet("leaves gathered parameters")
        for parameter in parameters:
            value = parameter.detach().cpu().contiguous()
            engine.ranks.broadcast(value.view(-1).view(torch.uint8), source)
            parameter.detach().copy_(value)


@contextmanager
def _available(parameters: list[nn.Parameter]) -> Iterator[None]:
    """Marked parameters say in the block that they hold values."""
    marked = [parameter for parameter in parameters if is_zero_param(parameter)]
    for parameter in marked:
        vars(parameter)["ds_status"] = ZeroParamStatus.AVAILABLE
    try:
        yield
    finally:
        for parameter in marked:
            vars(parameter)["ds_status"] = ZeroParamStatus.NOT_AVAILABLE


@contextmanager
def unwrap_model_for_generation(model: Any) -> Iterator[Any]:
    """The engine's module, as it is: it generates between steps, and weights are brought to it."""
    yield getattr(model, "module", model)


def _is_transformers(source: Any) -> bool:
    """Whether this is the configuration that transformers builds its models with."""
    found = sys.modules.get("transformers.integrations.deepspeed")
    return found is not None and source is not None and found.deepspeed_config() is source


def _seed_in(source: Any) -> int | None:
    """The seed in a configuration of ours, or in the section of ours in one of DeepSpeed's."""
    translation = find_translation(source, lenient=True)
    return (load_config(source) if translation is None else translation.config).seed


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Nothing to do: a parameter is fetched wherever it is used. Wrong types are refused."""
    if not isinstance(module, nn.Module) or not isinstance(parameter, nn.Parameter):
        raise ConfigError(
            f"a module and a parameter were expected, got {type(module).__name__} and "
            f"{type(parameter).__name__}"
        )


unregister_external_parameter = register_external_parameter


__getattr__ = getter("zero")
