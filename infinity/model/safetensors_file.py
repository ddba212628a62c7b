"""Reader of a safetensors file: validates the header, and reads tensors on demand.

The format (https://huggingface.co/docs/safetensors) is a length, a JSON header, and the bytes of
the tensors, without gaps. The complete header is validated before memory for a tensor is allocated,
at least as strictly as by the safetensors library (tested). Files are read, not mapped: truncating
a mapped file kills the process that reads it, and mapped pages count as memory of the process.
"""

from __future__ import annotations

import json
import os
import stat
import struct
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from infinity.common.sizes import format_size
from infinity.errors import ConfigError, DoesNotFitError, MachineError

# torch dtype -> its name in a header.
DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.float8_e8m0fnu: "F8_E8M0",
}
_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
_LENGTH_BYTES = 8
_MAX_INT64 = 2**63 - 1


@dataclass(frozen=True)
class TensorEntry:
    """Header entry of one tensor; `offset` is the position of its first byte in the file."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    file: Path
    offset: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)


def encode_header(tensors: Iterable[tuple[str, tuple[int, ...], torch.dtype]]) -> bytes:
    """Return the bytes of a file before the elements of `tensors` (name, shape, dtype), in order.

    The length is a multiple of 8. The dtypes must be in `DTYPE_NAMES`.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape, dtype in tensors:
        end = offset + prod(shape) * dtype.itemsize
        header[name] = {
            "dtype": DTYPE_NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _LENGTH_BYTES)
    return struct.pack("<Q", len(text)) + text


