"""peft adapters over a model with frozen weights."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from torch import nn

from infinity.errors import ConfigError, first_lines, listed
from infinity.integrations.huggingface.packages import package
from infinity.train.settings import ALL_LINEAR, AdapterSection


def adapted(model: nn.Module, section: AdapterSection) -> nn.Module:
    """Return the peft model that freezes the weights of `model` and adds trained adapters.

    Raises `ConfigError` if a target matches nothing or peft is not installed.
    """
    _check_parameters(model, section.target_parameters)
    peft = package("peft")
    base: Any = model
    base.name_or_path = base.config.name_or_path  # peft saves it as the base of its adapters
    targets = ALL_LINEAR if ALL_LINEAR in section.targets else list(section.targets)
    lora_config = peft.LoraConfig(
        r=section.r,
        lora_alpha=2 * section.r if section.alpha is None else section.alpha,
        lora_dropout=section.dropout,
        target_modules=targets,
        target_parameters=list(section.target_parameters) or None,
        task_type="CAUSAL_LM",
    )
    try:
        peft_model = peft.get_peft_model(model, lora_config)
    except ValueError as error:
        linear_names = [
            name.rpartition(".")[2]
            for name, module in model.named_modules()
            if getattr(module, "weight", None) is not None
            and module.weight.dim() == 2
            and not isinstance(module, nn.Embedding)
        ]
        raise ConfigError(
            f"adapter.targets: {targets} cannot be adapted",
            because=first_lines(error),
            remedy=f"all-linear, or a list of {', '.join(sorted(set(linear_names)))}",
        ) from error
    assert isinstance(peft_model, nn.Module)
    return peft_model.train()


def _check_parameters(model: nn.Module, suffixes: Sequence[str]) -> None:
    """Raise `ConfigError` unless each name is a suffix of a parameter that peft can adapt."""
    adaptable = [name for name, p in model.named_parameters() if p.dim() in (2, 3)]
    missing = [
        suffix for suffix in suffixes if not any(f".{n}".endswith(f".{suffix}") for n in adaptable)
    ]
    if not missing:
        return
    stacks = [re.sub(r".*\.\d+\.", "", n) for n, p in model.named_parameters() if p.dim() == 3]
    unique_stacks = list(dict.fromkeys(stacks))
    raise ConfigError(
        f"adapter.target_parameters: {listed(missing)}: the model has no such parameter of two or "
        "three dimensions",
        because=f"its parameters of three dimensions are {listed(unique_stacks, 8)}"
        if unique_stacks
        else "it has no parameters of three dimensions: no experts that are one stack",
        remedy=f"adapter.target_parameters: [{', '.join(unique_stacks[:4])}]"
        if unique_stacks
        else "leave it out; adapter.targets adapts linear layers",
    )
