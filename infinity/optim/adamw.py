"""AdamW and Adam with L2, written once to be read; the fast kernels must equal it bit for bit.

Adam: Kingma & Ba 2015. Decoupled weight decay (AdamW): Loshchilov & Hutter 2019. The order of
operations is that of `torch.optim.AdamW(foreach=False, fused=False)`:

    g = gradient * grad_scale
    g = g + l2 * p                                  only Adam with L2 (decoupled=False)
    p = p * decay                                   only AdamW: decay = 1 - lr * weight_decay
    m = m + (1 - beta1) * (g - m)                   lerp_; for beta1 <= 0.5: g - beta1 * (g - m)
    v = v * beta2 + ((1 - beta2) * g) * g           mul_, addcmul_
    p = p - (step_size * m) / (sqrt(v) / bias_correction2_sqrt + eps)        addcdiv_

Every operation is one fp32 operation, rounded on its own: no fused multiply-add, true division and
square root. The scalars are computed in double and rounded to fp32 once (`scalars`). torch itself
fuses multiply and add where the CPU can, and its `sqrt` is not correctly rounded, so it does not
give the same bits on every CPU; this does.

Split masters: `hi = (bits + 0x8000) >> 16` is the bf16 weight, `residual = bits - (hi << 16)` a
signed 16-bit rest, mod 2^32. Any NaN that arithmetic produces is stored as 0x7fc00000, as payloads
depend on the machine. Invariant: nothing here knows threads, instruction sets or addresses.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from infinity.errors import ConfigError

Fp32Array = npt.NDArray[np.float32]

SQUARE_BLOCK = 4096  # elements; with SQUARE_LANES the definition of the square sum, not a knob
SQUARE_LANES = 16
_NAN = np.uint32(0x7FC00000)


@dataclass(frozen=True)
class AdamHyper:
    """What the user chooses; `decoupled` tells AdamW from Adam with L2."""

    lr: float
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.01
    decoupled: bool = True

    def __post_init__(self) -> None:
        for name in ("lr", "eps", "weight_decay"):
            value = getattr(self, name)
            if not value >= 0.0:
                raise ConfigError(f"{name} is {value}", remedy=f"{name} >= 0")
        for name in ("beta1", "beta2"):
            value = getattr(self, name)
            if not 0.0 <= value < 1.0:
                raise ConfigError(f"{name} is {value}", remedy=f"0 <= {name} < 1")


def scalars(hyper: AdamHyper, step: int, grad_scale: float = 1.0) -> tuple[float, ...]:
    """The nine numbers of one step, in the order `_adam.Pool.adam` takes; `step` counts from 1.

    (grad_scale, decay, l2, 1 - beta1, beta2, 1 - beta2, step_size, sqrt(bias correction 2), eps)
    """
    if step < 1:
        raise ConfigError(f"step is {step}", because="bias correction divides by 1 - beta ** step")
    bias_correction1 = 1 - hyper.beta1**step
    bias_correction2 = 1 - hyper.beta2**step
    doubles = (
        grad_scale,
        1 - hyper.lr * hyper.weight_decay if hyper.decoupled else 1.0,
        0.0 if hyper.decoupled else hyper.weight_decay,
        1 - hyper.beta1,
        hyper.beta2,
        1 - hyper.beta2,
        hyper.lr / bias_correction1,
        bias_correction2**0.5,
        hyper.eps,
    )
    return tuple(float(np.float32(value)) for value in doubles)


def split_master(master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The fp32 master as (bf16 weight, int16 residual)."""
    bits = _canonical(_floats(master)).view(np.uint32)
    high = ((bits + np.uint32(0x8000)) >> np.uint32(16)).astype(np.uint16)
    residual = bits.astype(np.uint16)  # bits - (high << 16), mod 2^16
    return (
        torch.from_numpy(high.view(np.int16)).view(torch.bfloat16),
        torch.from_numpy(residual.view(np.int16)),
    )


def join_master(weight: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """The fp32 master that was split into `weight` and `residual`."""
    high = weight.view(torch.int16).numpy().view(np.uint16).astype(np.uint32)
    rest = residual.numpy().astype(np.int32).view(np.uint32)
    bits = (high << np.uint32(16)) + rest
    return torch.from_numpy(_canonical(bits.view(np.float32)))


def reference_step(
    weight: torch.Tensor,
    residual: torch.Tensor | None,
    moment1: torch.Tensor,
    moment2: torch.Tensor,
    gradient: torch.Tensor,
    step_scalars: tuple[float, ...],
) -> None:
    """One step in place on the split layout, or on an fp32 weight when `residual` is None."""
    grad_scale, decay, l2, lerp, beta2, one_minus_beta2, step_size, correction, eps = (
        np.float32(value) for value in step_scalars
    )
    p = _floats(weight if residual is None else join_master(weight, residual))
    m, v = _floats(moment1), _floats(moment2)
    with np.errstate(all="ignore"):
        g = _floats(gradient) * grad_scale
        if l2 != 0:
            g = g + l2 * p
        p = p * decay
        near = lerp < np.float32(0.5)
        m = m + lerp * (g - m) if near else g - (np.float32(1) - lerp) * (g - m)
        v = v * beta2
        v = v + (one_minus_beta2 * g) * g
        root: Fp32Array = np.sqrt(v)
        denominator = root / correction + eps
        p = p - (step_size * m) / denominator
    _floats(moment1)[:] = _canonical(m)
    _floats(moment2)[:] = _canonical(v)
    master = torch.from_numpy(_canonical(p))
    if residual is None:
        weight.copy_(master)
    else:
        high, rest = split_master(master)
        weight.view(torch.int16).copy_(high.view(torch.int16))
        residual.copy_(rest)


def reference_square_sum(tensor: torch.Tensor) -> float:
    """Sum of squares in fp64 over one fixed tree (csrc/adam/kernel.inl says it in words)."""
    with np.errstate(all="ignore"):
        values = _floats(tensor.reshape(-1)).astype(np.float64)
    num_blocks = -(-values.size // SQUARE_BLOCK)
    padded = np.zeros(num_blocks * SQUARE_BLOCK, dtype=np.float64)
    padded[: values.size] = values
    rows = padded.reshape(num_blocks, SQUARE_BLOCK // SQUARE_LANES, SQUARE_LANES)
    lanes = np.zeros((num_blocks, SQUARE_LANES), dtype=np.float64)
    with np.errstate(all="ignore"):
        for row in range(rows.shape[1]):
            lanes = lanes + rows[:, row, :] * rows[:, row, :]
        while lanes.shape[1] > 1:
            half = lanes.shape[1] // 2
            lanes = lanes[:, :half] + lanes[:, half:]
        sums = lanes.reshape(-1)
        while sums.size > 1:
            even = sums.size - sums.size % 2
            sums = np.concatenate([sums[0:even:2] + sums[1:even:2], sums[even:]])
    return float(sums[0]) if sums.size else 0.0


def _floats(tensor: torch.Tensor) -> Fp32Array:
    """The fp32 values: a view of an fp32 tensor, a widened copy of a bf16 one."""
    if tensor.dtype == torch.bfloat16:
        high = tensor.view(torch.int16).numpy().view(np.uint16).astype(np.uint32)
        return (high << np.uint32(16)).view(np.float32)
    values: Fp32Array = tensor.numpy()
    return values


def _canonical(values: Fp32Array) -> Fp32Array:
    bits = values.view(np.uint32)
    return np.where(np.isnan(values), _NAN, bits).view(np.float32)
