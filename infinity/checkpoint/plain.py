"""Python data as JSON and back, exactly, types too; nothing is ever executed.

JSON has no tuples, sets, bytes, arrays, infinities, and no keys but texts. Those become an object
with one key that begins with `$`; everything else is what it looks like.
"""

from __future__ import annotations

import base64
import binascii
import math
import re
import struct
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from infinity.errors import CheckpointError, ConfigError
from infinity.model.weight_files import DTYPE_NAMES
from infinity.sizes import format_size


def dtype_name(dtype: torch.dtype) -> str:
    """torch's name of a dtype: "bfloat16"."""
    return str(dtype).removeprefix("torch.")


DTYPES = {dtype_name(dtype): dtype for dtype in DTYPE_NAMES}  # that safetensors files can hold
_OTHER_DTYPES = ("complex128", "complex32", "qint8", "quint8", "qint32")
_ALL_DTYPES = DTYPES | {
    name: found
    for name in _OTHER_DTYPES
    if isinstance(found := getattr(torch, name, None), torch.dtype)
}
_MAX_DEPTH = 100
_MAX_ARRAY_BYTES = 64 << 20
_SAFE_INT = 2**63
# Numbers, texts and times of numpy; no objects and no records.
_NUMPY_DTYPE = re.compile(r"[<>|](?:[biufcSU][0-9]{1,9}|[mM]8(?:\[[0-9]{0,9}[a-zA-Zμ]{1,2}\])?)")
_PLAIN_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_MARK = "$"


def encode(value: Any, what: str) -> Any:
    """JSON for `value`: what `json.dumps` takes and `decode` turns into the same value again.

    None, bool, int, float, str, bytes, list, tuple, dict, set, `torch.Tensor` (dense, on the CPU,
    without grad), `torch.dtype`, `torch.Size`, `numpy.ndarray` and numpy scalars; no subclasses.
    Raises `ConfigError` for anything else, naming its place below `what`: "client_state.a[3]".
    """
    return _encode(value, what, 0)


def _encode(value: Any, what: str, depth: int) -> Any:
    if depth > _MAX_DEPTH:
        raise ConfigError(
            f"{what[:60]}... lies more than {_MAX_DEPTH} levels deep",
            because="it contains itself, or is nested too deeply to be saved",
        )
    kind = type(value)
    if value is None or kind is bool or kind is str:
        return value
    if kind is int:
        return value if -_SAFE_INT <= value < _SAFE_INT else {"$int": hex(value)}
    if kind is float:
        return value if math.isfinite(value) else {"$float": _bits(value)}
    if kind is list:
        return [_encode(item, f"{what}[{i}]", depth + 1) for i, item in enumerate(value)]
    if kind is tuple:
        return {"$tuple": [_encode(v, f"{what}[{i}]", depth + 1) for i, v in enumerate(value)]}
    if kind is set:
        return {"$set": [_encode(item, f"{what}{{{_short(item)}}}", depth + 1) for item in value]}
    if kind is dict:
        return _encode_dict(value, what, depth)
    if kind is bytes:
        return {"$bytes": _base64(value)}
    return _encode_array(value, what)


def _encode_dict(value: dict[Any, Any], what: str, depth: int) -> Any:
    items = [(key, _encode(item, f"{what}{_step(key)}", depth + 1)) for key, item in value.items()]
    if all(type(key) is str and not key.startswith(_MARK) for key in value):
        return dict(items)
    places = [f"the key {_short(key)} of {what}" for key in value]
    return {
        "$dict": [
            [_encode(key, place, depth + 1), item]
            for (key, item), place in zip(items, places, strict=True)
        ]
    }


def _encode_array(value: Any, what: str) -> Any:
    if type(value) is Tensor:
        return {"$tensor": _encode_tensor(value, what)}
    if type(value) is np.ndarray or isinstance(value, np.generic):
        if _NUMPY_DTYPE.fullmatch(value.dtype.str) is None:
            raise ConfigError(f"{what} is numpy data of {value.dtype}, which cannot be saved")
        _check_size(value.nbytes, what)
        content = {"dtype": value.dtype.str, "data": _base64(value.tobytes())}
        if isinstance(value, np.generic):
            return {"$scalar": content}
        return {"$array": {**content, "shape": list(value.shape)}}
    if type(value) is torch.Size:
        return {"$size": list(value)}
    if isinstance(value, torch.dtype):
        return {"$dtype": dtype_name(value)}
    kind = type(value)
    raise ConfigError(
        f"{what} is {kind.__module__}.{kind.__qualname__}, which a checkpoint cannot hold",
        because="it holds plain data only, so that loading it runs no code",
        remedy="save what it is made of: numbers, texts, lists, tuples, dicts, sets, bytes, CPU "
        "tensors, numpy arrays",
    )


