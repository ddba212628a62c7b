"""Tests of CRC32C against its definition and published values."""

from __future__ import annotations

import struct

import pytest
from support.native_io import Buffer, noise
from support.stalled import run_when_gil_is_released

from infinity import _aio


def crc_by_table(data: bytes, initial: int = 0) -> int:
    """Return the CRC32C computed byte by byte."""
    state = initial ^ 0xFFFFFFFF
    for byte in data:
        state = (state >> 8) ^ TABLE[(state ^ byte) & 0xFF]
    return state ^ 0xFFFFFFFF


def make_table() -> list[int]:
    entries = []
    for byte in range(256):
        state = byte
        for _ in range(8):
            state = (state >> 1) ^ (0x82F63B78 if state & 1 else 0)
        entries.append(state)
    return entries


TABLE = make_table()


def crc(data: bytes, initial: int = 0, shift: int = 0) -> int:
    buffer = Buffer(len(data) + shift, bytes(shift) + data)
    return _aio.crc32c(buffer.address + shift, len(data), initial)


@pytest.mark.parametrize(
    ("data", "value"),
    [
        (b"", 0),
        (b"123456789", 0xE3069283),
        (bytes(32), 0x8A9136AA),  # this and the next three from RFC 3720, B.4
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(range(31, -1, -1)), 0x113FDB5C),
    ],
)
def test_crc32c_known_values(data: bytes, value: int) -> None:
    assert crc(data) == value
    assert crc_by_table(data) == value


# Around the lengths at which the fast path changes stride: 8, 3 x 256, 3 x 4096, 3 x 65536 bytes.
LENGTHS = [1, 7, 8, 9, 767, 768, 769, 5000, 12287, 12288, 12289, 26000]
WIDE = [196_607, 196_608, 196_609, 210_000]


@pytest.mark.parametrize("length", LENGTHS + WIDE)
@pytest.mark.parametrize("shift", [0, 1, 5])
def test_crc32c_equals_table(length: int, shift: int) -> None:
    data = noise(length, seed=length)
    assert crc(data, shift=shift) == crc_by_table(data)
    assert crc(data[length // 3 :], initial=crc(data[: length // 3])) == crc_by_table(data)


@pytest.mark.parametrize("length", [0, *LENGTHS, *WIDE])
@pytest.mark.parametrize("shift", [0, 3])
def test_crc32c_copy_copies_and_returns_checksum(length: int, shift: int) -> None:
    data = noise(length, seed=length)
    source = Buffer(length + shift, bytes(shift) + data)
    target = Buffer(length + 16, b"\xaa" * (length + 16))
    found = _aio.crc32c_copy(target.address + 8, source.address + shift, length, 77)
    assert found == crc(data, initial=77)
    assert target.bytes(0, length + 16) == b"\xaa" * 8 + data + b"\xaa" * 8


def test_crc32c_copy_rejects_null_pointers() -> None:
    buffer = Buffer(8, bytes(8))
    for target, source in ((0, buffer.address), (buffer.address, 0)):
        with pytest.raises(ValueError, match="is null"):
            _aio.crc32c_copy(target, source, 8)
    assert _aio.crc32c_copy(0, 0, 0, 5) == 5


@pytest.mark.parametrize("nbytes", [1, 4096, 4097, 5 * 4096, 5 * 4096 - 1])
@pytest.mark.parametrize("block", [1024, 4096, 100_000])
def test_crc32c_blocks(nbytes: int, block: int) -> None:
    data = noise(nbytes)
    source = Buffer(nbytes, data)
    starts = range(0, nbytes, block)
    out = Buffer(4 * len(starts) + 4, b"\xaa" * (4 * len(starts) + 4))
    _aio.crc32c_blocks(source.address, nbytes, block, out.address)
    expected = [crc_by_table(data[start : start + block]) for start in starts]
    assert list(struct.unpack(f"<{len(starts)}I", out.bytes(0, 4 * len(starts)))) == expected
    assert out.bytes(4 * len(starts), 4) == b"\xaa" * 4


def test_crc32c_of_no_bytes() -> None:
    _aio.crc32c_blocks(0, 0, 4096, 0)
    assert _aio.crc32c(0, 0, 5) == 5


def test_crc32c_rejects_invalid_arguments() -> None:
    with pytest.raises(ValueError, match="null"):
        _aio.crc32c(0, 1)
    buffer = Buffer(8)
    with pytest.raises(ValueError, match="block"):
        _aio.crc32c_blocks(buffer.address, 8, 0, buffer.address)
    with pytest.raises(ValueError, match="out_address"):
        _aio.crc32c_blocks(buffer.address, 8, 8, 0)


def test_crc32c_uses_cpu_instruction_if_available() -> None:
    with open("/proc/cpuinfo") as lines:
        words = lines.read().split()
    if "sse4_2" in words:
        assert _aio.crc32c_kind == "sse4.2"
    elif "crc32" in words:
        assert _aio.crc32c_kind == "arm-crc"
    else:
        assert _aio.crc32c_kind == "table"


def test_crc32c_releases_the_gil() -> None:
    """Another thread runs while this one computes checksums."""
    buffer = Buffer(16 << 20)
    ran: list[bool] = []
    with run_when_gil_is_released(lambda: ran.append(True)):
        for _ in range(1000):
            _aio.crc32c(buffer.address, buffer.nbytes)
            if ran:
                break
        assert ran
