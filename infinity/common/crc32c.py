"""CRC32C checksums of bytes and tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

import infinity._aio as _aio

if TYPE_CHECKING:
    from torch import Tensor


def crc32c(data: bytes) -> int:
    """Return the CRC32C (Castagnoli) of `data`; 0 for no bytes."""
    array = np.frombuffer(data, dtype=np.uint8)
    return _aio.crc32c(array.ctypes.data, array.size)


def crc32c_of(tensor: Tensor) -> int:
    """Return the CRC32C of a tensor's elements in logical order, on any device."""
    on_cpu = tensor.detach().cpu().contiguous()
    return _aio.crc32c(on_cpu.data_ptr(), on_cpu.nbytes)
