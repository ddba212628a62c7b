"""Computation of the experts of transformers models by ranges of experts.

transformers 5 stores the experts of a layer as stacked tensors (`gate_up_proj`, `down_proj`) and
looks up their implementation in a registry. This module adds an entry that uses the products of
`grouped_mm` and is bitwise equal to it: the product of an expert's tokens does not depend on the
other experts. Only `grouped_mm`, the default, is replaced. Biases (one row per expert) remain in
the unit of their layer.

The config that selects the entry may be shared with other models: modules without an engine are
computed by `grouped_mm`, and the last engine to close restores the config.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache, partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from infinity.model.stacks import ATTRIBUTE, StackRange, compute_ranges, has_range_executor

NAME = "infinity_ranges"  # key in the registry of transformers
REPLACED = "grouped_mm"
_num_engines: Counter[int] = Counter()  # number of engines that use the entry, by id of the config


def declare_experts(model: nn.Module) -> None:
    """Set the names of the stacked weights on each experts module that can compute by ranges."""
    for module in _expert_modules(model):
        first = "gate_up_proj" if module.has_gate else "up_proj"
        setattr(module, ATTRIBUTE, (first, "down_proj"))


def compute_in_ranges(model: nn.Module) -> Callable[[], None]:
    """Declare the experts of `model` and compute them with `ranged_experts_forward`.

    Returns:
        A function that restores the previous implementation. Idempotent.
    """
    declare_experts(model)
    configs = {id(module.config): module.config for module in _expert_modules(model)}
    if configs:
        _register()
    for config in configs.values():
        _num_engines[id(config)] += 1
        config._experts_implementation = NAME
    return partial(_restore, list(configs.values()))


def _restore(configs: list[Any]) -> None:
    while configs:
        config = configs.pop()
        _num_engines[id(config)] -= 1
        if not _num_engines[id(config)]:
            del _num_engines[id(config)]
            config._experts_implementation = REPLACED


def _moe_module() -> Any:
    return import_module("transformers.integrations.moe")


@cache
def _register() -> None:
    _moe_module().ALL_EXPERTS_FUNCTIONS.register(NAME, ranged_experts_forward)


def _expert_modules(model: nn.Module) -> Iterator[Any]:
    """Yield the experts modules whose implementation is `grouped_mm` or this module's."""
    for module in model.modules():
        candidate: Any = module
        parameter_names = {name for name, _ in candidate.named_parameters(recurse=False)}
        first = "gate_up_proj" if getattr(candidate, "has_gate", True) else "up_proj"
        if (
            hasattr(candidate, "is_transposed")
            and hasattr(candidate, "has_bias")
            and {first, "down_proj"} <= parameter_names
            and not candidate._is_expert_parallel
            and getattr(candidate.config, "_experts_implementation", None) in (REPLACED, NAME)
        ):
            yield candidate


def ranged_experts_forward(
    self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Compute like `grouped_mm_experts_forward` of transformers; by ranges under an engine."""
    if not has_range_executor(self):
        forward: Callable[..., Tensor] = _moe_module().ALL_EXPERTS_FUNCTIONS[REPLACED]
        return forward(self, hidden_states, top_k_index, top_k_weights)
    num_top_k, num_tokens = top_k_index.size(-1), hidden_states.size(0)
    expert, order = torch.sort(top_k_index.reshape(-1))
    tokens = torch.bincount(expert, minlength=self.num_experts)
    rows = hidden_states[order // num_top_k]
    biases: list[Tensor | None] = [None, None]
    if self.has_bias:
        first = self.gate_up_proj_bias if self.has_gate else self.up_proj_bias
        biases = [first[expert], self.down_proj_bias[expert]]
    out = compute_ranges(self, partial(_compute, self, tokens), tokens.tolist(), rows, *biases)
    if self.has_post_expert_norm:
        out = self.post_expert_norm(out)
    weighted = out * top_k_weights.reshape(-1)[order].unsqueeze(-1)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.numel(), device=order.device)
    summed: Tensor = weighted[inverse].view(num_tokens, num_top_k, -1).sum(dim=1)
    return summed.to(hidden_states.dtype)


def _compute(
    self: Any,
    tokens: Tensor,
    experts: StackRange,
    rows: Tensor,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
) -> Tensor:
    linear: Callable[..., Tensor] = _moe_module()._grouped_linear
    ends = torch.cumsum(tokens[experts.first : experts.end], 0, dtype=torch.int32)
    options = {"offs": ends, "is_transposed": self.is_transposed}
    first = experts["gate_up_proj" if self.has_gate else "up_proj"]
    inner = linear(rows, first, bias=up_bias, **options)
    inner = self._apply_gate(inner) if self.has_gate else self.act_fn(inner)
    return linear(inner, experts["down_proj"], bias=down_bias, **options)
