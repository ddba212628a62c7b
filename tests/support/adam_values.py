"""Values, buffers and comparisons for the tests of the native kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from support.reference import write_moment
from support.rounding import split_master, to_fp16

from infinity.optim.cpu import CpuKernels, Piece
from infinity.optim.moments import Moment
from infinity.optim.rules import RULES, SGD, Adam, AdamW, RuleParams
from infinity.types import MomentFormat

BF16 = torch.bfloat16
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
LAYOUTS = ("fp32", "split", "fp16")


BY_KERNEL = {name: rule for name, rule in RULES.items() if rule.kernel}


def hypers_of(rule: type[RuleParams]) -> tuple[RuleParams, RuleParams]:
    """Return the rule with defaults, and with every hyper-parameter nonzero and `maximize`."""
    nonzero = {
        name: (0.8, 0.95) if isinstance(default, tuple) else 0.1
        for name, default in rule.defaults().items()
        if isinstance(default, float) or default == AdamW.betas
    }
    return rule.of({**rule.defaults(), "lr": 0.01}), rule.of(
        {**rule.defaults(), **nonzero, "maximize": True}
    )


# Optimizer sections of a config: every hyper-parameter of a rule nonzero, without learning rate.
SECTIONS: dict[str, dict[str, Any]] = {
    name: {
        "type": name,
        **{
            entry: getattr(hypers_of(rule)[1], entry)
            for entry, default in rule.defaults().items()
            if entry != "lr" and not isinstance(default, bool)
        },
    }
    for name, rule in RULES.items()
}
HYPERS: tuple[RuleParams, ...] = (
    *(rule_params for rule in BY_KERNEL.values() for rule_params in hypers_of(rule)),
    AdamW(lr=3e-4, betas=(0.4, 0.95), weight_decay=0.0, maximize=True),
    Adam(lr=1.0, betas=(0.0, 0.0), eps=0.0, weight_decay=0.0),
    SGD(lr=0.1, weight_decay=0.01, maximize=True),
    SGD(lr=0.1, momentum=0.9, weight_decay=0.1, nesterov=True),
)
ADAMW = AdamW(lr=1e-2, weight_decay=0.1)
L2 = Adam(lr=1e-2, weight_decay=0.1)
PATTERNS = """
    0 1 7fff 8000 18000 7fffff 800000 34000000 3f7fffff 3f800000 3f808000 3f818000 7f7f7fff
    7f7f8000 7f7fffff 7f800000 7f800001 7f808000 7fbfffff 7fc00000 7fff7fff 7fff8000 7fffffff
    """
SPECIAL = np.array([int(pattern, 16) for pattern in PATTERNS.split()], dtype=np.uint32)
SPECIAL = np.concatenate([SPECIAL, SPECIAL | np.uint32(0x80000000)])


class Source:
    """Factory of seeded tensors with all kinds of values, at random offsets in larger buffers."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)

    def floats(self, n: int, dtype: torch.dtype, *, wild: bool = True) -> torch.Tensor:
        scale = 10.0 ** float(self.random.integers(-6, 3))
        values = (self.random.standard_normal(n) * scale).astype(np.float32)
        if wild:
            kind = self.random.integers(0, 8, n)
            bits = self.random.integers(0, 2**32, n, dtype=np.uint32)
            special = self.random.choice(SPECIAL, n)
            mixed = np.where(kind == 0, bits, np.where(kind == 1, special, values.view(np.uint32)))
            values = mixed.astype(np.uint32).view(np.float32)
        return self.place(torch.from_numpy(values), dtype)

    def place(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        offset = int(self.random.integers(0, 16))
        if dtype == torch.float16:
            halves = torch.from_numpy(to_fp16(tensor.numpy()))
            buffer = torch.zeros(tensor.numel() + 32, dtype=torch.float16)
            buffer[offset : offset + tensor.numel()] = halves
            return buffer[offset : offset + tensor.numel()]
        if dtype == torch.bfloat16:  # truncated: keeps payloads of NaN
            high = (tensor.view(torch.int32) >> 16).to(torch.int16)
            buffer = torch.zeros(tensor.numel() + 32, dtype=torch.int16)
            buffer[offset : offset + tensor.numel()] = high
            return buffer.view(torch.bfloat16)[offset : offset + tensor.numel()]
        buffer = torch.zeros(tensor.numel() + 32, dtype=torch.int32)
        buffer[offset : offset + tensor.numel()] = tensor.view(torch.int32)
        return buffer.view(torch.float32)[offset : offset + tensor.numel()]

    def state(self, n: int, *, split: bool, wild: bool = True) -> list[torch.Tensor | None]:
        """Return (weight, residual, moment1, moment2), each at its own offset."""
        master = self.floats(n, torch.float32, wild=wild)
        moment1 = self.floats(n, torch.float32, wild=wild)
        moment2 = self.floats(n, torch.float32, wild=wild)
        if self.random.integers(0, 4) or not wild:
            moment2.abs_()
        if not split:
            return [master, None, moment1, moment2]
        weight, residual = split_master(master)
        weights = self.place((weight.view(torch.int16).int() << 16).view(torch.float32), BF16)
        buffer = torch.zeros(n + 16, dtype=torch.int16)
        buffer[7 : 7 + n] = residual
        return [weights, buffer[7 : 7 + n], moment1, moment2]

    def moment(self, n: int, kind: MomentFormat, *, nonnegative: bool, wild: bool = True) -> Moment:
        """Return a moment with random values at a random offset; 8-bit codes may be any bytes."""
        values = self.floats(n, torch.float32, wild=wild)
        if nonnegative and (self.random.integers(0, 4) or not wild):
            values.abs_()
        fresh = Moment.zeros(n, kind)
        buffer = torch.zeros(n + 32, dtype=fresh.values.dtype)
        offset = int(self.random.integers(0, 16))
        moment = fresh._replace(values=buffer[offset : offset + n])
        write_moment(
            moment, values.abs_().numpy() if nonnegative else values.numpy(), signed=not nonnegative
        )
        if kind is MomentFormat.INT8 and wild and self.random.integers(0, 2):
            moment.values.copy_(torch.from_numpy(self.random.integers(0, 256, n, dtype=np.uint8)))
        return moment

    def update_state(
        self, n: int, layout: str, rule_params: RuleParams, kind: MomentFormat, *, wild: bool = True
    ) -> State:
        """Return the state of `n` elements for a rule, all tensors at random offsets."""
        master = self.floats(n, torch.float32, wild=wild)
        moments = [
            self.moment(n, kind, nonnegative=nonnegative, wild=wild)
            for nonnegative in rule_params.nonnegative[: rule_params.num_moments]
        ]
        if layout == "fp32":
            return State(master, None, moments)
        if layout == "fp16":
            return State(self.floats(n, torch.float16, wild=wild), master, moments)
        weight, residual, _, _ = self.state(n, split=True, wild=wild)
        assert weight is not None
        return State(weight, residual, moments)


@dataclass
class State:
    """Tensors that an update changes."""

    weight: torch.Tensor
    master_state: torch.Tensor | None
    moments: list[Moment]

    def copy(self) -> State:
        """Return a copy with the same alignments."""
        weight = copy_aligned(self.weight)
        assert weight is not None
        moments = [
            moment._replace(values=copy_aligned(moment.values), scales=copy_aligned(moment.scales))
            for moment in self.moments
        ]
        return State(weight, copy_aligned(self.master_state), moments)

    def part(self, first: int, end: int) -> State:
        """Return elements [first, end), as views."""
        master_state = None if self.master_state is None else self.master_state[first:end]
        moments = [m.part(first, end) for m in self.moments]
        return State(self.weight[first:end], master_state, moments)

    @property
    def tensors(self) -> list[torch.Tensor | None]:
        return [
            self.weight,
            self.master_state,
            *(t for m in self.moments for t in (m.values, m.scales)),
        ]


def fp32_moments(state: list[torch.Tensor | None]) -> list[Moment]:
    """Return the moments of a result of `Source.state`, as the kernels take them."""
    return [Moment(tensor) for tensor in state[2:] if tensor is not None]


def bits(tensor: torch.Tensor) -> np.ndarray:
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.itemsize]
    return tensor.view(kind).numpy()


def storage_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of the entire storage of `tensor`, to detect writes outside of it."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


def copy_aligned(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """Return a copy with the same storage offset, hence the same alignment."""
    if tensor is None:
        return None
    storage = tensor.untyped_storage().clone()
    empty = torch.empty(0, dtype=tensor.dtype)
    return empty.set_(storage, tensor.storage_offset(), tensor.shape)


def assert_same(got: list[torch.Tensor | None], want: list[torch.Tensor | None]) -> None:
    for one, other in zip(got, want, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            np.testing.assert_array_equal(storage_bytes(one).numpy(), storage_bytes(other).numpy())


def equal_or_both_nan(one: torch.Tensor, other: torch.Tensor) -> bool:
    same = torch.from_numpy(bits(one) == bits(other))
    return bool((same | (one.isnan() & other.isnan())).all())


def update_piece(kernels: CpuKernels, *piece: Any, **more: Any) -> None:
    """Run one update of one piece, given the arguments of `Piece`."""
    kernels.update_all([Piece(*piece, **more)])
