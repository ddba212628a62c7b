"""The built-in rules by their names in the config: hyper-parameters of groups, and what they keep.

Without torch: `infinity plan` asks what a rule keeps, and runs none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from infinity.formats import MomentFormat
from infinity.optim.rules import AdagradHyper, AdamHyper, Hyper, LionHyper, SgdHyper
from infinity.plan.plan import RuleFacts


def hyper_of(rule: str, group: Mapping[str, Any]) -> Hyper:
    """The hyper-parameters a group holds now; raises `ConfigError` for what makes no sense."""
    maximize = bool(group["maximize"])
    lr, weight_decay = float(group["lr"]), float(group["weight_decay"])
    if rule in ("AdamW", "Adam"):
        beta1, beta2 = map(float, group["betas"])
        return AdamHyper(
            lr, beta1, beta2, float(group["eps"]), weight_decay, rule == "AdamW", maximize
        )
    if rule == "Lion":
        beta1, beta2 = map(float, group["betas"])
        return LionHyper(lr, beta1, beta2, weight_decay, maximize)
    if rule == "SGD":
        momentum, dampening = float(group["momentum"]), float(group["dampening"])
        return SgdHyper(lr, momentum, dampening, weight_decay, bool(group["nesterov"]), maximize)
    initial = float(group["initial_accumulator_value"])
    eps = float(group["eps"])
    return AdagradHyper(lr, float(group["lr_decay"]), weight_decay, eps, initial, maximize)


def reserved_moments(
    rule: str, groups: Sequence[Mapping[str, Any]], form: MomentFormat
) -> tuple[MomentFormat, ...]:
    """A format for each moment of the group that needs the most of them."""
    return (form,) * max((hyper_of(rule, group).num_moments for group in groups), default=0)


def lossy_notes(form: MomentFormat) -> tuple[str, ...]:
    """What a plan must say of moments in this format."""
    if form.is_exact:
        return ()
    return (f"moments are stored in {form.value}: lossy, not what fp32 gives",)


def rule_facts(rule: str, groups: Sequence[Mapping[str, Any]], form: MomentFormat) -> RuleFacts:
    """What the plan needs to know of a built-in rule over these groups."""
    moments = reserved_moments(rule, groups, form)
    return RuleFacts(name=rule, moments=moments, notes=lossy_notes(form))
