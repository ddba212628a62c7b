"""Muon's step of a matrix, in torch operations, on the device of the matrix.

Performs the operations of `torch.optim.Muon` on an fp32 master. A stack of matrices is updated
matrix by matrix, with the same bits as if each were a parameter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from infinity.optim.moments import Moment
from infinity.optim.rules import Muon

_NAN = 0x7FC00000


def step_matrices_of_stack(
    weight: Tensor,
    master_state: Tensor | None,
    moments: Sequence[Moment],
    gradient: Tensor,
    rule_params: Muon,
    grad_scale: float,
) -> None:
    """Update a parameter of `rule_params.shape`, a matrix or a stack of them, in place.

    All tensors are 1-D: see `infinity.optim.cpu.Piece`; the momentum is fp32.
    """
    *stacked, rows, columns = rule_params.shape
    rule_params = rule_params.with_shape((rows, columns))
    size = rows * columns
    for start in range(0, size * math.prod(stacked), size):
        elements = slice(start, start + size)
        state = None if master_state is None else master_state[elements]
        momentum = moments[0].values[elements]
        _step_matrix(weight[elements], state, momentum, gradient[elements], rule_params, grad_scale)


def _step_matrix(
    weight: Tensor,
    master_state: Tensor | None,
    momentum: Tensor,
    gradient: Tensor,
    rule_params: Muon,
    grad_scale: float,
) -> None:
    """Update one matrix; for peak memory see `infinity.plan.budget.MATRIX_BYTES`."""
    shape = rule_params.shape
    scaled = grad_scale != 1.0
    gradient = gradient.to(torch.float32, copy=scaled).view(shape)
    if scaled:
        gradient.mul_(grad_scale)
    momentum = momentum.view(shape)
    momentum.lerp_(gradient, 1 - rule_params.momentum)
    ahead = gradient.lerp(momentum, rule_params.momentum) if rule_params.nesterov else momentum
    del gradient
    update = orthogonal(ahead, rule_params)
    del ahead
    if master_state is None:
        master = weight
    elif master_state.dtype is torch.float32:
        master = master_state
    else:
        upper = weight.view(torch.int16).int().bitwise_left_shift_(16)
        master = upper.add_(master_state).view(torch.float32)
    view = master.view(shape)
    view.mul_(1 - rule_params.lr * rule_params.weight_decay)
    view.add_(update, alpha=-rule_params.adjusted_lr)
    if master is master_state:
        weight.copy_(master)
    elif master_state is not None:  # bf16 rounds half up, and NaN stays NaN
        bits = master.view(torch.int32).masked_fill_(master.isnan(), _NAN)
        upper = bits.add(0x8000).bitwise_right_shift_(16)
        weight.view(torch.int16).copy_(upper)
        master_state.copy_(bits.sub_(upper.bitwise_left_shift_(16)))


def orthogonal(matrix: Tensor, rule_params: Muon) -> Tensor:
    """Return the matrix with singular values near 1, in bf16: `ns_steps` of X -> aX + (bA + cA²)X.

    A is X Xᵀ, with X transposed if it has more rows than columns. Jordan et al. 2024,
    https://kellerjordan.github.io/posts/muon/.
    """
    a, b, c = rule_params.ns_coefficients
    result = matrix.bfloat16()
    if tall := matrix.size(0) > matrix.size(1):
        result = result.T
    result.div_(result.norm().clamp(min=rule_params.eps))
    for _ in range(rule_params.ns_steps):
        gram = result @ result.T
        gram = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        result = torch.addmm(result, gram, result, beta=a)
    return result.T if tall else result
