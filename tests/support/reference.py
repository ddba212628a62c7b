"""NumPy reference of every update rule, for all weight layouts and moment formats.

The kernels must equal it bit for bit. It reads everything as fp32, applies the rule in the order of
torch's single-tensor path, and stores everything again (`rounding.py`). Every operation is one fp32
operation, rounded separately: no fused multiply-add, true division and square root. Scalars are
computed in double and rounded to fp32 once (`infinity/optim/rules.py`). torch itself fuses multiply
and add where the CPU can, and its `sqrt` is not correctly rounded, so its bits depend on the CPU;
those of this reference do not. It is independent of threads, instruction sets and addresses.

    all       g = gradient * grad_scale
    Adam      g = g + l2 * p                        only with L2
              p = p * decay                         only AdamW: decay = 1 - lr * weight_decay
              m = m + (1 - beta1) * (g - m)         lerp_; for beta1 <= 0.5: g - beta1 * (g - m)
              v = v * beta2 + ((1 - beta2) * g) * g
              p = p - (step_size * m) / (sqrt(v) / bias_correction2_sqrt + eps)
    Lion      p = p * decay;  p = p - lr * sign(m * beta1 + (1 - beta1) * g)
              m = m * beta2 + (1 - beta2) * g
    SGD       g = g + l2 * p;  m = m * momentum + (1 - dampening) * g
              p = p - lr * m;  Nesterov: p - lr * (g + momentum * m);  no momentum: p - lr * g
    Adagrad   g = g + l2 * p;  s = s + g * g;  p = p - (step_size * g) / (sqrt(s) + eps)
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence

import numpy as np
import torch
from support.rounding import (
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

from infinity.optim.moments import Moment
from infinity.optim.rules import Muon, RuleParams
from infinity.types import MomentFormat

SQUARE_BLOCK = 4096  # elements; part of the definition of the square sum, as is SQUARE_LANES
SQUARE_LANES = 16
_Scalars = tuple[float, ...]
_Result = tuple[Fp32Array, list[Fp32Array]]


def reference_update(
    weight: torch.Tensor,
    master_state: torch.Tensor | None,
    moments: Sequence[Moment],
    gradient: torch.Tensor,
    rule_params: RuleParams,
    step: int,
    grad_scale: float = 1.0,
    key: int = 0,
    first: int = 0,
) -> None:
    """Reference of `CpuKernels.update`, with the same arguments."""
    if isinstance(rule_params, Muon):
        _muon_by_torch(weight, master_state, moments, gradient.float() * grad_scale, rule_params)
        return
    if weight.dtype == torch.float16:
        assert master_state is not None
        p = floats(master_state)
    else:
        p = floats(weight) if master_state is None else floats(join_master(weight, master_state))
    old_moments = [
        read_moment(m, signed=not s) for m, s in zip(moments, rule_params.nonnegative, strict=False)
    ]
    with np.errstate(all="ignore"):
        new_weight, values = _KERNELS[rule_params.kernel](
            p, floats(gradient), old_moments, rule_params.scalars(step, grad_scale)
        )
    random_words = random_bits(key, first, weight.numel())
    for index, (moment, value) in enumerate(zip(moments, values, strict=True)):
        signed = not rule_params.nonnegative[index]
        random: U32Array | None = None
        if moment.format is MomentFormat.BF16_STOCHASTIC:
            random = random_for_bf16(random_words, index)
        elif moment.format is MomentFormat.INT8 and not signed:
            random = random_words
        write_moment(moment, canonical(value), signed=signed, random=random)
    _write_weight(weight, master_state, canonical(new_weight))


def _muon_by_torch(
    weight: torch.Tensor,
    master_state: torch.Tensor | None,
    moments: Sequence[Moment],
    gradient: torch.Tensor,
    rule_params: Muon,
) -> None:
    """Step the master, one matrix or a stack of them, with `torch.optim.Muon`."""
    split = master_state is not None and weight.dtype == torch.bfloat16
    master = (
        join_master(weight, master_state)
        if split
        else weight
        if master_state is None
        else master_state
    )
    stack_shape = (-1, *rule_params.shape[-2:])
    matrices = [torch.nn.Parameter(matrix) for matrix in master.view(stack_shape)]
    entries = Muon.defaults().keys() & inspect.signature(torch.optim.Muon).parameters.keys()
    optimizer = torch.optim.Muon(matrices, **{name: getattr(rule_params, name) for name in entries})
    buffers = moments[0].values.view(stack_shape)
    for matrix, grad, buffer in zip(matrices, gradient.view(stack_shape), buffers, strict=True):
        matrix.grad = grad
        optimizer.state[matrix]["momentum_buffer"] = buffer
    optimizer.step()
    new_master = torch.stack([matrix.detach() for matrix in matrices])
    _write_weight(weight, master_state, canonical(floats(new_master.reshape(-1))))


def read_moment(moment: Moment, *, signed: bool) -> Fp32Array:
    """Return a moment as fp32 values: a view if it is fp32, else a copy."""
    if moment.scales is None:
        return floats(moment.values)
    return decode_8bit(moment.values.numpy(), moment.scales.numpy(), signed=signed)


def write_moment(
    moment: Moment, values: Fp32Array, *, signed: bool, random: U32Array | None = None
) -> None:
    """Store fp32 values, rounded stochastically if `random` bits are given, else to nearest.

    Stochastic rounding takes 16 bits per element for bf16, 32 for 8-bit formats.
    """
    if moment.format is MomentFormat.FP32:
        moment.values.numpy()[:] = canonical(values)
    elif moment.scales is None:
        moment.values.view(torch.int16).numpy()[:] = to_bf16(values, random)
    else:
        codes, scales = encode_8bit(values, signed=signed, random=random)
        moment.values.numpy()[:] = codes
        moment.scales.numpy()[:] = scales


def _write_weight(weight: torch.Tensor, master_state: torch.Tensor | None, new: Fp32Array) -> None:
    if master_state is None:
        weight.numpy()[:] = new
    elif weight.dtype == torch.float16:
        master_state.numpy()[:] = new
        weight.numpy()[:] = to_fp16(new)
    else:
        high, residual = split_master(torch.from_numpy(new))
        weight.view(torch.int16).copy_(high.view(torch.int16))
        master_state.copy_(residual)


def _rounded(s: _Scalars) -> list[np.float32]:
    return [np.float32(value) for value in s]


def _adam(p: Fp32Array, gradient: Fp32Array, moments: list[Fp32Array], s: _Scalars) -> _Result:
    scale, decay, l2, lerp, beta2, one_minus_beta2, step_size, correction, eps = _rounded(s)
    m, v = moments
    g = gradient * scale
    if l2 != 0:
        g = g + l2 * p
    p = p * decay
    from_old = lerp < np.float32(0.5)
    m = m + lerp * (g - m) if from_old else g - (np.float32(1) - lerp) * (g - m)
    v = v * beta2
    v = v + (one_minus_beta2 * g) * g
    root: Fp32Array = np.sqrt(v)
    denominator = root / correction + eps
    return p - (step_size * m) / denominator, [m, v]


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


_KERNELS: dict[str, Callable[[Fp32Array, Fp32Array, list[Fp32Array], _Scalars], _Result]] = {
    "Adam": _adam,
    "Lion": _lion,
    "Momentum": _momentum,
    "Plain": _plain,
    "Adagrad": _adagrad,
}


def reference_square_sum(tensor: torch.Tensor) -> float:
    """Return the sum of squares in fp64 over a fixed tree, described in csrc/adam/passes.inl."""
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
