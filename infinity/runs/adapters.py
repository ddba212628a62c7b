"""Adapters of peft over a model whose weights are frozen."""

from __future__ import annotations

import importlib
from typing import Any

from torch import nn

from infinity.errors import ConfigError, first_lines
from infinity.runs.settings import ALL_LINEAR, AdapterSection


def peft() -> Any:
    """Return the module peft; raises `ConfigError` if it is not installed."""
    try:
        return importlib.import_module("peft")
    except ImportError as error:
        raise ConfigError(
            f"adapters need the package peft: {error}", remedy="pip install 'torch-infinity[hf]'"
        ) from error


def adapted(model: nn.Module, section: AdapterSection) -> nn.Module:
    """A model whose weights are frozen, with adapters of peft that are trained.

    Raises `ConfigError` where there is nothing to adapt, or no peft.
    """
    library = peft()
    base: Any = model
    base.name_or_path = base.config.name_or_path  # what peft notes down as the base of its adapters
    targets = ALL_LINEAR if ALL_LINEAR in section.targets else list(section.targets)
    wanted = library.LoraConfig(
        r=section.r,
        lora_alpha=2 * section.r if section.alpha is None else section.alpha,
        lora_dropout=section.dropout,
        target_modules=targets,
        task_type="CAUSAL_LM",
    )
    try:
        made = library.get_peft_model(model, wanted)
    except ValueError as error:
        linear = [
            name.rpartition(".")[2]
            for name, module in model.named_modules()
            if getattr(module, "weight", None) is not None
            and module.weight.dim() == 2
            and not isinstance(module, nn.Embedding)
        ]
        raise ConfigError(
            f"adapter.targets: {targets} cannot be adapted",
            because=first_lines(error),
            remedy=f"all-linear, or a list of {', '.join(sorted(set(linear)))}",
        ) from error
    assert isinstance(made, nn.Module)
    return made.train()
