"""DeepSpeed's `zero`: building models without memory, and full values of parameters."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any, Self

import torch
from torch import Tensor, nn

import infinity.model.meta_init as materialize
from infinity.config.schema import load_config
from infinity.deepspeed.config import find_translation
from infinity.engine import Engine
from infinity.errors import ConfigError, ResidencyError
from infinity.model.parameters import engine_of


class Init:
    """`infinity.Init` with DeepSpeed's arguments: `with zero.Init(): model = Build()`.

    Where parameters go is said to `initialize`, so `remote_device`, `pin_memory` and process groups
    change nothing. Values are made in the dtype they are written in and rounded once, so `dtype`
    changes nothing either. `module`: a model that is built already stays as it is, `initialize`
    takes it over. With `enabled=False`, and inside another such block, nothing happens.
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
        self._enabled = enabled
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
    """In the block these parameters hold full values; edits are kept, whatever `modifier_rank`.

    `params` is a parameter, several of them, or a module's `parameters()`. Tensors that no engine
    owns, and parameters of an outer block, are left as they are. Leaving the block writes edits
    where they rest. Values are in the dtype that is computed in; for fp32 masters use
    `engine.materialized(params, master=True)`.

    Raises `ResidencyError` for parameters that have no values yet.
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
        self._undo = ExitStack()

    def __enter__(self) -> Self:
        owned: dict[int, tuple[Engine, list[nn.Parameter]]] = {}
        for parameter in {id(p): p for p in self._params}.values():
            engine = engine_of(parameter)
            if isinstance(engine, Engine) and isinstance(parameter, nn.Parameter):
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
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self._undo.__exit__(*exc_info)


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
