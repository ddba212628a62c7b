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
        transform = partial(_softcapped, cap=softcap, inner=transform)
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
    problem = None
    if hidden.dim() < 1 or weight.dim() != 2 or hidden.shape[-1] != weight.shape[1]:
        problem = f"hidden {tuple(hidden.shape)} does not fit weight {tuple(weight.shape)}"
    elif hidden.shape[:-1] != labels.shape:
        problem = f"hidden {tuple(hidden.shape)} does not fit labels {tuple(labels.shape)}"
    elif bias is not None and bias.shape != weight.shape[:1]:
        problem = f"bias {tuple(bias.shape)} does not fit weight {tuple(weight.shape)}"
    elif labels.is_floating_point() or labels.dtype is torch.bool:
        problem = f"labels are {labels.dtype}, not indices"
    elif chunk_size < 1:
        problem = f"chunk_size is {chunk_size}"
    elif reduction not in ("mean", "sum"):
        problem = f"reduction is {reduction!r}"
    if problem is not None:
        raise TrainingError(
            f"chunked_cross_entropy: {problem}",
            remedy="give hidden (..., width), weight (vocabulary, width), labels (...)",
        )


def _softcapped(logits: Tensor, cap: float, inner: Transform | None) -> Tensor:
    return cap * torch.tanh((logits if inner is None else inner(logits)).float() / cap)


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
        size = options.chunk_size
        transform = options.transform
        needs_grad = [t is not None and t.requires_grad for t in (hidden, weight, bias)]
        grad_hidden = torch.empty_like(hidden) if needs_grad[0] else None
        grad_weight: Tensor | None = None
        new_zeros = partial(torch.zeros, dtype=torch.float32, device=hidden.device)
        grad_bias = new_zeros(weight.shape[0]) if needs_grad[2] else None
        total = new_zeros(())
        valid = labels != options.ignore_index
        # The count stays a tensor, to avoid a synchronization with the device.
        mean = options.reduction == "mean"
        scale = 1.0 / valid.sum().float() if mean else torch.ones_like(total)
        for start in range(0, len(hidden), size):
            rows = slice(start, start + size)
            chunk = hidden[rows]
            mask = valid[rows]
            target = labels[rows].where(mask, torch.zeros_like(labels[rows]))
            logits = output = torch.nn.functional.linear(chunk, weight, bias)
            if transform is not None:
                # Tensors saved by autograd bypass outer hooks, such as a checkpoint's.
                bypass = torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)
                with torch.enable_grad(), bypass:
                    output = transform(logits.requires_grad_())
            scratch = output.detach().to(torch.float32, copy=transform is not None)
            loss, gradient = _loss_and_gradient(scratch, target, options)
            total += (loss * mask).sum()
            if not any(needs_grad):
                continue
            gradient.mul_(mask.unsqueeze(1))  # the count divides last: fp16 underflows at 6e-8
            if transform is not None:
                (gradient,) = torch.autograd.grad(output, logits, gradient.to(output.dtype))
            if grad_bias is not None:
                grad_bias += gradient.sum(0, dtype=torch.float32)
            grad_logits = gradient.to(weight.dtype)
            if grad_hidden is not None:
                torch.mm(grad_logits, weight, out=grad_hidden[rows])
            if needs_grad[1]:
                product = grad_logits.t() @ chunk  # a single product needs no fp32 sum
                grad_weight = product if grad_weight is None else grad_weight.float().add_(product)
        if needs_grad[1] and grad_weight is None:
            grad_weight = torch.zeros_like(weight)
        ctx.dtypes = weight.dtype, bias.dtype if bias is not None else None
        ctx.save_for_backward(grad_hidden, grad_weight, grad_bias, scale)
        return total * scale

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        grad_hidden, grad_weight, grad_bias, scale = ctx.saved_tensors
        weight_dtype, bias_dtype = ctx.dtypes
        # Without labels the loss is NaN, and gradients are 0, as in torch.
        factor = torch.where(scale.isinf(), 0.0, grads[0] * scale)
        return (
            None if grad_hidden is None else _scaled(grad_hidden, factor, grad_hidden.dtype),
            None if grad_weight is None else _scaled(grad_weight, factor, weight_dtype),
            None if grad_bias is None else _scaled(grad_bias, factor, bias_dtype),
            None,
            None,
        )


def _scaled(gradient: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply in fp32, in chunks of rows, to limit temporary memory."""
    scaled = torch.empty_like(gradient, dtype=dtype)
    for target, source in zip(
        torch.split(scaled, _ROWS), torch.split(gradient, _ROWS), strict=True
    ):
        target.copy_(source.float() * scale)
    return scaled


def _loss_and_gradient(logits: Tensor, target: Tensor, options: _Options) -> tuple[Tensor, Tensor]:
    """Return the losses of rows, and their gradients, which overwrite the logits.

    With smoothing s the loss is (1 - s) * nll + s * mean over the vocabulary, as in torch.
    """
    smoothing, z_loss = options.label_smoothing, options.z_loss
    log_sum = logits.logsumexp(1)
    target_logits = logits.gather(1, target.unsqueeze(1)).squeeze(1)
    loss = log_sum - target_logits
    if smoothing:
        loss = (1 - smoothing) * loss + smoothing * (log_sum - logits.mean(1))
    gradient = logits.sub_(log_sum.unsqueeze(1)).exp_()
    if z_loss:
        loss = loss + z_loss * log_sum * log_sum
        gradient.mul_((1 + 2 * z_loss * log_sum).unsqueeze(1))
    if smoothing:
        gradient.sub_(smoothing / logits.shape[1])
    target_terms = torch.full_like(target_logits, smoothing - 1).unsqueeze(1)
    return loss, gradient.scatter_add_(1, target.unsqueeze(1), target_terms)
