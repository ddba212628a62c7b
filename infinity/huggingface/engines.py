"""`from_pretrained` and `from_config`: from a Hugging Face model to an engine."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from infinity.engine import Engine
from infinity.errors import ConfigError
from infinity.huggingface.models import AnyConfig, build_model, load_model
from infinity.optim.offloaded import OffloadedOptimizer
from infinity.read_settings import Settings, read_settings
from infinity.startup import initialize

Prepare = Callable[[Any], nn.Module | None]


def from_pretrained(
    source: str | os.PathLike[str],
    config: AnyConfig = None,
    *,
    model_class: Any = None,
    model_config: Any = None,
    model_kwargs: Mapping[str, Any] | None = None,
    revision: str | None = None,
    prepare: Prepare | None = None,
    **arguments: Any,
) -> tuple[Engine, OffloadedOptimizer, Any, Any]:
    """A pretrained transformers model, trained by an engine: `(engine, optimizer, loader,
    scheduler)` as `initialize` returns them.

    `source` is a directory with a config.json and safetensors, or a Hub id. Weights go from the
    files to their homes one at a time: RAM holds one tensor, and of fused ones (experts) its parts
    beside it. `engine.module` is the transformers model, in eval mode as there: `engine.train()`.

    `model_class`: a class of transformers or its name, `AutoModelForSequenceClassification` say;
    without it, the class that was saved. `model_config` replaces the config.json; `model_kwargs`
    go to the model's own `from_pretrained` (`attn_implementation`, ...). `prepare(model)` is
    called before the engine takes over, and may return another module: freezing, adapters
    (`lambda model: peft.get_peft_model(model, peft_config)`). All other arguments, and `config`,
    are those of `initialize`.
    """
    _check_prepare(prepare)
    told = _read(config, arguments)
    model = load_model(
        source,
        told.config,
        model_class=model_class,
        model_config=model_config,
        model_kwargs=model_kwargs,
        revision=revision,
    )
    return initialize(_prepared(model, prepare), told, **arguments)


def from_config(
    source: Any,
    config: AnyConfig = None,
    *,
    model_class: Any = None,
    model_kwargs: Mapping[str, Any] | None = None,
    prepare: Prepare | None = None,
    **arguments: Any,
) -> tuple[Engine, OffloadedOptimizer, Any, Any]:
    """A new transformers model with random weights, never whole in RAM; see `from_pretrained`.

    `source` is a transformers config, a dict as in a config.json, or a directory or Hub id with
    one. The values are those of an ordinary build with the config's `seed`, bit for bit.
    """
    _check_prepare(prepare)
    told = _read(config, arguments)
    model = build_model(source, told.config, model_class=model_class, model_kwargs=model_kwargs)
    return initialize(_prepared(model, prepare), told, **arguments)


def _read(config: AnyConfig, arguments: dict[str, Any]) -> Settings:
    """What `initialize` would be told; takes the arguments that told it out of `arguments`."""
    ways = [arguments.pop(name, None) for name in ("config_params", "args")]
    names = ("batch_size", "optimizer", "lr_scheduler", "model_parameters")
    return read_settings(config, *ways, **{name: arguments.get(name) for name in names})


def _check_prepare(prepare: Any) -> None:
    """Before anything is read or built."""
    if prepare is not None and not callable(prepare):
        raise ConfigError(
            f"prepare is {prepare!r}, which cannot be called",
            remedy="prepare=lambda model: peft.get_peft_model(model, peft_config), say",
        )


def _prepared(model: nn.Module, prepare: Prepare | None) -> nn.Module:
    made = prepare(model) if prepare is not None else None
    return model if made is None else made
