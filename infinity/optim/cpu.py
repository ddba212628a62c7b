"""The optimizer kernels on torch CPU tensors: checks dtypes and sizes, then passes addresses.

Every tensor is 1-D, contiguous and on the CPU. The maths is in `reference.py`, the loops in
csrc/adam.
Results do not depend on `num_threads` or `isa`. Must not know units, tiers or files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, Self

import torch

from infinity import _adam
from infinity.errors import ConfigError, EngineClosedError
from infinity.formats import MOMENT_BLOCK, MomentFormat
from infinity.optim.checks import (
    FLOATS,
    MAX_64_BITS,
    check_apart,
    check_moment,
    check_piece,
    check_tensor,
)
from infinity.optim.moments import Moment
from infinity.optim.rules import Hyper

_CODES = {
    torch.bfloat16: _adam.BF16,
    torch.float32: _adam.FP32,
    torch.float16: _adam.FP16,
}
_FORMATS = {
    MomentFormat.FP32: 0,
    MomentFormat.BF16: 1,
    MomentFormat.BF16_STOCHASTIC: 2,
    MomentFormat.INT8: 3,
}
_LAYOUTS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # by the weight's dtype
_HOST = torch.device("cpu")
_FP32, _INT8 = MomentFormat.FP32, MomentFormat.INT8


class Piece(NamedTuple):
    """One contiguous range of one parameter and everything an update of it depends on.

    `weight` and `rest` are fp32 and None, bf16 and the int16 residual, or fp16 and the fp32 master.
    `gradient` is fp32, bf16 or fp16 and is multiplied by `grad_scale` first. `step` counts from 1.
    `first` is the index of the first element in its parameter (8 bits: a multiple of MOMENT_BLOCK)
    and `key` 64 bits that name parameter and step: together they seed stochastic rounding, so that
    the result does not depend on how a parameter is cut.
    """

    weight: torch.Tensor
    rest: torch.Tensor | None
    moments: Sequence[Moment]
    gradient: torch.Tensor
    hyper: Hyper
    step: int
    grad_scale: float = 1.0
    key: int = 0
    first: int = 0


class CpuKernels:
    """One thread pool and its kernels; may be used from several threads at once."""

    def __init__(self, num_threads: int = 0, isa: str = "auto", root: Path = Path("/")) -> None:
        """`num_threads` counts the caller; 0 is every CPU in the affinity mask.

        `root` is where /sys is looked for (memory nodes); a test hands in a made-up machine.
        """
        try:
            self._pool = _adam.Pool(num_threads=num_threads, isa=isa, root=str(root))
        except ValueError as error:
            raise ConfigError(str(error)) from error
        self._closed = False

    @property
    def num_threads(self) -> int:
        """Threads that compute one large call, the caller's included."""
        return self._pool.num_threads

    @property
    def isa(self) -> str:
        """The instruction set in use."""
        return self._pool.isa

    @property
    def nodes(self) -> list[list[int]]:
        """The CPUs of each memory node; on more than one, the workers are spread and pinned."""
        return self._pool.nodes

    def update(
        self,
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
        """One step in place, in one pass over memory; the arguments are those of `Piece`."""
        piece = Piece(weight, rest, moments, gradient, hyper, step, grad_scale, key, first)
        self._pool.update(self._checked((piece,)))

    def update_all(self, pieces: Iterable[Piece]) -> None:
        """Update many pieces as one job: for many small parameters this is the fast call.

        All pieces are checked before any byte is touched. No two may share memory.
        """
        self._pool.update(self._checked(list(pieces)))

    def prepare(self, pieces: Iterable[Piece]) -> list[_adam.Piece]:
        """Check pieces now and update them later, with `update_prepared` and as often as wanted.

        Only addresses are kept: the caller keeps the tensors alive and does not move them.
        """
        return self._checked(list(pieces))

    def update_prepared(self, pieces: list[_adam.Piece]) -> None:
        """One step of pieces that `prepare` has checked."""
        self._require_open()
        self._pool.update(pieces)

    def stream(self, pieces: list[_adam.Piece]) -> None:
        """Move the bytes that an update of `pieces` moves and change none: the limit of speed."""
        self._require_open()
        self._pool.stream(pieces)

    def encode(self, values: torch.Tensor, moment: Moment, *, signed: bool) -> None:
        """Write fp32 `values` into a moment, rounded to nearest; `signed` is false for squares."""
        self._code(self._pool.encode, values, moment, signed)

    def decode(self, moment: Moment, values: torch.Tensor, *, signed: bool) -> None:
        """Write what a moment stands for into fp32 `values`."""
        self._code(self._pool.decode, values, moment, signed)

    def accumulate(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """`target += source`, added in fp32; a 16-bit target is rounded to nearest even."""
        n = self._check_pair(target, source)
        self._pool.accumulate(
            n=n,
            target=target.data_ptr(),
            target_dtype=_CODES[target.dtype],
            source=source.data_ptr(),
            source_dtype=_CODES[source.dtype],
        )

    def convert(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """`target = source` with torch's rounding (to nearest even) where it narrows."""
        n = self._check_pair(target, source)
        self._pool.convert(
            n=n,
            target=target.data_ptr(),
            target_dtype=_CODES[target.dtype],
            source=source.data_ptr(),
            source_dtype=_CODES[source.dtype],
        )

    def square_sum(self, tensor: torch.Tensor) -> float:
        """Sum of squares in fp64 over a fixed tree; inf or nan if any element is."""
        self._require_open()
        n = tensor.numel()
        check_tensor("tensor", tensor, n, FLOATS, _HOST)
        return self._pool.square_sum(
            n=n, source=tensor.data_ptr(), source_dtype=_CODES[tensor.dtype]
        )

    def split(self, master: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor) -> None:
        """Write the fp32 `master` as bf16 `weight` and int16 `residual`, losslessly."""
        n = self._check_halves(master, weight, residual)
        self._pool.split(
            n=n,
            master=master.data_ptr(),
            weight=weight.data_ptr(),
            residual=residual.data_ptr(),
        )

    def join(self, weight: torch.Tensor, residual: torch.Tensor, master: torch.Tensor) -> None:
        """Write the fp32 `master` that `weight` and `residual` stand for."""
        n = self._check_halves(master, weight, residual)
        self._pool.join(
            n=n,
            weight=weight.data_ptr(),
            residual=residual.data_ptr(),
            master=master.data_ptr(),
        )

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy bytes between tensors of any dtypes; sizes in bytes must agree."""
        self._require_open()
        for name, tensor in (("target", target), ("source", source)):
            check_tensor(name, tensor, tensor.numel(), (tensor.dtype,), _HOST)
        if target.nbytes != source.nbytes:
            raise ConfigError(f"target has {target.nbytes} bytes, source {source.nbytes}")
        check_apart(target, source)
        self._pool.copy(nbytes=target.nbytes, target=target.data_ptr(), source=source.data_ptr())

    def close(self) -> None:
        """Join the threads; idempotent. Later calls raise EngineClosedError."""
        self._closed = True
        self._pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _checked(self, pieces: Sequence[Piece]) -> list[_adam.Piece]:
        """Return what the native side takes, or raise before any byte is touched."""
        self._require_open()
        made = []
        hyper: Hyper | None = None
        step, grad_scale = 0, 0.0
        scalars: list[float] = []
        for piece in pieces:
            if not _is_plain(piece):
                check_piece(piece, _HOST)
            if piece.hyper is not hyper or piece.step != step or piece.grad_scale != grad_scale:
                hyper, step, grad_scale = piece.hyper, piece.step, piece.grad_scale
                scalars = list(hyper.scalars(step, grad_scale))
            made.append(_native(piece, scalars))
        if len(made) > 1:  # inside a piece, its constructor has looked
            try:
                _adam.check_apart(made)
            except ValueError as error:
                raise ConfigError(str(error)) from error
        return made

    def _code(
        self, kernel: Callable[..., None], values: torch.Tensor, moment: Moment, signed: bool
    ) -> None:
        self._require_open()
        n = values.numel()
        check_tensor("values", values, n, (torch.float32,), _HOST)
        check_moment("moment", moment, n, _HOST)
        scales = moment.scales if moment.format is MomentFormat.INT8 else None
        for tensor in (moment.values, scales):
            if tensor is not None:
                check_apart(values, tensor)
        kernel(
            n=n,
            values=values.data_ptr(),
            moment=moment.values.data_ptr(),
            scales=0 if scales is None else scales.data_ptr(),
            format=_FORMATS[moment.format],
            is_signed=signed,
        )

    def _check_halves(
        self, master: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor
    ) -> int:
        self._require_open()
        n = master.numel()
        check_tensor("master", master, n, (torch.float32,), _HOST)
        check_tensor("weight", weight, n, (torch.bfloat16,), _HOST)
        check_tensor("residual", residual, n, (torch.int16,), _HOST)
        return n

    def _check_pair(self, target: torch.Tensor, source: torch.Tensor) -> int:
        self._require_open()
        n = target.numel()
        check_tensor("target", target, n, FLOATS, _HOST)
        check_tensor("source", source, n, FLOATS, _HOST)
        check_apart(target, source)
        return n

    def _require_open(self) -> None:
        if self._closed:
            raise EngineClosedError("this CpuKernels is closed")


def _is_plain(piece: Piece) -> bool:
    """Whether a piece is surely good: quicker than `check_piece`, which has the last word."""
    weight, rest, moments, gradient, hyper, _, _, key, first = piece
    n = weight.numel()
    if rest is None:
        fits = weight.dtype is torch.float32
    else:
        fits = weight.dtype is torch.bfloat16 and _fits(rest, n, torch.int16)
    for values, scales, kind in moments:
        if kind is _FP32:
            fits = fits and _fits(values, n, torch.float32)
        else:
            fits = (
                fits
                and kind is _INT8
                and scales is not None
                and _fits(values, n, torch.uint8)
                and _fits(scales, -(-n // MOMENT_BLOCK), torch.float32)
                and first % MOMENT_BLOCK == 0
            )
        fits = fits and kind is moments[0].format
    return (
        fits
        and _fits(weight, n, weight.dtype)
        and gradient.dtype in _CODES
        and _fits(gradient, n, gradient.dtype)
        and len(moments) == hyper.num_moments
        and 0 <= key <= MAX_64_BITS
        and 0 <= first <= MAX_64_BITS
    )


def _fits(tensor: torch.Tensor, n: int, dtype: torch.dtype) -> bool:
    return (
        tensor.dtype is dtype
        and tensor.is_cpu
        and tensor.numel() == n
        and tensor.dim() == 1
        and tensor.is_contiguous()
    )


def _native(piece: Piece, scalars: list[float]) -> _adam.Piece:
    weight, rest, moments, gradient, hyper, _, _, key, first = piece
    addresses = [0, 0, 0, 0]  # of values and scales, moment by moment
    format_code = 0
    for index, moment in enumerate(moments):
        addresses[2 * index] = moment.values.data_ptr()
        if moment.format is not _FP32:
            format_code = _FORMATS[moment.format]
            if moment.scales is not None:
                addresses[2 * index + 1] = moment.scales.data_ptr()
    moment1, scales1, moment2, scales2 = addresses
    try:
        return _adam.Piece(
            weight.numel(),
            hyper.rule,
            _LAYOUTS[weight.dtype],
            format_code,
            _CODES[gradient.dtype],
            key,
            first,
            weight.data_ptr(),
            0 if rest is None else rest.data_ptr(),
            moment1,
            scales1,
            moment2,
            scales2,
            gradient.data_ptr(),
            scalars,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error