def _encode_tensor(value: Tensor, what: str) -> dict[str, Any]:
    name = dtype_name(value.dtype)
    if value.device.type != "cpu" or value.requires_grad or value.layout is not torch.strided:
        raise ConfigError(
            f"{what} is a tensor on {value.device}, {value.layout}, "
            f"requires_grad={value.requires_grad}",
            because="beside the model only dense CPU tensors without grad are saved",
            remedy=f"{what}.detach().cpu()",
        )
    if value.is_quantized or name not in _ALL_DTYPES:
        raise ConfigError(f"{what} is a tensor of {value.dtype}, which cannot be saved")
    _check_size(value.nbytes, what)
    flat = value.resolve_conj().resolve_neg().contiguous().reshape(-1)
    data = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    return {"dtype": name, "shape": list(value.shape), "data": _base64(data)}


def _check_size(nbytes: int, what: str) -> None:
    if nbytes > _MAX_ARRAY_BYTES:
        raise ConfigError(
            f"{what} has {format_size(nbytes)}, more than {format_size(_MAX_ARRAY_BYTES)}",
            because="it becomes text in the manifest",
            remedy="register it as a buffer of the model, or save it in a file of its own",
        )


def _step(key: Any) -> str:
    is_name = type(key) is str and _PLAIN_KEY.fullmatch(key)
    return f".{key}" if is_name else f"[{_short(key)}]"


def _short(value: Any) -> str:
    try:
        return f"{value!r:.40}"
    except ValueError:  # a number of thousands of digits
        return f"a large {type(value).__name__}"


def _bits(value: float) -> str:
    """The eight bytes of a float, hexadecimal, so that a NaN keeps its payload."""
    return struct.pack(">d", value).hex()


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def decode(value: Any) -> Any:
    """What `encode` was given. Raises `CheckpointError` for what it never makes."""
    try:
        return _decode(value, 0)
    except _Unsound as error:
        raise CheckpointError(
            f"data in a checkpoint cannot be read: {error}",
            because="it is damaged, or was written by something else",
        ) from None


class _Unsound(Exception):  # noqa: N818
    """What is wrong with the data."""


def _decode(value: Any, depth: int) -> Any:
    if depth > 2 * _MAX_DEPTH:
        raise _Unsound(f"more than {2 * _MAX_DEPTH} levels")
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        if not math.isfinite(value):
            raise _Unsound(f"{value} as a number")
        return value
    if type(value) is list:
        return [_decode(item, depth + 1) for item in value]
    if type(value) is not dict:
        raise _Unsound(f"a {type(value).__name__}")
    mark = next(iter(value), "")
    if not (len(value) == 1 and mark.startswith(_MARK)):
        marked = [key for key in value if key.startswith(_MARK)]
        if marked:
            raise _Unsound(f"the key {_short(marked[0])} among others")
        return {key: _decode(item, depth + 1) for key, item in value.items()}
    read = _READERS.get(mark)
    if read is None:
        raise _Unsound(f"the mark {_short(mark)}")
    return read(value[mark], depth + 1)


def _tuple(value: Any, depth: int) -> Any:
    return tuple(_items(value, depth))


def _set(value: Any, depth: int) -> Any:
    items = _items(value, depth)
    found = _hashed(lambda: set(items))
    if len(found) < len(items):
        raise _Unsound("a set with an element twice")
    return found


def _dict(value: Any, depth: int) -> Any:
    pairs = [_decode(pair, depth) for pair in _list(value)]
    if not all(type(pair) is list and len(pair) == 2 for pair in pairs):
        raise _Unsound("a dict that is not made of pairs")
    found = _hashed(lambda: dict(pairs))
    if len(found) < len(pairs):
        raise _Unsound("a dict with a key twice")
    return found


def _hashed(make: Callable[[], Any]) -> Any:
    try:
        return make()
    except TypeError:
        raise _Unsound("a key or an element that has no hash") from None


def _items(value: Any, depth: int) -> list[Any]:
    return [_decode(item, depth) for item in _list(value)]


def _list(value: Any) -> list[Any]:
    if type(value) is not list:
        raise _Unsound(f"{_short(value)} as a list")
    return value


