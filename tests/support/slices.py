"""Gradients of batch slices, added in fp32 with plain torch: each slice has its own leaves."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

_SUM = "_sum_of_slices"


def in_slices(
    block: nn.Module, slices: Iterable[tuple[Tensor, ...]], wrap: Callable[..., Callable[..., Any]]
) -> list[Tensor]:
    """Call `block` on every slice, through `wrap` of a function of it.

    When the last leaf of a parameter has its gradient, the sum over slices, in their order, is
    passed to the parameter's hooks: see `taken`.
    """
    slices = list(slices)
    parameters = {n: p for n, p in block.named_parameters() if p.requires_grad}
    arrived: dict[str, dict[int, Tensor]] = {name: {} for name in parameters}
    results = []
    for number, batch_slice in enumerate(slices):
        leaves = {name: p.detach().requires_grad_() for name, p in parameters.items()}
        for name, leaf in leaves.items():
            take = partial(_take, parameters[name], arrived[name], len(slices), number)
            leaf.register_post_accumulate_grad_hook(take)

        def run(*inputs: Tensor, leaves: dict[str, Tensor] = leaves) -> Tensor:
            output: Tensor = torch.func.functional_call(block, leaves, inputs)
            return output

        results.append(wrap(run)(*batch_slice))
    return results


def _take(
    parameter: Any, arrived: dict[int, Tensor], count: int, number: int, leaf: Tensor
) -> None:
    assert leaf.grad is not None
    arrived[number], leaf.grad = leaf.grad, None
    if len(arrived) == count:
        total = arrived[0].float()
        for index in range(1, count):
            total = total + arrived[index].float()
        arrived.clear()
        setattr(parameter, _SUM, total)
        for hook in (parameter._post_accumulate_grad_hooks or {}).values():
            hook(parameter)


def taken(parameter: Tensor) -> Tensor:
    """Take the gradient in a post-accumulate hook: a sum of slices (fp32) or that of torch."""
    total: Tensor | None = vars(parameter).pop(_SUM, None)
    gradient, parameter.grad = (total if total is not None else parameter.grad), None
    assert gradient is not None
    return gradient
