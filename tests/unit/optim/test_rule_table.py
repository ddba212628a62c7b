"""Tests that kernels, configurations, torch and DeepSpeed agree with the table of rules."""

from __future__ import annotations

import pytest
import torch
from support import reference
from support.adam_values import BY_KERNEL, hypers_of, update_piece
from support.trainer import same_bits
from torch import nn

import infinity._adam as _adam
from infinity.config.schema import load_config
from infinity.integrations.deepspeed.config import translate_deepspeed
from infinity.optim.cpu import CpuKernels
from infinity.optim.from_torch import choose_class
from infinity.optim.moments import Moment
from infinity.optim.rules import RULES, decay_variant
from infinity.optim.update import BuiltInRule
from infinity.types import MomentFormat

KERNELS = {rule_params.kernel for rule in BY_KERNEL.values() for rule_params in hypers_of(rule)}


def test_kernels_match_native_and_reference() -> None:
    assert set(_adam.rules()) == KERNELS == set(reference._KERNELS)


@pytest.mark.parametrize("name", RULES)
def test_config_accepts_each_rule(name: str) -> None:
    config = load_config({"optimizer": {"type": name.upper(), "lr": 0.5}})
    assert config.optimizer.type == name
    assert config.optimizer.parameters() == {**RULES[name].defaults(), "lr": 0.5}
    entries = {key for rule in RULES.values() for key in rule.defaults()}
    for other in entries - RULES[name].defaults().keys():
        assert getattr(config.optimizer, other) is None


@pytest.mark.parametrize("name", [name for name, rule in RULES.items() if rule.in_torch])
def test_names_and_defaults_match_torch(name: str) -> None:
    """Names of group options and states match; torch classes select the same rule."""
    rule, kind = RULES[name], getattr(torch.optim, name)
    for rule_params in hypers_of(rule):
        parameter = nn.Parameter(torch.ones(3))
        entries = {key: getattr(rule_params, key) for key in rule.defaults()}
        optimizer = kind([parameter], **entries)
        parameter.grad = torch.ones(3)
        optimizer.step()
        made = {key for key, value in optimizer.state[parameter].items() if value is not None}
        assert made == {*rule.state_names[: rule_params.num_moments], *["step"] * rule.counts}
    torch_defaults = kind([parameter]).defaults
    assert {key: torch_defaults[key] for key in rule.defaults()} == rule.defaults()
    chosen = choose_class(load_config({}), kind, {"lr": 0.5}, []).config.optimizer
    assert (chosen.type, chosen.parameters()["lr"]) == (name, 0.5)


@pytest.mark.parametrize("name", [n for n, rule in RULES.items() if rule.deepspeed is not None])
def test_deepspeed_config_accepts_each_rule(name: str) -> None:
    section = {"type": name, "params": {"lr": 0.5, "adam_w_mode": False}}
    if RULES[name].decoupled is None:
        del section["params"]["adam_w_mode"]
    config = {"train_batch_size": 1, "optimizer": section}
    found = translate_deepspeed(config).config.optimizer
    assert found.type == name
    rates = dict.fromkeys(RULES[name].deepspeed_keys.get("lr", ("lr",)), 0.5)
    start = load_config({"optimizer": {"type": name, **RULES[name].deepspeed, **rates}})
    assert found.parameters() == start.optimizer.parameters()


@pytest.mark.parametrize("kind", MomentFormat)
@pytest.mark.parametrize("name", BY_KERNEL)
def test_rule_steps_match_reference_for_every_format(name: str, kind: MomentFormat) -> None:
    """Moments are reserved by rule and format, and steps are bitwise those of the reference."""
    rule = BuiltInRule(name, kind)
    for rule_params in hypers_of(RULES[name]):
        group = {key: getattr(rule_params, key) for key in rule_params.defaults()}
        rule.reserve([group])
        assert rule.capture(group) == rule_params
        assert len(rule.moments) == rule_params.num_moments
        begins = zip(rule_params.initial, rule_params.nonnegative, strict=True)
        assert all(nonnegative or not value for value, nonnegative in begins)
        tensors = []
        for step in (_step, reference.reference_update):
            weight, gradient = torch.linspace(-1, 1, 300), torch.linspace(2, -3, 300)
            moments = [Moment.zeros(300, form) for form in rule.moments]
            for number in (1, 2):
                step(weight, None, moments, gradient, rule_params, number, key=number)
            tensors.append([weight, *(moment.values for moment in moments)])
        assert all(same_bits(*pair) for pair in zip(*tensors, strict=True))


def _step(*args: object, **options: object) -> None:
    with CpuKernels(1) as kernels:
        update_piece(kernels, *args, **options)


def test_twin_of_switches_weight_decay() -> None:
    assert decay_variant("Adam", decoupled=True) == "AdamW"
    assert decay_variant("AdamW", decoupled=False) == "Adam"
    for name in ("AdamW", "SGD", "Lion"):
        assert decay_variant(name, decoupled=True) == name
