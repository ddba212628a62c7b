"""Reference training in fp16 with plain torch: fp32 masters, fp16 weights and a loss scale.

It does not use the engine. `closed_form_scale` computes the loss scale from the history of
overflows, instead of a state updated at each step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch
from support.models import Batch
from support.reference import reference_update
from support.slices import taken
from support.trainer import (
    Result,
    TorchOptimizerMasters,
    _settings,
    cast_frozen,
    fresh_moments,
    rules_by_parameter,
    square_sums,
    stacks_of,
    torch_groups,
)
from torch import Tensor, nn

from infinity.config.schema import Config
from infinity.optim.moments import Moment
from infinity.optim.rules import RuleParams
from infinity.optim.update import rounding_key


@dataclass(frozen=True)
class LossScaleSettings:
    """Settings of the loss scale, with DeepSpeed's semantics."""

    initial: float = 2.0**16
    window: int = 1000
    hysteresis: int = 2
    consecutive: bool = False
    minimum: float = 1.0
    static: float = 0.0


def closed_form_scale(settings: LossScaleSettings, overflows: Sequence[bool]) -> float:
    """Return the loss scale after steps, given which of them overflowed.

    A run of n good steps has (n - 1) // window doublings, because the first of it does not count.
    An overflow halves the scale if it is at least the hysteresis-th since the last doubling, or
    with `consecutive` since the last good step.
    """
    if settings.static:
        return settings.static
    scale, impatience = settings.initial, 0
    for overflow, run in groupby(overflows):
        count = len(list(run))
        if not overflow:
            doublings = (count - 1) // settings.window
            scale *= 2.0**doublings
            if doublings or settings.consecutive:
                impatience = 0
            continue
        for _ in range(count):
            impatience += 1
            if impatience >= settings.hysteresis:
                scale = max(scale / 2, settings.minimum)
    return scale


@dataclass
class _Half:
    """State of one trained parameter, besides its fp16 weight."""

    parameter: nn.Parameter
    name: str
    rule_params: RuleParams
    master: Tensor
    moments: list[Moment]
    gradient: Tensor | None = None
    step: int = 0


@dataclass
class HalfResult(Result):
    """Result with the loss scale of each step, and which steps were skipped."""

    scales: list[float] = field(default_factory=list)
    overflows: list[bool] = field(default_factory=list)


def train_half(
    model: nn.Module,
    batches: Sequence[Batch],
    config: Mapping[str, Any],
    scale_settings: LossScaleSettings,
    *,
    groups: Callable[[nn.Module], list[dict[str, Any]]] | None = None,
    by_torch: bool = False,
    make_optimizer: Callable[[list[dict[str, Any]]], torch.optim.Optimizer] | None = None,
) -> HalfResult:
    """Train with fp16 forward and backward and the reference update of fp32 masters.

    The engine must equal it bit for bit. With `by_torch` gradients are unscaled, clipped by
    `clip_grad_norm_` and applied by torch's AdamW instead.
    """
    settings = _settings(config)
    micro_batches = settings.gradient_accumulation_steps
    summed = micro_batches > 1 or settings.activations.slices > 1
    dtype = torch.float32 if summed else torch.float16
    cast_frozen(model, torch.float16)
    stepped = (
        None
        if make_optimizer is None
        else TorchOptimizerMasters(make_optimizer, torch_groups(model, groups))
    )
    halves, stacks = _halves(model, settings, groups), stacks_of(model)
    for half in halves:
        half.parameter.data = half.master.to(torch.float16).view(half.parameter.shape)
        _collect(half, dtype)
    update = _ByTorch(halves, settings) if by_torch else _Exactly(settings, stepped)
    result = HalfResult([], {}, [])
    for index, batch in enumerate(batches):
        scale = closed_form_scale(scale_settings, result.overflows)
        loss = batch.call(model)
        (loss.float() * scale / micro_batches).backward()
        result.losses.append(loss.item())
        if (index + 1) % micro_batches:
            continue
        active = [half for half in halves if half.gradient is not None]
        total = 0.0
        for half in active:  # not `sum`, which rounds differently from Python 3.12 on
            assert half.gradient is not None
            for squares in square_sums(half.gradient, half.parameter, stacks):
                total += squares
        norm = math.sqrt(total) / scale
        result.norms.append(norm)
        result.scales.append(scale)
        result.overflows.append(not math.isfinite(norm))
        if math.isfinite(norm):
            update(active, norm, scale)
        for half in halves:
            half.gradient = None
    result.masters = {name: v.detach().clone() for name, v in model.state_dict().items()}
    by_id = {id(half.parameter): half for half in halves}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in by_id:
            result.masters[name] = by_id[id(parameter)].master.clone().view(parameter.shape)
    return result


