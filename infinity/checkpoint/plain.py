"""Lossless conversion of Python data to JSON and back, types included; no code is executed.

JSON has no tuples, sets, bytes, arrays or infinities, and only string keys. These become an object
with one key that begins with `$`; all other values are stored literally. docs/decisions/0013
explains why this is not a pickle, not even a restricted one.
"""

from __future__ import annotations

import base64
import io
import math
import re
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from infinity.common.sizes import format_size
from infinity.errors import CheckpointError, ConfigError
from infinity.model.safetensors_file import DTYPE_NAMES


def dtype_name(dtype: torch.dtype) -> str:
    """Return torch's name of a dtype: "bfloat16"."""
    return str(dtype).removeprefix("torch.")


DTYPES = {dtype_name(dtype): dtype for dtype in DTYPE_NAMES}  # those that safetensors supports
_ALL_DTYPES = {dtype_name(v): v for v in vars(torch).values() if isinstance(v, torch.dtype)}
_MAX_DEPTH = 100
MAX_ARRAY_BYTES = 64 << 20
_SAFE_INT = 2**63
_PLAIN_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_MARK = "$"


def encode(value: Any, what: str) -> Any:
    """Return data that `json.dumps` accepts and `decode` turns into an equal value.

    Supports None, bool, int, float, str, bytes, list, tuple, dict, set, `OrderedDict`, `Counter`,
    `torch.Tensor` (dense, on the CPU, without grad), `torch.dtype`, `torch.Size`, `numpy.ndarray`
    and numpy scalars; no other subclasses.
    Raises `ConfigError` for anything else, with its path below `what`: "client_state.a[3]".
    """
    return _encode(value, what, 0)


def _encode(value: Any, what: str, depth: int) -> Any:
    if depth > _MAX_DEPTH:
        raise ConfigError(
            f"{what[:60]}... is nested more than {_MAX_DEPTH} levels deep",
            because="it contains itself, or is nested too deeply",
        )
    cls = type(value)
    if value is None or cls is bool or cls is str:
        return value
    if cls is int:
        return value if -_SAFE_INT <= value < _SAFE_INT else {"$int": hex(value)}
    if cls is float:  # preserves all bits of a NaN
        return value if math.isfinite(value) else {"$float": struct.pack(">d", value).hex()}
    if cls in (list, tuple, set):
        # Elements of a set have no index: the path shows the value.
        steps = (f"{{{_repr(v)}}}" if cls is set else f"[{i}]" for i, v in enumerate(value))
        items = [
            _encode(v, f"{what}{step}", depth + 1) for step, v in zip(steps, value, strict=True)
        ]
        return items if cls is list else {f"${cls.__name__}": items}
    if cls is dict:
        pairs = [(k, _encode(v, f"{what}{_path_step(k)}", depth + 1)) for k, v in value.items()]
        if all(type(key) is str and not key.startswith(_MARK) for key in value):
            return dict(pairs)
        key_of = f"the key {{}} of {what}".format
        return {"$dict": [[_encode(k, key_of(_repr(k)), depth + 1), v] for k, v in pairs]}
    if cls in (OrderedDict, Counter):  # torch's schedulers hold milestones in a Counter
        mark = "$ordered" if cls is OrderedDict else "$counter"
        return {mark: _encode(dict(value), what, depth + 1)}
    if cls is bytes:
        return {"$bytes": _base64(value)}
    if cls is torch.Size:
        return {"$size": list(value)}
    if cls is torch.dtype:
        return {"$dtype": dtype_name(value)}
    if cls is Tensor:
        return {"$tensor": _encode_tensor(value, what)}
    if cls is np.ndarray or isinstance(value, np.generic):
        return {"$scalar" if cls is not np.ndarray else "$array": _encode_array(value, what)}
    raise ConfigError(
        f"{what} is {cls.__module__}.{cls.__qualname__}, which a checkpoint cannot store",
        because="it stores plain data only, so that loading it runs no code",
        remedy="save plain data instead: numbers, strings, lists, tuples, dicts, sets, bytes, CPU "
        "tensors, numpy arrays",
    )


def _encode_tensor(value: Tensor, what: str) -> dict[str, Any]:
    if value.device.type != "cpu" or value.requires_grad or value.layout is not torch.strided:
        raise ConfigError(
            f"{what} is a tensor on {value.device}, {value.layout}, "
            f"requires_grad={value.requires_grad}",
            because="in addition to the model, only dense CPU tensors without grad are saved",
            remedy=f"{what}.detach().cpu()",
        )
    if value.is_quantized:
        raise ConfigError(f"{what} is a tensor of {value.dtype}, which cannot be saved")
    _check_size(value.nbytes, what)
    flat = value.resolve_conj().resolve_neg().contiguous().reshape(-1)
    data = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    return {"dtype": dtype_name(value.dtype), "shape": list(value.shape), "data": _base64(data)}


def _encode_array(value: Any, what: str) -> str:
    """Return a file in numpy's .npy format as base64."""
    _check_size(value.nbytes, what)
    file = io.BytesIO()
    try:
        np.lib.format.write_array(file, np.asarray(value), version=(1, 0), allow_pickle=False)
    except ValueError as error:  # mostly arrays of objects
        raise ConfigError(
            f"{what} is numpy data of {value.dtype}, which cannot be saved", because=str(error)
        ) from None
    return _base64(file.getvalue())


def _check_size(nbytes: int, what: str) -> None:
    if nbytes > MAX_ARRAY_BYTES:
        raise ConfigError(
            f"{what} has {format_size(nbytes)}, more than {format_size(MAX_ARRAY_BYTES)}",
            because="it becomes text in the manifest",
            remedy="register it as a buffer of the model, or save it in a separate file",
        )


