"""Choice of an update rule for a torch optimizer: built-in, adapted, or rejected.

Used by `initialize` and by the integrations, whose trainers pass an optimizer.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from infinity.config.schema import Config, load_config
from infinity.errors import ConfigError
from infinity.optim.offloaded import mark_stepped, refuse_hooks
from infinity.optim.rules import RULES, decay_variant

Groups = list[dict[str, Any]]

_RULE_NAMES: dict[type, str] = {
    getattr(torch.optim, name): name for name, rule in RULES.items() if rule.in_torch
}
_MUON = getattr(torch.optim, "Muon", None)  # since torch 2.9
# Options that select torch's implementation of a rule; they do not change the rule.
_IMPLEMENTATION_OPTIONS = ("fused", "foreach", "capturable", "differentiable")
# Options without a counterpart in the built-in rules, which have the behavior of these values.
_FIXED_OPTIONS = {"amsgrad": False, "adjust_lr_fn": None}


@dataclass(frozen=True, slots=True)
class OptimizerChoice:
    """Optimizer arguments of `initialize`.

    `optimizer` is None if `config` names a built-in rule. `groups` is None if `optimizer` is an
    instance, whose groups are used.
    """

    config: Config
    groups: Groups | None
    optimizer: Any = None


def choose_optimizer(config: Config, given: Any, groups: Any) -> OptimizerChoice:
    """Return the choice for `initialize(optimizer=given, model_parameters=groups)`.

    torch's AdamW, Adam, SGD and Adagrad, as an instance or a class, are replaced by the built-in
    rules with the same settings, and so is an instance of its Muon. The class Muon is not: it
    rejects models with parameters other than matrices, for which there is `optimizer.type: Muon`.
    Any other `given` is returned unchanged, as is any at all if `config` sets an optimizer option
    other than `moments`.
    """
    given_class = given if isinstance(given, type) else type(given)
    has_rule = given_class in _RULE_NAMES or type(given) is _MUON
    if not has_rule or config.optimizer.model_fields_set - {"moments"}:
        return OptimizerChoice(config, groups, given)
    if not isinstance(given, type):
        return choose_instance(config, given, named=False)
    defaults = {
        name: parameter.default
        for name, parameter in inspect.signature(given_class).parameters.items()
        if parameter.default is not parameter.empty
    }
    rule = _rule_of(given_class, defaults)
    assert rule is not None, "torch's rule with torch's defaults is a built-in one"
    return OptimizerChoice(_with_rule(config, *rule), groups)


def choose_class(
    config: Config, kind: Any, options: Mapping[str, Any], groups: Groups
) -> OptimizerChoice:
    """Return the choice for a class and its arguments.

    They are those of `Trainer.get_optimizer_cls_and_kwargs`. Groups in `options`, under the names
    that `Trainer.create_optimizer` reads, replace `groups`. Raises `ConfigError` for an optimizer
    that is not made from parameter groups (one per layer, one that takes the model, ...).
    """
    is_class = isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
    options = dict(options)
    for name in ("params", "optimizer_dict") if is_class else ():
        if _are_groups(options.get(name), kind):
            groups = options.pop(name)
    model_keys = [name for name in ("params", "model", "optimizer_dict") if name in options]
    if not is_class or model_keys:
        raise ConfigError(
            f"the optimizer {getattr(kind, '__name__', kind)} selects parameters from the model",
            because="the engine steps one tile of any parameter at a time",
            remedy='optim="adamw_torch"',
        )
    rule = _rule_of(kind, options)
    if rule is None:
        return OptimizerChoice(without_optimizer(config), groups, lambda gs: kind(gs, **options))
    name, parameters = rule
    defaults = {"weight_decay": 0.0, **parameters}
    return OptimizerChoice(_with_rule(config, name, defaults), groups)


def _are_groups(given: Any, kind: type) -> bool:
    """Return True for parameter groups whose entries are arguments of the class, or names."""
    if not isinstance(given, list | tuple):
        return False
    known = {"params", "param_names", *inspect.signature(kind).parameters}
    return all(isinstance(g, Mapping) and "params" in g and known.issuperset(g) for g in given)


def choose_instance(
    config: Config, given: torch.optim.Optimizer, *, named: bool
) -> OptimizerChoice:
    """Return the choice for an optimizer instance over the model's parameters.

    The engine uses its groups, the same objects, so that schedules over it keep working. Raises
    `ConfigError` if the configuration names an optimizer too (`named`), or if the instance has
    hooks or has stepped.
    """
    if named:
        raise ConfigError(
            f"two optimizers: {type(given).__name__} was given, and the configuration names "
            f"{config.optimizer.type}",
            remedy="leave optimizer.type out of the configuration, or give no object",
        )
    refuse_hooks(given)
    # Adagrad's constructor makes state, at step 0.
    if any(float(state.get("step", 1)) > 0 for state in given.state.values()):
        raise ConfigError(
            f"{type(given).__name__} was given with state of {len(given.state)} parameters",
            because="it has stepped; its state cannot be taken over",
            remedy="give a new one",
        )
    # Entries that others add to a group, such as a name or the limits of a schedule, are ignored.
    options_of = [{k: v for k, v in g.items() if k in given.defaults} for g in given.param_groups]
    rules = [_rule_of(type(given), options) for options in options_of]
    first = rules[0] if rules else None
    if first is None or any(rule is None or rule[0] != first[0] for rule in rules):
        return OptimizerChoice(without_optimizer(config), None, given)
    if first[0] == "Muon":
        for group in given.param_groups:
            group["use_muon"] = True  # also embeddings, if the instance has them
            group["adjust_lr_fn"] = group["adjust_lr_fn"] or "original"  # torch's default
    return OptimizerChoice(_with_rule(config, *first), given.param_groups)


def adopt_scheduler(scheduler: Any, given: torch.optim.Optimizer) -> None:
    """Use a scheduler that was made over `given` for the engine, which has the same groups.

    Raises `ConfigError` if it was made over another optimizer.
    """
    if getattr(scheduler, "optimizer", None) is not given:
        raise ConfigError(
            "optimizers=(optimizer, scheduler): the scheduler was made over another optimizer",
            remedy="make it over the optimizer that is given with it",
        )
    mark_stepped(given)


def _rule_of(kind: type, options: Mapping[str, Any]) -> tuple[str, dict[str, Any]] | None:
    """Return the (name, options) of the built-in rule for a torch optimizer, or None."""
    name = "Muon" if kind is _MUON else _RULE_NAMES.get(kind)
    if name is None:
        return None
    if "decoupled_weight_decay" in options:
        name = decay_variant(name, decoupled=bool(options["decoupled_weight_decay"]))
    defaults = RULES[name].defaults()
    rule_options = {}
    for key, value in options.items():
        if key in _FIXED_OPTIONS and value == _FIXED_OPTIONS[key]:
            continue
        if key in defaults:
            rule_options[key] = value
        elif key not in (*_IMPLEMENTATION_OPTIONS, "decoupled_weight_decay"):
            return None
    if any(isinstance(value, torch.Tensor) for value in rule_options.values()):
        return None
    return name, rule_options


def _with_rule(config: Config, name: str, parameters: Mapping[str, Any]) -> Config:
    raw = without_optimizer(config).model_dump(exclude_unset=True)
    rule = {**raw.get("optimizer", {}), "type": name, **parameters}
    return load_config({**raw, "optimizer": rule})


def without_optimizer(config: Config) -> Config:
    """Return the config without its optimizer section.

    `moments` stays: `initialize` raises for it if an optimizer is passed.
    """
    raw = config.model_dump(exclude_unset=True)
    section = {k: v for k, v in raw.pop("optimizer", {}).items() if k == "moments"}
    return load_config({**raw, "optimizer": section} if section else raw)
