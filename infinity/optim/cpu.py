"""The optimizer kernels on torch CPU tensors: checks dtypes and sizes, then passes addresses.

Every tensor is 1-D, contiguous and on the CPU. The maths is in `adamw.py`, the loops in csrc/adam.
Results do not depend on `num_threads` or `isa`. Must not know units, tiers or files.
"""

from __future__ import annotations

from functools import lru_cache
from types import TracebackType
from typing import Self

import torch

from infinity import _adam
from infinity.errors import ConfigError, EngineClosedError, InfinityError, PresenceError
from infinity.optim.adamw import AdamHyper, scalars

_CODES = {torch.bfloat16: _adam.BF16, torch.float32: _adam.FP32}
_FLOATS = tuple(_CODES)
_scalars = lru_cache(maxsize=32)(scalars)  # a step has thousands of segments, one set of scalars


class CpuKernels:
    """One thread pool and its kernels; may be used from several threads at once."""

    def __init__(self, num_threads: int = 0, isa: str = "auto") -> None:
        try:
            self._pool = _adam.Pool(num_threads=num_threads, isa=isa)
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

    def update(
        self,
        weight: torch.Tensor,
        residual: torch.Tensor | None,
        moment1: torch.Tensor,
        moment2: torch.Tensor,
        gradient: torch.Tensor,
        hyper: AdamHyper,
        step: int,
        grad_scale: float = 1.0,
    ) -> None:
        """One step in place: bf16 weight with its residual, or an fp32 weight with None."""
        n = weight.numel()
        half = torch.float32 if residual is None else torch.bfloat16
        self._check("weight", weight, n, (half,))
        if residual is not None:
            self._check("residual", residual, n, (torch.int16,))
        self._check("moment1", moment1, n, (torch.float32,))
        self._check("moment2", moment2, n, (torch.float32,))
        self._check("gradient", gradient, n, _FLOATS)
        if n == 0:
            return
        self._pool.adam(
            n=n,
            weight=weight.data_ptr(),
            residual=0 if residual is None else residual.data_ptr(),
            moment1=moment1.data_ptr(),
            moment2=moment2.data_ptr(),
            gradient=gradient.data_ptr(),
            gradient_dtype=_CODES[gradient.dtype],
            scalars=_scalars(hyper, step, grad_scale),
        )

    def accumulate(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """`target += source`, added in fp32; a bf16 target is rounded to nearest even."""
        n = target.numel()
        self._check("target", target, n, _FLOATS)
        self._check("source", source, n, _FLOATS)
        _check_apart(target, source)
        self._pool.accumulate(
            n=n,
            target=target.data_ptr(),
            target_dtype=_CODES[target.dtype],
            source=source.data_ptr(),
            source_dtype=_CODES[source.dtype],
        )

    def convert(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """`target = source` with torch's rounding (to nearest even) where it narrows."""
        n = target.numel()
        self._check("target", target, n, _FLOATS)
        self._check("source", source, n, _FLOATS)
        _check_apart(target, source)
        self._pool.convert(
            n=n,
            target=target.data_ptr(),
            target_dtype=_CODES[target.dtype],
            source=source.data_ptr(),
            source_dtype=_CODES[source.dtype],
        )

    def square_sum(self, tensor: torch.Tensor) -> float:
        """Sum of squares in fp64 over a fixed tree; inf or nan if any element is."""
        n = tensor.numel()
        self._check("tensor", tensor, n, _FLOATS)
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
        for name, tensor in (("target", target), ("source", source)):
            self._check(name, tensor, tensor.numel(), None)
        if target.nbytes != source.nbytes:
            raise ConfigError(f"target has {target.nbytes} bytes, source {source.nbytes}")
        _check_apart(target, source)
        self._pool.copy(nbytes=target.nbytes, target=target.data_ptr(), source=source.data_ptr())

    def close(self) -> None:
        """Join the threads; idempotent. Later calls raise EngineClosedError."""
        self._closed = True
        self._pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _check_halves(
        self, master: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor
    ) -> int:
        n = master.numel()
        self._check("master", master, n, (torch.float32,))
        self._check("weight", weight, n, (torch.bfloat16,))
        self._check("residual", residual, n, (torch.int16,))
        return n

    def _check(
        self, name: str, tensor: torch.Tensor, n: int, dtypes: tuple[torch.dtype, ...] | None
    ) -> None:
        if self._closed:
            raise EngineClosedError("this CpuKernels is closed")
        if (
            tensor.is_cpu
            and (dtypes is None or tensor.dtype in dtypes)
            and tensor.dim() == 1
            and tensor.is_contiguous()
            and tensor.numel() == n
        ):
            return
        raise _refusal(name, tensor, n, dtypes)


def _refusal(
    name: str, tensor: torch.Tensor, n: int, dtypes: tuple[torch.dtype, ...] | None
) -> InfinityError:
    if not tensor.is_cpu:
        return PresenceError(f"{name} is on {tensor.device}", remedy="copy it to the host")
    if dtypes is not None and tensor.dtype not in dtypes:
        wanted = " or ".join(str(dtype) for dtype in dtypes)
        return ConfigError(f"{name} has dtype {tensor.dtype}", remedy=wanted)
    if tensor.dim() != 1 or not tensor.is_contiguous():
        return PresenceError(
            f"{name} has shape {tuple(tensor.shape)} and strides {tensor.stride()}",
            because="the kernels walk one contiguous range",
            remedy="pass a contiguous 1-D tensor (an absent parameter is neither)",
        )
    return ConfigError(f"{name} has {tensor.numel()} elements, expected {n}")


def _check_apart(target: torch.Tensor, source: torch.Tensor) -> None:
    first, second = target.data_ptr(), source.data_ptr()
    if first < second + source.nbytes and second < first + target.nbytes:
        raise ConfigError("target and source overlap in memory")