def _path_step(key: Any) -> str:
    is_name = type(key) is str and _PLAIN_KEY.fullmatch(key)
    return f".{key}" if is_name else f"[{_repr(key)}]"


def _repr(value: Any) -> str:
    try:
        return f"{value!r:.40}"
    except ValueError:  # an integer of thousands of digits
        return f"a large {type(value).__name__}"


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


# --- decoding ------------------------------------------------------------------------------------


def decode(value: Any) -> Any:
    """Invert `encode`. Raises `CheckpointError` for other data."""
    try:
        return _decode(value, 0)
    except (ValueError, TypeError, KeyError, OverflowError, struct.error) as error:
        raise CheckpointError(
            f"data in a checkpoint cannot be read: {str(error)[:200]}",
            because="it is damaged, or was written by something else",
        ) from None


def _decode(value: Any, depth: int) -> Any:
    if depth > 2 * _MAX_DEPTH:
        raise ValueError(f"more than {2 * _MAX_DEPTH} levels")
    cls = type(value)
    if value is None or cls in (bool, int, str) or (cls is float and math.isfinite(value)):
        return value
    if cls is list:
        return [_decode(item, depth + 1) for item in value]
    if cls is not dict:
        raise ValueError(f"a {cls.__name__}, {_repr(value)}")
    if not any(key.startswith(_MARK) for key in value):
        return {key: _decode(item, depth + 1) for key, item in value.items()}
    ((mark, content),) = value.items()
    return _DECODERS[mark](content, depth + 1)


def _decode_items(value: Any, depth: int) -> list[Any]:
    if type(value) is not list:
        raise ValueError(f"{_repr(value)} instead of a list")
    return [_decode(item, depth) for item in value]


def _check_unique(container: Any, items: list[Any]) -> Any:
    if len(container) < len(items):
        raise ValueError("a duplicate key or element of a set")
    return container


def _set(value: Any, depth: int) -> Any:
    items = _decode_items(value, depth)
    return _check_unique(set(items), items)


def _dict(value: Any, depth: int) -> Any:
    pairs = _decode_items(value, depth)
    # The comprehension rejects items that are not pairs.
    return _check_unique({key: item for key, item in pairs}, pairs)  # noqa: C416


def _counter(value: Any, depth: int) -> Any:
    counts = _decode(value, depth)
    if type(counts) is not dict or not all(type(n) is int for n in counts.values()):
        raise ValueError(f"{_repr(value)} instead of counts")
    return Counter(counts)


def _bytes(value: Any, depth: int = 0) -> bytes:
    return base64.b64decode(value, validate=True)


def _size(value: Any, depth: int = 0) -> torch.Size:
    if not all(type(n) is int and 0 <= n < _SAFE_INT for n in _decode_items(value, depth)):
        raise ValueError(f"the shape {_repr(value)}")
    return torch.Size(value)


def _tensor(value: Any, depth: int) -> Tensor:
    dtype = _ALL_DTYPES[value["dtype"]]
    size = _size(value["shape"])
    data = _bytes(value["data"])
    _check_data(data, size, dtype.itemsize)
    if dtype is torch.bool and data.translate(None, b"\0\1"):
        raise ValueError("booleans that are neither 0 nor 1")
    if not data:
        return torch.empty(size, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype).reshape(size)


# Header that numpy writes for arrays without fields. numpy's reader parses it as Python, which
# fails in CPython 3.11 if two threads do so at once ("AST constructor recursion depth mismatch").
_HEADER = re.compile(
    rb"\x93NUMPY\x01\x00..{'descr': '([^'\\]+)', 'fortran_order': (True|False), "
    rb"'shape': \(((?:\d+, )*\d*,?)\), } *\n",
    re.DOTALL,
)


def _array(value: Any, depth: int) -> Any:
    data = _bytes(value)
    file = io.BytesIO(data)
    if header := _HEADER.match(data):
        dtype = np.dtype(header[1].decode())
        fortran_order = header[2] == b"True"
        shape = tuple(map(int, re.findall(rb"\d+", header[3])))
        start = header.end()
    elif np.lib.format.read_magic(file) != (1, 0):
        raise ValueError("an array in another version of numpy's format")
    else:
        shape, fortran_order, dtype = np.lib.format.read_array_header_1_0(file)
        start = file.tell()
    if dtype.hasobject:
        raise ValueError(f"an array of {dtype}")
    content = data[start:]
    _check_data(content, shape, dtype.itemsize)
    return np.ndarray(shape, dtype, content, order="F" if fortran_order else "C").copy("K")


def _check_data(data: bytes, shape: tuple[int, ...], itemsize: int) -> None:
    """Check the size of an array before its memory is allocated."""
    if len(data) != math.prod(shape) * itemsize:
        raise ValueError(f"an array of {len(data)} bytes, not {math.prod(shape) * itemsize}")
    if math.prod(n for n in shape if n) * itemsize >= _SAFE_INT:
        raise ValueError(f"an array of the shape {_repr(list(shape))}")


_DECODERS: dict[str, Callable[[Any, int], Any]] = {
    "$tuple": lambda value, depth: tuple(_decode_items(value, depth)),
    "$set": _set,
    "$dict": _dict,
    "$ordered": lambda value, depth: OrderedDict(_decode(value, depth)),
    "$counter": _counter,
    "$int": lambda value, depth: int(value, 16),
    "$float": lambda value, depth: struct.unpack(">d", bytes.fromhex(value))[0],
    "$bytes": _bytes,
    "$size": _size,
    "$dtype": lambda value, depth: _ALL_DTYPES[value],
    "$tensor": _tensor,
    "$array": _array,
    "$scalar": lambda value, depth: _array(value, depth)[()],
}