class SafetensorsFile:
    """An open file and its header entries. Closed by `close`, or when garbage-collected."""

    def __init__(self, path: Path) -> None:
        """Open `path` and validate its header.

        Raises `ConfigError` that names the file, and the tensor if one is invalid.
        """
        self.path = path
        try:
            # Without O_NONBLOCK a named pipe would wait for a writer.
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except (OSError, ValueError) as error:
            raise _unreadable(path, error) from error
        self._finalizer = weakref.finalize(self, os.close, self._descriptor)
        try:
            self.facts = self._read_header()
        except _FormatError as error:
            self.close()
            raise ConfigError(
                f"{path} is not a sound safetensors file: {error}",
                because="it is truncated, damaged, or something else",
                remedy="download or save it again",
            ) from None
        except OSError as error:
            self.close()
            raise _unreadable(path, error) from error
        except BaseException:
            self.close()
            raise

    def _read_header(self) -> dict[str, TensorEntry]:
        status = os.fstat(self._descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise _FormatError("it is no regular file")
        if status.st_size < _LENGTH_BYTES:
            raise _FormatError(f"it has {status.st_size} bytes")
        length = int.from_bytes(self._read_bytes(0, _LENGTH_BYTES), "little")
        data_start = _LENGTH_BYTES + length
        if length > 100_000_000:  # limit of the safetensors library
            raise _FormatError(f"its header would have {length} bytes")
        if data_start > status.st_size:
            raise _FormatError(f"its header would end at byte {data_start} of {status.st_size}")
        header = _parse_json(self._read_bytes(_LENGTH_BYTES, length))
        return _parse_entries(header, self.path, data_start, status.st_size)

    def _read_bytes(self, offset: int, length: int) -> bytes:
        buffer = bytearray(length)
        if self._read_into(memoryview(buffer), offset) < length:
            raise _FormatError("it became shorter while it was read")
        return bytes(buffer)

    def _read_into(self, target: memoryview, offset: int) -> int:
        """Read into `target`; return the number of bytes read, fewer only at the file's end."""
        num_read = 0
        while num_read < len(target):
            chunk = target[num_read : num_read + (64 << 20)]  # SIGINT is handled between two reads
            count = os.preadv(self._descriptor, [chunk], offset + num_read)
            if count == 0:
                break
            num_read += count
        return num_read

    def read(self, name: str, first: int = 0, count: int | None = None) -> Tensor:
        """Read a tensor into new memory, or `count` of its elements from `first`, flat.

        Raises `ConfigError` if the file was truncated, `MachineError` if it cannot be read, and
        `DoesNotFitError` if memory cannot be allocated; all name the tensor and the file.
        """
        facts = self.facts[name]
        numel = facts.numel if count is None else count
        try:
            flat = torch.empty(numel, dtype=facts.dtype, device="cpu")
        except RuntimeError as error:
            size = format_size(numel * facts.dtype.itemsize)
            raise DoesNotFitError(
                f"tensor {name!r} of {self.path} needs {size} of RAM", because=str(error)
            ) from error
        target = flat.view(torch.uint8).numpy().data
        offset = facts.offset + first * facts.dtype.itemsize
        try:
            num_read = self._read_into(target, offset)
        except OSError as error:
            raise MachineError(
                f"tensor {name!r} of {self.path} cannot be read",
                because=f"{error.strerror} (errno {error.errno})",
            ) from error
        if num_read < len(target):
            raise ConfigError(
                f"tensor {name!r} of {self.path} ends after {num_read} of {len(target)} bytes",
                because="the file became shorter after it was opened",
            )
        return flat.view(facts.shape) if count is None else flat

    def close(self) -> None:
        """Close the file; idempotent."""
        self._finalizer()


class _FormatError(Exception):
    """Defect of a file."""


def _unreadable(path: Path, error: OSError | ValueError) -> ConfigError:
    reason = error.strerror if isinstance(error, OSError) else None
    missing = isinstance(error, FileNotFoundError)
    remedy = "give a .safetensors file, or a directory that holds some" if missing else None
    return ConfigError(f"{path} cannot be read: {reason or error}", remedy=remedy)


def _parse_json(header: bytes) -> dict[str, Any]:
    try:
        content = json.loads(
            header.decode("utf-8"),
            object_pairs_hook=_members,
            parse_constant=_reject_constant,
            parse_int=lambda text: int(text) if text != "-0" else _reject_constant(text),
        )
    except UnicodeDecodeError as error:
        raise _FormatError(f"its header is not UTF-8: {error.reason} at {error.start}") from None
    except (ValueError, RecursionError) as error:
        raise _FormatError(f"its header is not JSON: {error}") from None
    if not header.startswith(b"{") or not isinstance(content, dict):
        raise _FormatError("its header is no JSON object")
    return content


def _members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        seen = set[str]()
        for name, _ in reversed(pairs):
            if name in seen:
                raise _FormatError(f"{_shorten(name)} is in its header twice")
            seen.add(name)
    return members


def _reject_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no JSON")


def _parse_entries(
    header: dict[str, Any], path: Path, data_start: int, file_bytes: int
) -> dict[str, TensorEntry]:
    """Validate all header entries; tensors must fill the file from `data_start` on."""
    metadata = header.pop("__metadata__", None)
    values = metadata.values() if isinstance(metadata, dict) else [metadata or ""]
    if not all(isinstance(value, str) for value in values):
        raise _FormatError("its __metadata__ holds more than texts")
    facts: dict[str, TensorEntry] = {}
    ranges: list[tuple[int, int, str]] = []
    for name, entry in header.items():
        shape, dtype, (begin, end) = _parse_entry(name, entry)
        facts[name] = TensorEntry(shape, dtype, path, data_start + begin)
        ranges.append((begin, end, name))
    position = 0
    for begin, end, name in sorted(ranges):
        if begin != position:
            relation = "overlaps the one before" if begin < position else "leaves a gap before it"
            raise _FormatError(
                f"tensor {name!r} begins at byte {begin}, and {relation} ({position})"
            )
        if data_start + end > file_bytes:
            raise _FormatError(
                f"tensor {name!r} would end at byte {data_start + end} of {file_bytes}"
            )
        position = end
    if data_start + position != file_bytes:
        raise _FormatError(f"its tensors end at byte {data_start + position} of {file_bytes}")
    return facts


def _parse_entry(name: str, entry: Any) -> tuple[tuple[int, ...], torch.dtype, tuple[int, int]]:
    """Return shape, dtype and byte range of one tensor, checked for consistency."""
    try:
        name.encode()
    except UnicodeEncodeError:
        raise _FormatError(f"the name {name!r} is no text") from None
    try:
        shape, dtype_name, offsets = entry["shape"], entry["dtype"], entry["data_offsets"]
    except (KeyError, TypeError):
        raise _FormatError(f"tensor {name!r} lacks shape, dtype or data_offsets") from None
    if not _are_counts(shape) or prod(n for n in shape if n) > _MAX_INT64:
        raise _FormatError(f"tensor {name!r} has the shape {_shorten(shape)}")
    if not _are_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _FormatError(f"tensor {name!r} has the data_offsets {_shorten(offsets)}")
    dtype = _DTYPES.get(dtype_name) if isinstance(dtype_name, str) else None
    if dtype is None:
        raise _FormatError(
            f"tensor {name!r} has the dtype {_shorten(dtype_name)}, which torch lacks"
        )
    nbytes = prod(shape) * dtype.itemsize
    num_bytes = offsets[1] - offsets[0]
    if nbytes != num_bytes:
        raise _FormatError(
            f"tensor {name!r} of shape {tuple(shape)} and dtype {dtype_name} has {num_bytes} "
            f"bytes, not {nbytes}"
        )
    return tuple(shape), dtype, (offsets[0], offsets[1])


def _are_counts(value: Any) -> bool:
    """Return True for a list of integers from 0 to 2**63 - 1."""
    return isinstance(value, list) and all(type(n) is int and 0 <= n <= _MAX_INT64 for n in value)


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
