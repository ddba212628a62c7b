"""Optimizer kernels on torch CPU tensors: checks dtypes and sizes, then passes addresses.

Every tensor is 1-D, contiguous and on the CPU. The loops are in csrc/adam; the reference
implementation is numpy (`tests/support/reference.py`). Results do not depend on `num_threads` or
`isa`. Must not know units, tiers or files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, Self

import torch

import infinity._adam as _adam
from infinity.errors import ConfigError, EngineClosedError, InfinityError, ResidencyError
from infinity.optim.moments import MASTER_STATE_DTYPES, VALUE_DTYPES, Moment
from infinity.optim.muon import step_matrices_of_stack
from infinity.optim.rules import Muon, RuleParams
from infinity.plan.layout import SQUARE_BLOCK
from infinity.types import MOMENT_BLOCK, MomentFormat

FLOATS = tuple(MASTER_STATE_DTYPES)  # dtypes of weights and gradients
_HOST = torch.device("cpu")
_MAX_64_BITS = 2**64 - 1
# Codes of the native module.
_RULES = {name: code for code, name in enumerate(_adam.rules())}
_CODES = {torch.bfloat16: _adam.BF16, torch.float32: _adam.FP32, torch.float16: _adam.FP16}
_LAYOUTS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # by the weight's dtype
_FORMAT_ORDER = tuple(MomentFormat)
# DLPack's C functions: they read a tensor's metadata ten times faster than its methods.
_DLPACK_API = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)

Setting = tuple[int, int, list[float]]  # rule, number of moments, scalars of the step

# Argument checks, before any byte is modified. Kernels get raw addresses, so device, dtype, size
# and contiguity of a tensor are checked here; the native module checks that memory which is written
# overlaps no other argument.


def check_tensor(
    name: str, tensor: torch.Tensor, n: int, dtypes: tuple[torch.dtype, ...], device: torch.device
) -> None:
    """Raise unless `tensor` is 1-D and contiguous, with `n` elements of one of `dtypes`."""
    if (
        tensor.device == device
        and tensor.dtype in dtypes
        and tensor.dim() == 1
        and tensor.is_contiguous()
        and tensor.numel() == n
    ):
        return
    raise _tensor_error(name, tensor, n, dtypes, device)


def check_piece(piece: Piece, device: torch.device) -> None:
    """Raise unless dtypes, sizes and formats of a piece are consistent."""
    weight, master_state, moments, gradient, rule_params, _, _, key, first = piece
    n = weight.numel()
    check_tensor("weight", weight, n, FLOATS, device)
    expected_dtype = MASTER_STATE_DTYPES[weight.dtype]
    if (master_state is None) != (expected_dtype is None):
        actual = "missing" if master_state is None else master_state.dtype
        raise ConfigError(
            f"weight is {weight.dtype} and master_state is {actual}",
            remedy="fp32 and None, bf16 and int16, or fp16 and fp32",
        )
    if master_state is not None and expected_dtype is not None:
        check_tensor("master_state", master_state, n, (expected_dtype,), device)
    check_tensor("gradient", gradient, n, FLOATS, device)
    if len(moments) != rule_params.num_moments:
        raise ConfigError(
            f"{len(moments)} moments for {rule_params}", remedy=f"{rule_params.num_moments} moments"
        )
    if not (0 <= key <= _MAX_64_BITS and 0 <= first <= _MAX_64_BITS):
        raise ConfigError(f"key {key} or first {first} is not a number of 64 bits")
    for number, moment in enumerate(moments, 1):
        check_moment(f"moment {number}", moment, n, device)
        if moment.format is not moments[0].format:
            raise ConfigError("the moments of one parameter have different formats")
        if moment.format is MomentFormat.INT8 and first % MOMENT_BLOCK:
            raise ConfigError(
                f"moment {number} is 8-bit and begins at element {first}",
                because=f"{MOMENT_BLOCK} elements share a scale",
                remedy=f"a multiple of {MOMENT_BLOCK}",
            )


def check_moment(name: str, moment: Moment, n: int, device: torch.device) -> None:
    """Raise unless the tensors of a moment of `n` elements match its format."""
    dtypes: tuple[torch.dtype, ...] = (VALUE_DTYPES[moment.format],)
    if torch.bfloat16 in dtypes:
        dtypes = (torch.bfloat16, torch.int16)
    check_tensor(name, moment.values, n, dtypes, device)
    if moment.format is not MomentFormat.INT8:
        return
    if moment.scales is None:
        raise ConfigError(f"{name} is 8-bit and has no scales", remedy="Moment.zeros")
    num_scales = MomentFormat.INT8.num_scales(n)
    check_tensor(f"{name}'s scales", moment.scales, num_scales, (torch.float32,), device)


def check_apart(target: torch.Tensor, source: torch.Tensor) -> None:
    """Raise if two tensors share memory."""
    first, second = target.data_ptr(), source.data_ptr()
    if first < second + source.nbytes and second < first + target.nbytes:
        raise ConfigError("two arguments overlap in memory")


def _tensor_error(
    name: str, tensor: torch.Tensor, n: int, dtypes: tuple[torch.dtype, ...], device: torch.device
) -> InfinityError:
    if tensor.device != device:
        where = "the host" if device.type == "cpu" else str(device)
        return ResidencyError(f"{name} is on {tensor.device}", remedy=f"copy it to {where}")
    if tensor.dtype not in dtypes:
        expected = " or ".join(str(dtype) for dtype in dtypes)
        return ConfigError(f"{name} has dtype {tensor.dtype}", remedy=expected)
    if tensor.dim() != 1 or not tensor.is_contiguous():
        return ResidencyError(
            f"{name} has shape {tuple(tensor.shape)} and strides {tensor.stride()}",
            because="the kernels walk one contiguous range",
            remedy="pass a contiguous 1-D tensor (an offloaded parameter is neither)",
        )
    return ConfigError(f"{name} has {tensor.numel()} elements, expected {n}")


class Piece(NamedTuple):
    """One contiguous range of one parameter, with all inputs of its update.

    `weight` and `master_state` are fp32 and None, bf16 and the int16 residual, or fp16 and the fp32
    master. `gradient` is fp32, bf16 or fp16 and is multiplied by `grad_scale` first. `step` counts
    from 1. `first` is the index of the first element in its parameter (a multiple of MOMENT_BLOCK
    for 8-bit moments), `key` a 64-bit hash of parameter and step. Both seed stochastic rounding, so
    that the result does not depend on how a parameter is cut.
    """

    weight: torch.Tensor
    master_state: torch.Tensor | None
    moments: Sequence[Moment]
    gradient: torch.Tensor
    rule_params: RuleParams
    step: int
    grad_scale: float = 1.0
    key: int = 0
    first: int = 0


class CpuKernels:
    """A thread pool and its kernels; thread-safe."""

    def __init__(self, num_threads: int = 0, isa: str = "auto", root: Path = Path("/")) -> None:
        """Start the threads.

        `num_threads` includes the calling thread; 0 means all CPUs of the affinity mask. `root` is
        the directory of `sys/`, where memory nodes are looked up; tests pass a fake one.
        """
        try:
            self.pool = _adam.Pool(num_threads=num_threads, isa=isa, root=str(root))
        except ValueError as error:
            raise ConfigError(str(error)) from error
        self._closed = False

    @property
    def num_threads(self) -> int:
        """Threads that compute one large call, including the calling thread."""
        return self.pool.num_threads

    @property
    def isa(self) -> str:
        """The instruction set in use."""
        return self.pool.isa

    def update_all(self, pieces: Iterable[Piece]) -> None:
        """Update all pieces in place, as one job, each in one pass over memory.

        All pieces are checked before any byte is modified. No two may share memory. Matrices, for
        which there is no kernel, are updated by torch, with its threads.
        """
        elementwise, matrices = split_by_kernel(pieces)
        self.pool.update(self.prepare(elementwise))
        step_matrices(matrices)

    def prepare(self, pieces: list[Piece]) -> list[_adam.Piece]:
        """Return native pieces for `pool.update`; raises if any piece is invalid.

        They hold addresses only: the caller keeps the tensors alive and does not move them.
        """
        self._require_open()
        settings = _settings(pieces)
        native = _convert_fast(pieces, settings)
        if native is None:  # a piece is invalid, or not a plain tensor
            native = _convert_checked(pieces, settings, _HOST)
        _check_no_overlaps(native)
        return native

    def encode(self, values: torch.Tensor, moment: Moment, *, signed: bool) -> None:
        """Write fp32 `values` into a moment, rounded to nearest; `signed` is false for squares."""
        self._call_codec(self.pool.encode, values, moment, signed)

    def decode(self, moment: Moment, values: torch.Tensor, *, signed: bool) -> None:
        """Decode a moment into fp32 `values`."""
        self._call_codec(self.pool.decode, values, moment, signed)

    def accumulate(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Compute `target += source` in fp32; a 16-bit target is rounded to nearest even."""
        self._call_pairwise(self.pool.accumulate, target, source)

    def convert(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy `source` to `target`, converted as by torch: rounded to nearest even."""
        self._call_pairwise(self.pool.convert, target, source)

    def square_sum(self, tensor: torch.Tensor) -> float:
        """Return the sum of squares in fp64 over a fixed tree; inf or nan if any element is."""
        self._require_open()
        n = tensor.numel()
        check_tensor("tensor", tensor, n, FLOATS, _HOST)
        return self.pool.square_sum(
            n=n, source=tensor.data_ptr(), source_dtype=_CODES[tensor.dtype]
        )

    def square_blocks(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum of squares (fp64) of each block of `SQUARE_BLOCK` elements.

        `fold_squares` combines them, so a parameter can be summed in slices that end at blocks.
        """
        self._require_open()
        n = tensor.numel()
        check_tensor("tensor", tensor, n, FLOATS, _HOST)
        sums = torch.empty(-(-n // SQUARE_BLOCK), dtype=torch.float64, device="cpu")
        source, dtype = tensor.data_ptr(), _CODES[tensor.dtype]
        self.pool.square_blocks(n=n, source=source, source_dtype=dtype, sums=sums.data_ptr())
        return sums

    def fold_squares(self, blocks: torch.Tensor) -> float:
        """Return the `square_sum` of a tensor from the sums of its blocks (fp64), in order."""
        self._require_open()
        check_tensor("blocks", blocks, blocks.numel(), (torch.float64,), _HOST)
        return self.pool.fold_squares(n=blocks.numel(), sums=blocks.data_ptr())

    def split(self, master: torch.Tensor, weight: torch.Tensor, master_state: torch.Tensor) -> None:
        """Split the fp32 `master` into `weight` and `master_state`, losslessly.

        These are bf16 and the int16 residual, or fp16 (rounded to nearest even) and a copy of the
        master.
        """
        n = self._check_split(master, weight, master_state)
        if weight.dtype is torch.float16:
            self.convert(weight, master)
            self.copy(master_state, master)
            return
        self.pool.split(
            n=n,
            master=master.data_ptr(),
            weight=weight.data_ptr(),
            residual=master_state.data_ptr(),
        )

    def join(self, weight: torch.Tensor, master_state: torch.Tensor, master: torch.Tensor) -> None:
        """Compute the fp32 `master` from `weight` and `master_state`; the inverse of `split`."""
        n = self._check_split(master, weight, master_state)
        if weight.dtype is torch.float16:
            self.copy(master, master_state)
            return
        self.pool.join(
            n=n,
            weight=weight.data_ptr(),
            residual=master_state.data_ptr(),
            master=master.data_ptr(),
        )

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy bytes between tensors of any dtypes and equal sizes in bytes."""
        self._require_open()
        for name, tensor in (("target", target), ("source", source)):
            check_tensor(name, tensor, tensor.numel(), (tensor.dtype,), _HOST)
        if target.nbytes != source.nbytes:
            raise ConfigError(f"target has {target.nbytes} bytes, source {source.nbytes}")
        check_apart(target, source)
        self.pool.copy(nbytes=target.nbytes, target=target.data_ptr(), source=source.data_ptr())

    def close(self) -> None:
        """Join the threads; idempotent. Later calls raise EngineClosedError."""
        self._closed = True
        self.pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _call_codec(
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
            format=_FORMAT_ORDER.index(moment.format),
            is_signed=signed,
        )

    def _check_split(
        self, master: torch.Tensor, weight: torch.Tensor, master_state: torch.Tensor
    ) -> int:
        self._require_open()
        n = master.numel()
        check_tensor("master", master, n, (torch.float32,), _HOST)
        check_tensor("weight", weight, n, (torch.bfloat16, torch.float16), _HOST)
        state_dtype = MASTER_STATE_DTYPES[weight.dtype]
        assert state_dtype is not None
        check_tensor("master_state", master_state, n, (state_dtype,), _HOST)
        return n

    def _call_pairwise(
        self, kernel: Callable[..., None], target: torch.Tensor, source: torch.Tensor
    ) -> None:
        self._require_open()
        n = target.numel()
        check_tensor("target", target, n, FLOATS, _HOST)
        check_tensor("source", source, n, FLOATS, _HOST)
        check_apart(target, source)
        kernel(
            n=n,
            target=target.data_ptr(),
            target_dtype=_CODES[target.dtype],
            source=source.data_ptr(),
            source_dtype=_CODES[source.dtype],
        )

    def _require_open(self) -> None:
        if self._closed:
            raise EngineClosedError("this CpuKernels is closed")


def split_by_kernel(pieces: Iterable[Piece]) -> tuple[list[Piece], list[Piece]]:
    """Split into (pieces with a kernel, full matrices that torch operations update)."""
    all_pieces = list(pieces)
    kernels = [piece for piece in all_pieces if piece.rule_params.kernel]
    return kernels, [piece for piece in all_pieces if not piece.rule_params.kernel]


def step_matrices(pieces: Iterable[Piece]) -> None:
    """Update matrices, or stacks of them, on their device and torch's current stream."""
    for weight, master_state, moments, gradient, rule_params, _, grad_scale, _, _ in pieces:
        assert isinstance(rule_params, Muon)
        with torch.no_grad():
            step_matrices_of_stack(weight, master_state, moments, gradient, rule_params, grad_scale)


def check_pieces(pieces: list[Piece], device: torch.device) -> None:
    """Raise unless each piece is valid and no two share memory."""
    _check_no_overlaps(_convert_checked(pieces, _settings(pieces), device))


def _convert_checked(
    pieces: list[Piece], settings: list[Setting], device: torch.device
) -> list[_adam.Piece]:
    """Convert to native pieces with all checks; raises for the first invalid piece."""
    for piece in pieces:
        check_piece(piece, device)
    return [_native_piece(*pair) for pair in zip(pieces, settings, strict=True)]


def _check_no_overlaps(pieces: list[_adam.Piece]) -> None:
    if len(pieces) > 1:  # the constructor has checked each piece separately
        try:
            _adam.check_apart(pieces)
        except ValueError as error:
            raise ConfigError(str(error)) from error


def _settings(pieces: list[Piece]) -> list[Setting]:
    """Return the setting of each piece; computed once for consecutive pieces that share it."""
    settings = []
    setting: Setting = (0, 0, [])
    rule_params: RuleParams | None = None
    step, grad_scale = 0, 0.0
    for piece in pieces:
        _, _, _, _, piece_params, piece_step, piece_scale, _, _ = piece
        if piece_params is not rule_params or piece_step != step or piece_scale != grad_scale:
            rule_params, step, grad_scale = piece_params, piece_step, piece_scale
            setting = (
                _RULES[piece_params.kernel],
                piece_params.num_moments,
                list(piece_params.scalars(step, grad_scale)),
            )
        settings.append(setting)
    return settings


def _convert_fast(pieces: list[Piece], settings: list[Setting]) -> list[_adam.Piece] | None:
    """Convert to native pieces by the fast path; None if any piece needs the full checks."""
    if _DLPACK_API is None:
        return None
    return _adam.read_pieces(pieces, settings, _FORMAT_ORDER, torch.Tensor, _DLPACK_API)


def _native_piece(piece: Piece, setting: Setting) -> _adam.Piece:
    weight, master_state, moments, gradient, _, _, _, key, first = piece
    rule, _, scalars = setting
    stored = [tensor for moment in moments for tensor in (moment.values, moment.scales)]
    addresses = [0 if tensor is None else tensor.data_ptr() for tensor in stored]
    moment1, scales1, moment2, scales2 = addresses + [0] * (4 - len(addresses))
    format_code = _FORMAT_ORDER.index(moments[0].format) if moments else 0
    try:
        return _adam.Piece(
            weight.numel(),
            rule,
            _LAYOUTS[weight.dtype],
            format_code,
            _CODES[gradient.dtype],
            key,
            first,
            weight.data_ptr(),
            0 if master_state is None else master_state.data_ptr(),
            moment1,
            scales1,
            moment2,
            scales2,
            gradient.data_ptr(),
            scalars,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error
