"""Files that hold tokens already: `.npy` arrays, and `.bin` files of raw integers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from infinity.errors import ConfigError
from infinity.runs.documents import Advance
from infinity.runs.segments import (
    BLOCK_BYTES,
    SegmentFacts,
    block_checksums,
    write_checksums,
)
from infinity.runs.sources import Source

_READ_BYTES = 16 * BLOCK_BYTES
_Layout = tuple[np.dtype[Any], int, int]
_INTEGERS = ("uint8", "uint16", "uint32", "int32", "int64", "uint64", "int16")


def adopt(
    source: Source, directory: Path, index: int, dtype: str | None, size: int, advance: Advance
) -> SegmentFacts:
    """A file of tokens as a segment of a corpus; its checksums go to `directory`.

    All of it is read once. `dtype` is that of a .bin file, `size` the number of tokens that the
    model knows. Raises `ConfigError` for what holds no tokens of the model, `OSError`.
    """
    with open(source.path, "rb") as file:
        kind, offset, count = _layout(source, file, dtype)
        checksums: list[int] = []
        left = count * kind.itemsize
        file.seek(offset)
        position = 0
        while left:
            data = file.read(min(_READ_BYTES, left))
            if not data:
                raise ConfigError(f"{source.path} was cut short while it was read")
            _check_tokens(source, np.frombuffer(data, dtype=kind), position, size)
            checksums += block_checksums(data)
            position += len(data) // kind.itemsize
            left -= len(data)
            advance(len(data))
    name = f"checksums-{index:05}.bin"
    write_checksums(directory / name, checksums)
    return SegmentFacts(source.path, name, kind.newbyteorder("=").name, offset, count)


def _layout(
    source: Source, file: IO[bytes], dtype: str | None
) -> tuple[np.dtype[np.generic], int, int]:
    """The dtype of the tokens, where they begin, and how many there are."""
    if source.path.lower().endswith(".npy"):
        return _npy_layout(source, file)
    if dtype is None:
        raise ConfigError(
            f"{source.path} does not say of which integers it is made",
            remedy="data.token_dtype: uint16, or uint32; an .npy file says it itself",
        )
    kind: np.dtype[Any] = np.dtype(dtype).newbyteorder("<")
    count, rest = divmod(os.fstat(file.fileno()).st_size, kind.itemsize)
    if rest:
        raise ConfigError(
            f"{source.path} has {source.size} bytes, no multiple of {kind.itemsize}",
            because=f"data.token_dtype is {dtype}, and the file is cut short or of another dtype",
        )
    return kind, 0, count


def _npy_layout(source: Source, file: IO[bytes]) -> _Layout:
    try:
        version = np.lib.format.read_magic(file)
        read = {
            (1, 0): np.lib.format.read_array_header_1_0,
            (2, 0): np.lib.format.read_array_header_2_0,
        }[version]
        shape, _, kind = read(file)
    except (ValueError, KeyError, EOFError) as error:
        raise ConfigError(f"{source.path} is no .npy file: {error}") from error
    count = int(np.prod(shape, dtype=np.int64))
    offset = file.tell()
    if len(shape) != 1 or kind.name not in _INTEGERS or kind.byteorder == ">":
        raise ConfigError(
            f"{source.path} holds {kind} of shape {shape}",
            remedy="save a flat array of integers: numpy.save(path, tokens.astype('uint16'))",
        )
    missing = offset + count * kind.itemsize - source.size
    if missing > 0:
        raise ConfigError(f"{source.path} is cut short: {missing} bytes are missing")
    return kind, offset, count


def _check_tokens(source: Source, tokens: NDArray[Any], start: int, size: int) -> None:
    """Raise `ConfigError` for the first token that the model does not know."""
    if int(tokens.max()) < size and (tokens.dtype.kind == "u" or int(tokens.min()) >= 0):
        return
    wrong = (tokens >= size) | (tokens < 0)
    first = int(np.argmax(wrong))
    raise ConfigError(
        f"{source.path} holds the token {int(tokens[first])} at {start + first}, and the model "
        f"knows {size} tokens",
        because="it was made with another tokenizer, or is read with another dtype",
        remedy="tokenise it for this model; data.token_dtype is that of .bin files",
    )