class _Exactly:
    """Update as in the engine: one factor for clipping and the scale, applied in the update."""

    def __init__(self, settings: Config, stepped: TorchOptimizerMasters | None) -> None:
        self.settings = settings
        self.stepped = stepped

    def __call__(self, active: Sequence[_Half], norm: float, scale: float) -> None:
        clipping = self.settings.gradient_clipping
        factor = min(1.0, clipping / (norm + 1e-6)) if clipping else 1.0
        if self.stepped is not None:
            gradients = {id(h.parameter): h.gradient for h in active if h.gradient is not None}
            self.stepped.step(gradients, factor / scale)
            for half in active:
                half.master.copy_(self.stepped.masters[id(half.parameter)].detach().reshape(-1))
                half.parameter.data.view(-1).copy_(half.master)
            return
        for half in active:
            assert half.gradient is not None
            half.step += 1
            key = rounding_key(self.settings.seed or 0, half.name, half.step)
            weight = half.parameter.data.view(-1)
            reference_update(weight, half.master, half.moments, half.gradient, half.rule_params,
                             half.step, factor / scale, key)  # fmt: skip


class _ByTorch:
    """Update as written by users of torch: unscale, clip, step, copy to fp16."""

    def __init__(self, halves: Sequence[_Half], settings: Config) -> None:
        self.bound = settings.gradient_clipping or math.inf
        self.masters = {id(half): nn.Parameter(half.master) for half in halves}
        options = settings.optimizer.parameters()
        groups = [
            {
                "params": [self.masters[id(half)]],
                "lr": half.rule_params.lr,
                "weight_decay": half.rule_params.weight_decay,
            }
            for half in halves
        ]
        self.optimizer = torch.optim.AdamW(groups, **options, foreach=False, fused=False)

    def __call__(self, active: Sequence[_Half], norm: float, scale: float) -> None:
        masters = [self.masters[id(half)] for half in active]
        for half, master in zip(active, masters, strict=True):
            assert half.gradient is not None
            master.grad = half.gradient.float() / scale
        total_norm = nn.utils.clip_grad_norm_(masters, self.bound, foreach=False)
        torch.testing.assert_close(total_norm.item(), norm, rtol=1e-5, atol=0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        for half in active:
            half.parameter.data.view(-1).copy_(half.master)


def _halves(
    model: nn.Module,
    settings: Config,
    groups: Callable[[nn.Module], list[dict[str, Any]]] | None,
) -> list[_Half]:
    """Return the trained parameters in the model's order."""
    params_by_index = rules_by_parameter(model, settings, groups)
    halves = []
    for name, parameter in model.named_parameters():
        if id(parameter) in params_by_index:
            master = parameter.detach().float().reshape(-1).clone()
            rule_params = params_by_index[id(parameter)]
            moments = fresh_moments(rule_params, master.numel(), settings)
            halves.append(_Half(parameter, name, rule_params, master, moments))
    return halves


def _collect(half: _Half, dtype: torch.dtype) -> None:
    """Accumulate gradients in `dtype` by a hook."""

    def accumulate(parameter: Tensor) -> None:
        flat = taken(parameter).reshape(-1).to(dtype)
        half.gradient = flat.clone() if half.gradient is None else half.gradient + flat

    half.parameter.register_post_accumulate_grad_hook(accumulate)
