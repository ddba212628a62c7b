"""Construction of the engine's optimizer from a config or from an optimizer that was passed."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from infinity.common.sizes import format_count
from infinity.config.schema import Config
from infinity.errors import ConfigError, InfinityWarning
from infinity.model.partition import complete_groups
from infinity.optim.adapter_probe import OptimizerMaker, probe_optimizer
from infinity.optim.adapter_rule import AdapterRule
from infinity.optim.offloaded import OffloadedOptimizer, refuse_hooks
from infinity.optim.rules import RULES, SGD
from infinity.optim.standalone import built_in_optimizer
from infinity.optim.update import BuiltInRule
from infinity.types import MomentFormat

_TRAINABLE = (torch.float32, torch.float16, torch.bfloat16)


def make_optimizer(
    model: nn.Module,
    config: Config,
    model_parameters: Iterable[Any] | None,
    given: torch.optim.Optimizer | OptimizerMaker | None = None,
    *,
    trains: bool = True,
) -> OffloadedOptimizer:
    """Make `engine.optimizer` over the given parameters or groups, else over all that require grad.

    `given` is the `optimizer` argument of `initialize`; if None, the config's rule is used,
    over no parameters if `trains` is False, or if `model_parameters` is None and no parameter
    requires grad.
    """
    settings = config.optimizer
    if model_parameters is not None:
        model_parameters = list(model_parameters)
        for group in (g for g in model_parameters if isinstance(g, dict)):
            if not isinstance(group["params"], nn.Parameter):  # an iterator can be read only once
                group["params"] = list(group["params"])
    if isinstance(given, torch.optim.Optimizer):
        refuse_hooks(given)
        model_parameters = given.param_groups
    if model_parameters is None or not trains:
        groups: list[Any] = [p for p in model.parameters() if p.requires_grad] if trains else []
        if not groups and given is None:
            rule = BuiltInRule(SGD.__name__)
            empty_group = {**SGD.defaults(), "params": []}
            return OffloadedOptimizer([empty_group], {}, rule=rule)
    else:
        groups = model_parameters
    parameters = _parameters_of(groups)
    if not parameters:
        raise ConfigError(
            "there is no parameter for the optimizer",
            remedy="call requires_grad_(True) on the parameters to train before initialize()",
        )
    _warn_if_mostly_frozen(parameters)
    names = {id(p): name for name, p in model.named_parameters()}
    for parameter in parameters:
        if id(parameter) not in names:
            raise ConfigError(
                f"{'model_parameters' if given is None else 'the optimizer'} has a parameter of "
                f"shape {tuple(parameter.shape)} that the model does not have",
                because="it is another model's, or was replaced since the optimizer was made",
                remedy="make the optimizer of the parameters of the model that you pass"
                + (
                    "; to train two models with one optimizer, put both into one module"
                    if any(id(p) in names for p in parameters)
                    else ""
                ),
            )
        if parameter.dtype not in _TRAINABLE:
            kind = "trained" if parameter.requires_grad else "frozen"
            raise ConfigError(
                f"the {kind} parameter {names[id(parameter)]!r} has dtype {parameter.dtype}, and "
                "is in the optimizer",
                remedy="train float32, bfloat16 or float16 parameters; freeze the others, and pass "
                "the optimizer [p for p in model.parameters() if p.requires_grad]",
            )
    if given is None:
        rule = BuiltInRule(settings.type, MomentFormat(settings.moments))
        if not isinstance(groups[0], dict):
            groups = [{"params": groups}]
        groups = complete_groups(model, config, groups)
        defaults = settings.parameters() if RULES[settings.type].kernel else {}
        return OffloadedOptimizer(groups, defaults, rule=rule)
    if settings.model_fields_set:
        raise ConfigError(
            "the config has an optimizer section, but initialize() got an optimizer as well",
            because=f"optimizer.{sorted(settings.model_fields_set)[0]} would not be used",
            remedy="leave one of them out",
        )
    if groups and not isinstance(groups[0], dict):
        groups = [{"params": groups}]
    optimizer = built_in_optimizer(given, groups)
    if optimizer is not None:
        return optimizer
    facts = probe_optimizer(given, groups)
    return OffloadedOptimizer(facts.groups, facts.defaults, rule=AdapterRule(facts))


def _warn_if_mostly_frozen(parameters: Sequence[nn.Parameter]) -> None:
    """Warn if most parameters of the optimizer are frozen, since their state is reserved too."""
    frozen = sum(p.numel() for p in parameters if not p.requires_grad)
    trained = sum(p.numel() for p in parameters) - frozen
    if frozen > trained:
        warnings.warn(
            f"{format_count(frozen)} of the optimizer's {format_count(frozen + trained)} "
            "parameters are frozen; their optimizer state is reserved, since they may be unfrozen "
            "later. To avoid that, pass [p for p in model.parameters() if p.requires_grad]",
            InfinityWarning,
            stacklevel=6,
        )


def _parameters_of(groups: Iterable[Any]) -> list[Any]:
    """Return the parameters of a list of parameters or groups."""
    return [p for g in groups for p in (g["params"] if isinstance(g, dict) else [g])]


def check_parameters_match(
    given: torch.optim.Optimizer, model_parameters: Iterable[Any] | None
) -> None:
    """Raise `ConfigError` unless the optimizer holds exactly these parameters."""
    if model_parameters is None:
        return
    held = {id(p) for p in _parameters_of(given.param_groups)}
    passed = {id(p): p for p in _parameters_of(model_parameters)}
    missing = [p for key, p in passed.items() if key not in held and p.requires_grad]
    extra = held - passed.keys()
    if missing or extra:
        raise ConfigError(
            f"the optimizer holds {len(held)} parameters, model_parameters are {len(passed)}: "
            f"{len(missing)} that require grad are not in the optimizer, {len(extra)} of the "
            "optimizer not in model_parameters",
            remedy="leave model_parameters out, or give optimizer=lambda groups: ...",
        )
