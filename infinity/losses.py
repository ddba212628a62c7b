"""Losses that never store all logits of a large vocabulary.

`chunked_cross_entropy(hidden, weight, labels)` computes
`F.cross_entropy(F.linear(hidden, weight).float(), labels)` in chunks of tokens. The forward
computes the logits of a chunk, their loss and their gradients before the next chunk; so there is no
recomputation, and one chunk of logits is in memory at a time.

Memory in addition to the inputs: one chunk of logits (chunk_size * vocabulary, in the compute dtype
and twice in fp32), and the tensors saved for backward: the gradient of `hidden` in its dtype, and
that of `weight`, in fp32 if there are several chunks (the product of each chunk is rounded to the
compute dtype, their sum is not). FLOPs equal those of the plain loss: 2 forward and 4 backward per
token, hidden element and vocabulary entry; all of them in the forward.

With an engine, call it inside a module's forward, and access the weight there:
`chunked_cross_entropy(x, self.head.weight, labels)`. The gradients are computed while the weight is
resident; backward only scales them, and does not need the weight.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from infinity.errors import TrainingError

CHUNK_TOKENS = 1024
_ROWS = 4096  # rows of a gradient that are scaled at a time

Reduction = Literal["mean", "sum"]
Transform = Callable[[Tensor], Tensor]


class _Options(NamedTuple):
    chunk_size: int
    ignore_index: int
    label_smoothing: float
    z_loss: float
    transform: Transform | None
    reduction: Reduction


def chunked_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    chunk_size: int = CHUNK_TOKENS,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    transform: Transform | None = None,
    z_loss: float = 0.0,
    reduction: Reduction = "mean",
) -> Tensor:
    """Compute the cross entropy of a language model's head without storing all logits.

    The logits are ``softcap * tanh((hidden @ weight.T + bias) / softcap)``. They are computed
    for `chunk_size` tokens at a time, and gradients are computed in the forward. Matrix products
    are in the dtype of `hidden`, all other operations in fp32.

    Args:
        hidden: Hidden states, shape ``(..., width)``.
        weight: Weight of the head, shape ``(vocabulary, width)``.
        labels: Target token indices, shape ``(...)``.
        bias: Bias of the head, shape ``(vocabulary,)``.
        chunk_size: Tokens whose logits are in memory at once.
        ignore_index: Label that does not contribute to the loss.
        label_smoothing: As in `torch.nn.functional.cross_entropy`.
        softcap: Limit of the logits' magnitude; None for no limit.
        transform: Differentiable elementwise function of logits in the dtype of `hidden`, applied
            before the softcap.
        z_loss: Weight of the squared log partition function of each label that is not ignored.
        reduction: ``"mean"`` over labels that are not ignored (NaN if there are none, as in torch),
            or ``"sum"``, for accumulation over micro-batches of different lengths: divide by the
            number of labels of all of them.

    Returns:
        The loss, shape ``()``, fp32.

    Raises:
        TrainingError: Shapes or dtypes do not fit; nothing was computed.
    """
    _check(hidden, weight, labels, bias, chunk_size, reduction)
    if torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
    elif hidden.dtype is not weight.dtype:
        raise TrainingError(
            f"hidden is {hidden.dtype}, weight {weight.dtype}", remedy="cast one of them"
        )
    if softcap is not None:
        transform = partial(_capped, cap=softcap, inner=transform)
    options = _Options(chunk_size, ignore_index, label_smoothing, z_loss, transform, reduction)
    flat = hidden.reshape(-1, hidden.shape[-1])
    apply: Any = _ChunkedCrossEntropy.apply
    loss: Tensor = apply(flat, weight, bias, labels.reshape(-1), options)
    return loss


def _check(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    chunk_size: int,
    reduction: str,
) -> None:
    wrong = None
    if hidden.dim() < 1 or weight.dim() != 2 or hidden.shape[-1] != weight.shape[1]:
        wrong = f"hidden {tuple(hidden.shape)} does not fit weight {tuple(weight.shape)}"
    elif hidden.shape[:-1] != labels.shape:
        wrong = f"hidden {tuple(hidden.shape)} does not fit labels {tuple(labels.shape)}"
    elif bias is not None and bias.shape != weight.shape[:1]:
        wrong = f"bias {tuple(bias.shape)} does not fit weight {tuple(weight.shape)}"
    elif labels.is_floating_point() or labels.dtype is torch.bool:
        wrong = f"labels are {labels.dtype}, not indices"
    elif chunk_size < 1:
        wrong = f"chunk_size is {chunk_size}"
    elif reduction not in ("mean", "sum"):
        wrong = f"reduction is {reduction!r}"
    if wrong is not None:
        raise TrainingError(
            f"chunked_cross_entropy: {wrong}",
            remedy="give hidden (..., width), weight (vocabulary, width), labels (...)",
        )


def _capped(logits: Tensor, cap: float, inner: Transform | None) -> Tensor:
    return cap * torch.tanh((logits if inner is None else inner(logits)).float() / cap)


class _KeptAsItIs(torch.autograd.graph.saved_tensors_hooks):
    """Context in which tensors saved by autograd bypass outer hooks, such as a checkpoint's."""

    def __init__(self) -> None:
        super().__init__(lambda tensor: tensor, lambda tensor: tensor)


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Function that computes gradients in the forward; the backward only scales them."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        options: _Options,
    ) -> Tensor:
        size, transform = options.chunk_size, options.transform
        wants = [t is not None and t.requires_grad for t in (hidden, weight, bias)]
        grad_hidden = torch.empty_like(hidden) if wants[0] else None
        grad_weight: Tensor | None = None
        new_zeros = partial(torch.zeros, dtype=torch.float32, device=hidden.device)
        grad_bias = new_zeros(weight.shape[0]) if wants[2] else None
        total = new_zeros(())
        valid = labels != options.ignore_index
        # The count stays a tensor, to avoid a synchronization with the device.
        mean = options.reduction == "mean"
        share = 1.0 / valid.sum().float() if mean else torch.ones_like(total)
        for start in range(0, len(hidden), size):
            rows = slice(start, start + size)
            part, here = hidden[rows], valid[rows]
            target = labels[rows].clamp_min(0).where(here, torch.zeros_like(labels[rows]))
            logits = made = torch.nn.functional.linear(part, weight, bias)
            if transform is not None:
                with torch.enable_grad(), _KeptAsItIs():
                    made = transform(logits.requires_grad_())
            used_up = made.detach().to(torch.float32, copy=transform is not None)
            loss, gradient = _loss_and_gradient(used_up, target, options)
            total += (loss * here).sum()
            if not any(wants):
                continue
            gradient.mul_(here.unsqueeze(1))  # the count divides last: fp16 underflows at 6e-8
            if transform is not None:
                (gradient,) = torch.autograd.grad(made, logits, gradient.to(made.dtype))
            if grad_bias is not None:
                grad_bias += gradient.sum(0, dtype=torch.float32)
            factor = gradient.to(weight.dtype)
            if grad_hidden is not None:
                torch.mm(factor, weight, out=grad_hidden[rows])
            if wants[1]:
                product = factor.t() @ part  # a single product needs no fp32 sum
                grad_weight = product if grad_weight is None else grad_weight.float().add_(product)
        if wants[1] and grad_weight is None:
            grad_weight = torch.zeros_like(weight)
        ctx.dtypes = weight.dtype, bias.dtype if bias is not None else None
        ctx.save_for_backward(grad_hidden, grad_weight, grad_bias, share)
        return total * share

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        grad_hidden, grad_weight, grad_bias, share = ctx.saved_tensors
        for_weight, for_bias = ctx.dtypes
        scale = grads[0] * share
        return (
            None if grad_hidden is None else _scaled(grad_hidden, scale, grad_hidden.dtype),
            None if grad_weight is None else _scaled(grad_weight, scale, for_weight),
            None if grad_bias is None else _scaled(grad_bias, scale, for_bias),
            None,
            None,
        )


