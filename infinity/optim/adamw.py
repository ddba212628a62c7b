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
square root. The scalars are computed in double and rounded to fp32 once (`rules.py`). torch itself
fuses multiply and add where the CPU can, and its `sqrt` is not correctly rounded, so it does not
give the same bits on every CPU; this does. The other rules are in `reference.py`, the number
formats in `rounding.py`. Invariant: nothing here knows threads, instruction sets or addresses.
"""

from __future__ import annotations

import numpy as np
import torch

from infinity.optim.rounding import Fp32Array, floats

SQUARE_BLOCK = 4096  # elements; with SQUARE_LANES the definition of the square sum, not a knob
SQUARE_LANES = 16


def adam(
    p: Fp32Array, gradient: Fp32Array, moments: list[Fp32Array], step_scalars: tuple[float, ...]
) -> tuple[Fp32Array, list[Fp32Array]]:
    """Return the new (p, [m, v]) of one step, not yet canonical."""
    grad_scale, decay, l2, lerp, beta2, one_minus_beta2, step_size, correction, eps = (
        np.float32(value) for value in step_scalars
    )
    m, v = moments
    g = gradient * grad_scale
    if l2 != 0:
        g = g + l2 * p
    p = p * decay
    near = lerp < np.float32(0.5)
    m = m + lerp * (g - m) if near else g - (np.float32(1) - lerp) * (g - m)
    v = v * beta2
    v = v + (one_minus_beta2 * g) * g
    root: Fp32Array = np.sqrt(v)
    denominator = root / correction + eps
    return p - (step_size * m) / denominator, [m, v]


def reference_square_sum(tensor: torch.Tensor) -> float:
    """Sum of squares in fp64 over one fixed tree (csrc/adam/passes.inl says it in words)."""
    with np.errstate(all="ignore"):
        values = floats(tensor.reshape(-1)).astype(np.float64)
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