def _text(value: Any) -> str:
    if type(value) is not str:
        raise _Unsound(f"{_short(value)} as a text")
    return value


def _int(value: Any, depth: int) -> int:
    if re.fullmatch(r"-?0x[0-9a-f]+", _text(value)) is None:
        raise _Unsound(f"{_short(value)} as a hexadecimal number")
    return int(value, 16)


def _float(value: Any, depth: int) -> float:
    if re.fullmatch(r"[0-9a-f]{16}", _text(value)) is None:
        raise _Unsound(f"{_short(value)} as the bits of a float")
    number: float = struct.unpack(">d", bytes.fromhex(value))[0]
    return number


def _bytes(value: Any, depth: int = 0) -> bytes:
    try:
        return base64.b64decode(_text(value), validate=True)
    except (binascii.Error, ValueError):
        raise _Unsound("bytes that are not base64") from None


def _fields(value: Any, *names: str) -> list[Any]:
    if type(value) is not dict or set(value) != set(names):
        raise _Unsound(f"an array without exactly {', '.join(names)}")
    return [value[name] for name in names]


def _size(value: Any, depth: int = 0) -> torch.Size:
    if not all(type(n) is int and 0 <= n < _SAFE_INT for n in _list(value)):
        raise _Unsound(f"the shape {_short(value)}")
    return torch.Size(value)


def _check_data(data: bytes, shape: Iterable[int], itemsize: int, kind: str) -> None:
    """Length, and values that some types cannot have."""
    expected = math.prod(shape) * itemsize
    if len(data) != expected:
        raise _Unsound(f"an array of {len(data)} bytes, not {expected}")
    if math.prod(n for n in shape if n) * itemsize >= _SAFE_INT:
        raise _Unsound(f"an array of the shape {_short(list(shape))}")
    if kind == "b" and data.translate(None, b"\0\1"):
        raise _Unsound("truth values that are neither true nor false")
    if kind == "U" and not _are_characters(data):
        raise _Unsound("a text of numpy with characters that there are not")


def _are_characters(data: bytes) -> bool:
    little = np.frombuffer(data, dtype="<u4")
    return not data or min(int(little.max()), int(little.byteswap().max())) <= 0x10FFFF


def _dtype(value: Any, depth: int = 0) -> torch.dtype:
    name = _text(value)
    found = _ALL_DTYPES.get(name)
    if found is None:
        raise _Unsound(f"the dtype {_short(name)}")
    return found


def _tensor(value: Any, depth: int) -> Tensor:
    dtype_name, shape, content = _fields(value, "dtype", "shape", "data")
    dtype, size, data = _dtype(dtype_name), _size(shape), _bytes(content)
    _check_data(data, size, dtype.itemsize, "b" if dtype is torch.bool else "")
    if not data:
        return torch.empty(size, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype).reshape(size)


def _numpy_dtype(value: Any) -> np.dtype[Any]:
    if _NUMPY_DTYPE.fullmatch(_text(value)) is None:
        raise _Unsound(f"the numpy dtype {_short(value)}")
    try:
        dtype: np.dtype[Any] = np.dtype(value)
    except (TypeError, ValueError):
        raise _Unsound(f"the numpy dtype {_short(value)}") from None
    if dtype.str != value:
        raise _Unsound(f"the numpy dtype {_short(value)}")
    return dtype


def _array(value: Any, depth: int) -> Any:
    dtype_name, shape, content = _fields(value, "dtype", "shape", "data")
    dtype, size, data = _numpy_dtype(dtype_name), _size(shape), _bytes(content)
    _check_data(data, size, dtype.itemsize, dtype.kind)
    try:
        return np.ndarray(tuple(size), dtype=dtype, buffer=bytearray(data)).copy()
    except (TypeError, ValueError):
        raise _Unsound(f"an array of the shape {_short(list(size))}") from None


def _scalar(value: Any, depth: int) -> Any:
    dtype_name, content = _fields(value, "dtype", "data")
    dtype, data = _numpy_dtype(dtype_name), _bytes(content)
    _check_data(data, (), dtype.itemsize, dtype.kind)
    return np.ndarray((), dtype=dtype, buffer=bytearray(data))[()]


_READERS: dict[str, Callable[[Any, int], Any]] = {
    "$tuple": _tuple,
    "$set": _set,
    "$dict": _dict,
    "$int": _int,
    "$float": _float,
    "$bytes": _bytes,
    "$size": _size,
    "$dtype": _dtype,
    "$tensor": _tensor,
    "$array": _array,
    "$scalar": _scalar,
}
