"""CRC32C of bytes; that of memory is `_aio.crc32c`."""

from __future__ import annotations

import numpy as np

import infinity._aio as _aio


def crc32c(data: bytes) -> int:
    """CRC32C (Castagnoli) of `data`, 0 for none."""
    array = np.frombuffer(data, dtype=np.uint8)
    return _aio.crc32c(array.ctypes.data, array.size)
