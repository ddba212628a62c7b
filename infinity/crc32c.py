"""CRC32C of bytes, and of tensors; that of memory is `_aio.crc32c`."""

from __future__ import annotations

import numpy as np
from torch import Tensor

import infinity._aio as _aio


def crc32c(data: bytes) -> int:
    """CRC32C (Castagnoli) of `data`, 0 for none."""
    array = np.frombuffer(data, dtype=np.uint8)
    return _aio.crc32c(array.ctypes.data, array.size)


def crc32c_of(tensor: Tensor) -> int:
    """CRC32C of a tensor's bytes; it is contiguous, and in host memory."""
    return _aio.crc32c(tensor.data_ptr(), tensor.nbytes)
