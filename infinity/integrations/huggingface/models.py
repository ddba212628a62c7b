"""Engines for transformers models whose weights are read or initialized directly on their tiers."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from infinity.config.schema import Config
from infinity.distributed.launch import find_ranks
from infinity.engine import Engine
from infinity.errors import ConfigError
from infinity.integrations.deepspeed.arguments import initialize
from infinity.integrations.deepspeed.settings import read_settings
from infinity.integrations.huggingface.build import AnyConfig, build_model, load_model
from infinity.optim.offloaded import OffloadedOptimizer

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
    """Load a pretrained transformers model and make an engine for it.

    Weights are read from the files one tensor at a time, directly to their tiers. RAM holds one
    tensor, and the source tensors of a fused one (experts). The module is in eval mode, as in
    transformers: call `engine.train()`.

    Args:
        source: A directory with a config.json and safetensors, or a Hub id.
        config: Configuration of the engine, as for `initialize`.
        model_class: A class of transformers or its name, such as
            ``"AutoModelForSequenceClassification"``. Default: the saved class.
        model_config: A transformers config that replaces the config.json.
        model_kwargs: Arguments of the model's own `from_pretrained`, such as `attn_implementation`.
        revision: Revision of a Hub repository.
        prepare: Called with the model before the engine is created, for freezing or adapters:
            ``lambda model: peft.get_peft_model(model, peft_config)``. May return another module.
        **arguments: Other arguments of `initialize`.

    Returns:
        ``(engine, optimizer, loader, scheduler)``, as `initialize`.

    Raises:
        ConfigError: Files, model and configuration do not match.
        MachineError: The Hub does not provide the files.
    """
    options = {"model_config": model_config, "revision": revision}
    build = partial(
        load_model, source, model_class=model_class, model_kwargs=model_kwargs, **options
    )
    return _initialize(build, config, prepare, arguments)


def from_config(
    source: Any,
    config: AnyConfig = None,
    *,
    model_class: Any = None,
    model_kwargs: Mapping[str, Any] | None = None,
    prepare: Prepare | None = None,
    **arguments: Any,
) -> tuple[Engine, OffloadedOptimizer, Any, Any]:
    """Make an engine for a transformers model with random weights, without building it in RAM.

    The values are bitwise equal to an ordinary build with the seed of the configuration.

    Args:
        source: A transformers config, a mapping like a config.json, or a directory or Hub id with
            one.
        config: Configuration of the engine, as for `initialize`.
        model_class: A class of transformers or its name. Default: that of the config.
        model_kwargs: Arguments of the model's own `from_config`.
        prepare: Called with the model before the engine is created; may return another module.
        **arguments: Other arguments of `initialize`.

    Returns:
        ``(engine, optimizer, loader, scheduler)``, as `initialize`.
    """
    build = partial(build_model, source, model_class=model_class, model_kwargs=model_kwargs)
    return _initialize(build, config, prepare, arguments)


def _initialize(
    build: Callable[..., nn.Module],
    config: AnyConfig,
    prepare: Prepare | None,
    arguments: dict[str, Any],
) -> tuple[Engine, OffloadedOptimizer, Any, Any]:
    if prepare is not None and not callable(prepare):  # before anything is read or built
        raise ConfigError(
            f"prepare is {prepare!r}, which cannot be called",
            remedy="prepare=lambda model: peft.get_peft_model(model, peft_config), say",
        )
    # Other sources of the configuration. Resolved here, so not passed on to `initialize`.
    config_sources = [arguments.pop(name, None) for name in ("config_params", "args")]
    names = ("batch_size", "optimizer", "lr_scheduler", "model_parameters")
    settings_arguments: dict[str, Any] = {name: arguments.get(name) for name in names}
    arguments["ranks"] = ranks = arguments.get("ranks") or find_ranks()
    with ExitStack() as cleanup:
        cleanup.callback(ranks.close)
        with ranks.collective_section("builds the model"):
            settings = read_settings(
                config, *config_sources, **settings_arguments | {"ranks": ranks.count}
            )
            model = build(config=settings.config)
            prepared = prepare(model) if prepare is not None else None
            settings = replace(settings, config=choose_logits(model, settings.config))
        cleanup.pop_all()
    return initialize(model if prepared is None else prepared, settings, **arguments)


def choose_logits(model: nn.Module, config: Config) -> Config:
    """Return the configuration, with chunked logits if the model is or wraps a causal LM."""
    auto_models = importlib.import_module("transformers.models.auto.modeling_auto")
    causal_names = set(auto_models.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    classes = (cls for module in model.modules() for cls in type(module).__mro__)
    return (
        config.with_chunked_logits()
        if any(cls.__name__ in causal_names for cls in classes)
        else config
    )
