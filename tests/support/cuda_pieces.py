"""Updates of every layout and format for the tests of the CUDA kernels, each in one byte buffer.

A `PieceBuffer` holds all tensors of a `Piece`, at chosen offsets, with random bytes between them.
Buffers are copied and compared as a unit, so a write outside of a tensor is detected, and a copy on
another device has the same alignments.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import torch
from support.adam_values import HYPERS as ALL_HYPERS
from support.rounding import split_master
from torch import Tensor

from infinity.optim.cpu import Piece
from infinity.optim.moments import VALUE_DTYPES, Moment
from infinity.optim.rules import RuleParams
from infinity.types import MomentFormat

FP32, BF16, FP16 = FLOATS = (torch.float32, torch.bfloat16, torch.float16)
FORMATS = tuple(MomentFormat)
REST = {FP32: None, BF16: torch.int16, FP16: FP32}
# Hyper-parameters by kernel: entries of a tuple differ in scalars only, hence share a launch table.
HYPERS: dict[str, tuple[RuleParams, ...]] = {
    kernel: tuple(rule_params for rule_params in ALL_HYPERS if rule_params.kernel == kernel)
    for kernel in dict.fromkeys(rule_params.kernel for rule_params in ALL_HYPERS)
}
_PATTERNS = "0 1 7fff 8000 7fffff 800000 3f7fffff 3f800000 3f808000 7f7fffff 7f800000 7fc00000"
_SPECIAL = np.array([int(pattern, 16) for pattern in _PATTERNS.split()], dtype=np.uint32)
_SPECIAL = np.concatenate([_SPECIAL, _SPECIAL | np.uint32(0x80000000)])


@dataclass
class PieceBuffer:
    """Buffer with all tensors of a `Piece`, and its other arguments."""

    storage: Tensor  # uint8
    places: dict[str, tuple[int, int, torch.dtype]]  # name -> first byte, number of bytes, dtype
    format: MomentFormat
    rule_params: RuleParams
    step: int
    grad_scale: float
    key: int
    first: int

    def __getitem__(self, name: str) -> Tensor | None:
        if name not in self.places:
            return None
        start, nbytes, dtype = self.places[name]
        return self.storage[start : start + nbytes].view(dtype)

    @property
    def piece(self) -> Piece:
        weight, gradient = self["weight"], self["gradient"]
        assert weight is not None
        assert gradient is not None
        moments = []
        for k in range(self.rule_params.num_moments):
            values = self[f"moment{k}"]
            assert values is not None
            moments.append(Moment(values, self[f"scales{k}"], self.format))
        return Piece(
            weight,
            self["master_state"],
            moments,
            gradient,
            self.rule_params,
            self.step,
            self.grad_scale,
            self.key,
            self.first,
        )

    def copy(self, device: torch.device | str = "cpu") -> PieceBuffer:
        values = dict(self.__dict__)
        return PieceBuffer(**{**values, "storage": self.storage.clone().to(device)})

    def same_bytes(self, other: PieceBuffer) -> bool:
        return torch.equal(self.storage.cpu(), other.storage.cpu())


class PieceBuffers:
    """Factory of buffers with seeded values; with `wild` NaN, infinities and subnormals too."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)

    def make(
        self,
        n: int,
        weight: torch.dtype,
        gradient: torch.dtype,
        rule_params: RuleParams,
        format: MomentFormat,
        *,
        aligned: bool = True,
        wild: bool = True,
        first: int = 0,
    ) -> PieceBuffer:
        tensors = self._weights(n, weight, wild)
        tensors["gradient"] = self._floats(n, gradient, wild)
        for k in range(rule_params.num_moments):
            if format is MomentFormat.INT8:
                tensors[f"moment{k}"] = self._codes(n)
                tensors[f"scales{k}"] = self._scales(format.num_scales(n), wild)
                continue
            values = self._floats(n, VALUE_DTYPES[format], wild)
            tensors[f"moment{k}"] = (
                values.abs() if rule_params.nonnegative[k] and not wild else values
            )
        storage, places = self._pack(tensors, aligned)
        grad_scale = float(self.random.choice([1.0, 0.125, 0.3]))
        step = int(self.random.integers(1, 50))
        key = int(self.random.integers(0, 2**64, dtype=np.uint64))
        return PieceBuffer(storage, places, format, rule_params, step, grad_scale, key, first)

    def _pack(
        self, tensors: dict[str, Tensor], aligned: bool
    ) -> tuple[Tensor, dict[str, tuple[int, int, torch.dtype]]]:
        places, end = {}, 64
        for name, tensor in tensors.items():
            if not aligned:
                end += tensor.element_size() * int(self.random.integers(1, 4))
            places[name] = (end, tensor.nbytes, tensor.dtype)
            end = -(-(end + tensor.nbytes + 1) // 64) * 64
        storage = torch.from_numpy(self.random.integers(0, 256, end + 64, dtype=np.uint8))
        for name, tensor in tensors.items():
            start, nbytes, _ = places[name]
            storage[start : start + nbytes] = tensor.view(torch.uint8)
        return storage, places

    def _weights(self, n: int, dtype: torch.dtype, wild: bool) -> dict[str, Tensor]:
        master = self._floats(n, FP32, wild)
        if dtype == FP32:
            return {"weight": master}
        if dtype == FP16:  # kernels write the weight but never read it
            return {"weight": self._codes(2 * n).view(FP16), "master_state": master}
        weight, residual = split_master(master)
        return {"weight": weight, "master_state": residual}

    def _floats(self, n: int, dtype: torch.dtype, wild: bool) -> Tensor:
        scale = 10.0 ** float(self.random.integers(-6, 3))
        values = (self.random.standard_normal(n) * scale).astype(np.float32)
        if wild:
            kind = self.random.integers(0, 16, n)
            bits = self.random.integers(0, 2**32, n, dtype=np.uint32)
            special = self.random.choice(_SPECIAL, n)
            mixed = np.where(kind == 0, bits, np.where(kind == 1, special, values.view(np.uint32)))
            values = mixed.astype(np.uint32).view(np.float32)
        if dtype == FP32:
            return torch.from_numpy(values)
        if not wild:
            return torch.from_numpy(values).to(dtype)
        high = (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
        return torch.from_numpy(high.view(np.int16)).view(dtype)  # any 16 bits are a valid number

    def _codes(self, n: int) -> Tensor:
        return torch.from_numpy(self.random.integers(0, 256, n, dtype=np.uint8))

    def _scales(self, n: int, wild: bool) -> Tensor:
        scales = np.exp(self.random.uniform(-40, 5, n)).astype(np.float32)
        if wild:
            kind = self.random.integers(0, 10, n)
            scales = np.where(kind == 0, np.nan, np.where(kind == 1, 0.0, scales))
        return torch.from_numpy(scales.astype(np.float32))


Combination = tuple[str, torch.dtype, torch.dtype, MomentFormat]


def combinations(*, every: bool) -> list[Combination]:
    """Return (rule, weight, gradient, format): the full product, or one covering every pair.

    The selection rotates dtypes against rules and formats, as in a Latin square.
    """
    product = itertools.product(HYPERS, FLOATS, FLOATS, FORMATS)
    rotated = [
        (rule, FLOATS[(r + f) % 3], FLOATS[(r + 2 * f) % 3], format)
        for (r, rule), (f, format) in itertools.product(enumerate(HYPERS), enumerate(FORMATS))
    ]
    chosen = list(product) if every else rotated
    # The format of moments has no effect on a rule without moments.
    return list(
        dict.fromkeys(
            (rule, w, g, f if HYPERS[rule][0].num_moments else MomentFormat.FP32)
            for rule, w, g, f in chosen
        )
    )
