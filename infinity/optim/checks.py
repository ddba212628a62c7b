"""Refusals of arguments that the optimizer kernels cannot take, before any byte is touched.

The kernels get raw addresses, so everything about a tensor is checked here: device, dtype, size,
contiguity, and that nothing that is written overlaps anything else.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import torch

from infinity.errors import ConfigError, InfinityError, PresenceError
from infinity.formats import MOMENT_BLOCK, MomentFormat
from infinity.optim.moments import VALUE_DTYPES, Moment

if TYPE_CHECKING:
    from infinity.optim.cpu import Piece

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_REST_DTYPES = {torch.float32: None, torch.bfloat16: torch.int16, torch.float16: torch.float32}
MAX_64_BITS = 2**64 - 1
_BF16_FORMATS = (MomentFormat.BF16, MomentFormat.BF16_STOCHASTIC)


def check_tensor(
    name: str,
    tensor: torch.Tensor,
    n: int,
    dtypes: tuple[torch.dtype, ...],
    device: torch.device,
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
    raise _refusal(name, tensor, n, dtypes, device)


def check_piece(piece: Piece, device: torch.device) -> None:
    """Raise unless dtypes, sizes and formats of a piece fit one another."""
    weight, rest, moments, gradient, hyper, _, _, key, first = piece
    n = weight.numel()
    check_tensor("weight", weight, n, tuple(_REST_DTYPES), device)
    rest_dtype = _REST_DTYPES[weight.dtype]
    if (rest is None) != (rest_dtype is None):
        raise ConfigError(
            f"weight is {weight.dtype} and rest is {'missing' if rest is None else rest.dtype}",
            remedy="fp32 and None, bf16 and int16, or fp16 and fp32",
        )
    if rest is not None and rest_dtype is not None:
        check_tensor("rest", rest, n, (rest_dtype,), device)
    check_tensor("gradient", gradient, n, FLOATS, device)
    if len(moments) != hyper.num_moments:
        raise ConfigError(
            f"{len(moments)} moments for {hyper}", remedy=f"{hyper.num_moments} moments"
        )
    if not (0 <= key <= MAX_64_BITS and 0 <= first <= MAX_64_BITS):
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
    """Raise unless the tensors of a moment of `n` elements are what its format says."""
    dtypes: tuple[torch.dtype, ...] = (VALUE_DTYPES[moment.format],)
    if moment.format in _BF16_FORMATS:
        dtypes = (torch.bfloat16, torch.int16)
    check_tensor(name, moment.values, n, dtypes, device)
    if moment.format is not MomentFormat.INT8:
        return
    if moment.scales is None:
        raise ConfigError(f"{name} is 8-bit and has no scales", remedy="Moment.zeros")
    num_scales = MomentFormat.INT8.num_scales(n)
    check_tensor(f"{name}'s scales", moment.scales, num_scales, (torch.float32,), device)


def check_all_apart(pieces: Iterable[Piece]) -> None:
    """Raise if something that is written shares memory with anything else of these pieces."""
    ranges = sorted(r for piece in pieces for r in _ranges(piece))
    end, written = 0, False
    for start, stop, writes in ranges:
        if start < end and (writes or written):
            raise ConfigError("two arguments overlap in memory")
        written = writes or (written and start < end)
        end = max(end, stop)


def check_apart(target: torch.Tensor, source: torch.Tensor) -> None:
    """Raise if two tensors share memory."""
    first, second = target.data_ptr(), source.data_ptr()
    if first < second + source.nbytes and second < first + target.nbytes:
        raise ConfigError("two arguments overlap in memory")


def _ranges(piece: Piece) -> Iterator[tuple[int, int, bool]]:
    """(first byte, byte behind the last, whether it is written) of every tensor."""
    stored = [t for moment in piece.moments for t in (moment.values, moment.scales)]
    for tensor in (piece.weight, piece.rest, *stored):
        if tensor is not None and tensor.numel():
            yield tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, True
    gradient = piece.gradient
    if gradient.numel():
        yield gradient.data_ptr(), gradient.data_ptr() + gradient.nbytes, False


def _refusal(
    name: str,
    tensor: torch.Tensor,
    n: int,
    dtypes: tuple[torch.dtype, ...],
    device: torch.device,
) -> InfinityError:
    if tensor.device != device:
        where = "the host" if device.type == "cpu" else str(device)
        return PresenceError(f"{name} is on {tensor.device}", remedy=f"copy it to {where}")
    if tensor.dtype not in dtypes:
        wanted = " or ".join(str(dtype) for dtype in dtypes)
        return ConfigError(f"{name} has dtype {tensor.dtype}", remedy=wanted)
    if tensor.dim() != 1 or not tensor.is_contiguous():
        return PresenceError(
            f"{name} has shape {tuple(tensor.shape)} and strides {tensor.stride()}",
            because="the kernels walk one contiguous range",
            remedy="pass a contiguous 1-D tensor (an absent parameter is neither)",
        )
    return ConfigError(f"{name} has {tensor.numel()} elements, expected {n}")
