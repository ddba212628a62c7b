"""Every rule on every layout and moment format, in numpy; the kernels equal it bit for bit.

Slow and obvious: read everything as fp32, apply the rule (one fp32 operation after the other, in
the order of torch's single-tensor path), store everything again. AdamW is in `adamw.py`.

    Lion      p = p * decay;  p = p - lr * sign(m * beta1 + (1 - beta1) * g)
              m = m * beta2 + (1 - beta2) * g
    SGD       g = g + l2 * p;  m = m * momentum + (1 - dampening) * g
              p = p - lr * m;  Nesterov: p - lr * (g + momentum * m);  no momentum: p - lr * g
    Adagrad   g = g + l2 * p;  s = s + g * g;  p = p - (step_size * g) / (sqrt(s) + eps)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from infinity.formats import MomentFormat
from infinity.optim.adamw import adam
from infinity.optim.moments import Moment
from infinity.optim.rounding import (
    Fp32Array,
    U32Array,
    canonical,
    decode_8bit,
    encode_8bit,
    floats,
    join_master,
    random_bits,
    random_for_bf16,
    split_master,
    to_bf16,
    to_fp16,
)
from infinity.optim.rules import Hyper, Rule

_Scalars = tuple[float, ...]
_Result = tuple[Fp32Array, list[Fp32Array]]


def reference_update(
    weight: torch.Tensor,
    rest: torch.Tensor | None,
    moments: Sequence[Moment],
    gradient: torch.Tensor,
    hyper: Hyper,
    step: int,
    grad_scale: float = 1.0,
    key: int = 0,
    first: int = 0,
) -> None:
    """What `CpuKernels.update` does, with the same arguments."""
    if weight.dtype == torch.float16:
        assert rest is not None
        p = floats(rest)
    else:
        p = floats(weight) if rest is None else floats(join_master(weight, rest))
    old = [read_moment(m, signed=not s) for m, s in zip(moments, hyper.unsigned, strict=False)]
    with np.errstate(all="ignore"):
        new, values = _RULES[hyper.rule](p, floats(gradient), old, hyper.scalars(step, grad_scale))
    bits = random_bits(key, first, weight.numel())
    for index, (moment, value) in enumerate(zip(moments, values, strict=True)):
        signed = not hyper.unsigned[index]
        random: U32Array | None = None
        if moment.format is MomentFormat.BF16_STOCHASTIC:
            random = random_for_bf16(bits, index)
        elif moment.format is MomentFormat.INT8 and not signed:
            random = bits
        write_moment(moment, canonical(value), signed=signed, random=random)
    _write_weight(weight, rest, canonical(new))


def read_moment(moment: Moment, *, signed: bool) -> Fp32Array:
    """Return a moment as fp32 values (of its own memory, unless it is fp32)."""
    if moment.scales is None:
        return floats(moment.values)
    return decode_8bit(moment.values.numpy(), moment.scales.numpy(), signed=signed)


def write_moment(
    moment: Moment, values: Fp32Array, *, signed: bool, random: U32Array | None = None
) -> None:
    """Store fp32 values; with `random` bits (16; 8-bit: 32) stochastically, else to nearest."""
    if moment.format is MomentFormat.FP32:
        moment.values.numpy()[:] = canonical(values)
    elif moment.scales is None:
        moment.values.view(torch.int16).numpy()[:] = to_bf16(values, random)
    else:
        codes, scales = encode_8bit(values, signed=signed, random=random)
        moment.values.numpy()[:] = codes
        moment.scales.numpy()[:] = scales


def _write_weight(weight: torch.Tensor, rest: torch.Tensor | None, new: Fp32Array) -> None:
    if rest is None:
        weight.numpy()[:] = new
    elif weight.dtype == torch.float16:
        rest.numpy()[:] = new
        weight.numpy()[:] = to_fp16(new)
    else:
        high, residual = split_master(torch.from_numpy(new))
        weight.view(torch.int16).copy_(high.view(torch.int16))
        rest.copy_(residual)


def _rounded(s: _Scalars) -> list[np.float32]:
    return [np.float32(value) for value in s]


def _lion(p: Fp32Array, gradient: Fp32Array, moments: list[Fp32Array], s: _Scalars) -> _Result:
    scale, decay, beta1, one_minus_beta1, beta2, one_minus_beta2, lr = _rounded(s)
    (m,) = moments
    g = gradient * scale
    mix = m * beta1 + one_minus_beta1 * g
    sign: Fp32Array = np.where(mix > 0, np.float32(1), np.where(mix < 0, np.float32(-1), mix))
    change: Fp32Array = lr * sign
    return p * decay - change, [m * beta2 + one_minus_beta2 * g]


def _momentum(p: Fp32Array, gradient: Fp32Array, moments: list[Fp32Array], s: _Scalars) -> _Result:
    scale, l2, momentum, undamped, look_ahead, lr = _rounded(s)
    g = gradient * scale
    if l2 != 0:
        g = g + l2 * p
    m = moments[0] * momentum
    m = m + undamped * g
    if look_ahead != 0:
        g = g + look_ahead * m
    change: Fp32Array = lr * (g if look_ahead != 0 else m)
    return p - change, [m]


def _plain(p: Fp32Array, gradient: Fp32Array, moments: list[Fp32Array], s: _Scalars) -> _Result:
    scale, l2, _, _, _, lr = _rounded(s)
    g = gradient * scale
    if l2 != 0:
        g = g + l2 * p
    return p - lr * g, moments


def _adagrad(p: Fp32Array, gradient: Fp32Array, moments: list[Fp32Array], s: _Scalars) -> _Result:
    scale, l2, step_size, eps = _rounded(s)
    g = gradient * scale
    if l2 != 0:
        g = g + l2 * p
    total = moments[0] + g * g
    root: Fp32Array = np.sqrt(total)
    return p - (step_size * g) / (root + eps), [total]


_RULES: dict[Rule, Callable[[Fp32Array, Fp32Array, list[Fp32Array], _Scalars], _Result]] = {
    Rule.ADAM: adam,
    Rule.LION: _lion,
    Rule.MOMENTUM: _momentum,
    Rule.PLAIN: _plain,
    Rule.ADAGRAD: _adagrad,
}
