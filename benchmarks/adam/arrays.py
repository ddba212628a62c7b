"""Arrays shared by the contenders of `bench_adam.py`, so that all use the same memory."""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from itertools import pairwise

import torch

from infinity.optim.cpu import CpuKernels, Piece
from infinity.optim.moments import VALUE_DTYPES, Moment
from infinity.optim.rules import AdamW
from infinity.types import MOMENT_BLOCK, MomentFormat

HYPER = AdamW(lr=1e-4, weight_decay=0.01)
STEP = 100
SAMPLE = 1 << 20  # random elements, which the arrays repeat


@dataclass(frozen=True)
class Case:
    """A layout of weights and the format of its moments."""

    layout: str  # fp32, split (bf16 + int16) or fp16 (with an fp32 master)
    moments: MomentFormat

    @property
    def name(self) -> str:
        return f"{self.layout}, {self.moments.value} moments"

    @property
    def weight_dtypes(self) -> tuple[torch.dtype, torch.dtype | None]:
        """Dtypes of the weight and of the remaining bits of its master."""
        return {
            "fp32": (torch.float32, None),
            "split": (torch.bfloat16, torch.int16),
            "fp16": (torch.float16, torch.float32),
        }[self.layout]


CASES = (
    Case("fp32", MomentFormat.FP32),
    Case("split", MomentFormat.FP32),
    Case("fp16", MomentFormat.FP32),
    Case("split", MomentFormat.BF16),
    Case("split", MomentFormat.BF16_STOCHASTIC),
    Case("split", MomentFormat.INT8),
)


def allocate(num_elements: int, dtype: torch.dtype) -> torch.Tensor:
    """Return an uninitialized tensor in a separate mapping, in huge pages if available."""
    nbytes = num_elements * dtype.itemsize
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype)


def fill(target: torch.Tensor, values: torch.Tensor) -> None:
    """Repeat `values` over `target`."""
    for start in range(0, target.numel(), values.numel()):
        piece = target[start : start + values.numel()]
        piece.copy_(values[: piece.numel()])


class Arrays:
    """fp32 Adam state of `n` elements; source of the values in the formats of each case."""

    def __init__(self, n: int, num_pieces: int) -> None:
        self.n = n
        generator = torch.Generator().manual_seed(0)
        self._normal = torch.randn(SAMPLE, generator=generator)
        self.weight = allocate(n, torch.float32)
        self.gradient = allocate(n, torch.float32)
        self.moments = [allocate(n, torch.float32) for _ in range(2)]
        self.copy = allocate(n, torch.bfloat16)  # of the weights, for mixed precision
        spread = torch.exp(torch.randn(SAMPLE, generator=generator))  # scales differ by element
        fill(self.weight, self._normal * 0.02)
        fill(self.gradient, torch.randn(SAMPLE, generator=generator) * spread * 1e-3)
        fill(self.moments[0], self._normal * spread * 3e-4)
        fill(self.moments[1], (spread * 1e-3) ** 2)
        size = max(MOMENT_BLOCK, n // num_pieces // MOMENT_BLOCK * MOMENT_BLOCK)
        marks = [*range(0, size * num_pieces, size), n]
        self.cuts = [(a, b) for a, b in pairwise(marks) if a < b]

    def parts(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return [tensor[first:end] for first, end in self.cuts]

    def pieces(self, case: Case) -> list[Piece]:
        """Return new arrays in the formats of `case`, with the values of the fp32 arrays."""
        dtype, rest_dtype = case.weight_dtypes
        weight, gradient, rest = self.weight, self.gradient, None
        with CpuKernels() as kernels:
            if case.layout != "fp32":
                assert rest_dtype is not None
                weight, rest = allocate(self.n, dtype), allocate(self.n, rest_dtype)
                gradient = allocate(self.n, dtype)
                kernels.convert(gradient, self.gradient)
            if case.layout == "split":
                assert rest is not None
                kernels.split(self.weight, weight, rest)
            elif rest is not None:
                rest.copy_(self.weight)
                kernels.convert(weight, self.weight)
            moments = [self._moment(kernels, k, case.moments) for k in range(2)]
        return [
            Piece(
                weight[first:end],
                None if rest is None else rest[first:end],
                [moment.part(first, end) for moment in moments],
                gradient[first:end],
                HYPER,
                STEP,
                key=number,
            )
            for number, (first, end) in enumerate(self.cuts)
        ]

    def _moment(self, kernels: CpuKernels, k: int, kind: MomentFormat) -> Moment:
        if kind is MomentFormat.FP32:
            return Moment(self.moments[k])
        values = allocate(self.n, VALUE_DTYPES[kind])
        count = kind.num_scales(self.n)
        moment = Moment(values, allocate(count, torch.float32) if count else None, kind)
        kernels.encode(self.moments[k], moment, signed=k == 0)
        return moment