def _scaled(gradient: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply in fp32, in chunks of rows, to limit temporary memory."""
    made = torch.empty_like(gradient, dtype=dtype)
    for part, source in zip(torch.split(made, _ROWS), torch.split(gradient, _ROWS), strict=True):
        part.copy_(source.float() * scale)
    return made


def _loss_and_gradient(logits: Tensor, target: Tensor, options: _Options) -> tuple[Tensor, Tensor]:
    """Return the losses of rows, and their gradients, which overwrite the logits.

    With smoothing s the loss is (1 - s) * nll + s * mean over the vocabulary, as in torch.
    """
    smoothing, z_loss = options.label_smoothing, options.z_loss
    peak = logits.logsumexp(1)
    picked = logits.gather(1, target.unsqueeze(1)).squeeze(1)
    loss = peak - picked
    if smoothing:
        loss = (1 - smoothing) * loss + smoothing * (peak - logits.mean(1))
    gradient = logits.sub_(peak.unsqueeze(1)).exp_()
    if z_loss:
        loss = loss + z_loss * peak * peak
        gradient.mul_((1 + 2 * z_loss * peak).unsqueeze(1))
    if smoothing:
        gradient.sub_(smoothing / logits.shape[1])
    ones = torch.full_like(picked, smoothing - 1).unsqueeze(1)
    return loss, gradient.scatter_add_(1, target.unsqueeze(1), ones)
