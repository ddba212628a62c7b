"""CRC32C of bytes, and of tensors; that of memory is `_aio.crc32c`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

import infinity._aio as _aio

if TYPE_CHECKING:
    from torch import Tensor


def crc32c(data: bytes) -> int:
    """CRC32C (Castagnoli) of `data`, 0 for none."""
    array = np.frombuffer(data, dtype=np.uint8)
    return _aio.crc32c(array.ctypes.data, array.size)


def crc32c_of(tensor: Tensor) -> int:
    """CRC32C of a tensor's elements, wherever they are, in their order."""
    here = tensor.detach().cpu().contiguous()
    return _aio.crc32c(here.data_ptr(), here.nbytes)
