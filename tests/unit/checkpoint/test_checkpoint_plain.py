"""Tests of encoding plain Python data as JSON, with exact types and bits."""

from __future__ import annotations

import base64
import json
import math
import random
import struct
from collections import Counter, OrderedDict
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from infinity.checkpoint.plain import decode, encode
from infinity.errors import CheckpointError, ConfigError


def round_trip(value: Any) -> Any:
    return decode(json.loads(json.dumps(encode(value, "x"), allow_nan=False)))


def same(one: Any, other: Any) -> bool:
    """Return True if both are equal in type, value, order and bits."""
    if type(one) is not type(other):
        return False
    if isinstance(one, float):
        return struct.pack(">d", one) == struct.pack(">d", other)
    if isinstance(one, torch.Tensor):
        return (
            one.dtype is other.dtype
            and one.shape == other.shape
            and raw(one).tolist() == raw(other).tolist()
        )
    if isinstance(one, np.longdouble):
        return bool(one == other)  # some of its bytes are padding
    if isinstance(one, np.ndarray | np.generic):
        return one.dtype == other.dtype and one.shape == other.shape and bits(one) == bits(other)
    if isinstance(one, list | tuple) and not isinstance(one, torch.Size):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return len(one) == len(other) and all(map(same, one.items(), other.items()))
    if isinstance(one, set):
        return one == other and {type(x) for x in one} == {type(x) for x in other}
    return bool(one == other)


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def bits(array: Any) -> bytes:
    found: bytes = array.tobytes()
    return found


ODD_NAN = struct.unpack(">d", bytes.fromhex("fff8000000000123"))[0]
PLAIN = [
    None,
    True,
    0,
    -(2**63),
    2**63,
    -(2**70000),
    0.1,
    -0.0,
    5e-324,
    math.inf,
    -math.inf,
    math.nan,
    ODD_NAN,
    "",
    "\ud800 \0 é 𝄞",
    "$tuple",
    b"",
    b"\0\xff",
    [],
    (),
    ((),),
    {},
    set(),
    Counter({2: 1, 4: 3}),
    OrderedDict([("b", 1), ("a", (2,)), (3, [4])]),
    {1, 2.5, "a", (1, b"x"), None},
    {"$tuple": [1]},
    {"$tuple": [1], "b": 2},
    {"a": {"": {"$": 1}}},
    {1: "a", "1": "b", (1, 2): "c", None: "d", 2.5: "e", b"1": "f", False: "g"},
    torch.Size([2, 3]),
    torch.bfloat16,
    torch.complex128,
    [1, (2, [3, {"x": (4.0,)}])],
    np.float64(0.1),
    np.float32("nan"),
    np.int64(-1),
    np.bool_(True),
    np.str_("größer"),
    np.bytes_(b"ab"),
    np.complex64(1 + 2j),
    np.datetime64("2026-01-01T00:00:00", "ns"),
    np.timedelta64(3, "s"),
    np.longdouble("0.1"),
    np.arange(6, dtype=">i2").reshape(2, 3),
    np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    np.zeros((0, 3), dtype=np.uint8),
    np.array(5, dtype=np.float16),
    np.array(["a", "bcd", ""]),
    np.arange(10)[::2],
    np.zeros(2, dtype="i4,f4"),
    random.Random(1).getstate(),
    np.random.RandomState(1).get_state(),
    np.random.default_rng(1).bit_generator.state,
]


@pytest.mark.parametrize("value", PLAIN, ids=lambda value: type(value).__name__)
def test_plain_value_round_trip(value: Any) -> None:
    assert same(round_trip(value), value)
    assert same(round_trip({"a": [value, (value,)]}), {"a": [value, (value,)]})


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32,
        torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64,
        torch.bool, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2,
    ],
)  # fmt: skip
def test_tensor_round_trip_every_dtype(dtype: torch.dtype) -> None:
    top = 2 if dtype is torch.bool else 256
    base = torch.randint(0, top, (48 * dtype.itemsize,), dtype=torch.uint8).view(dtype)
    for value in (base, base.view(6, 8).t(), base[::3], base[:0], base[0], base.view(2, 24)):
        assert same(round_trip(value), value)


def test_decoded_values_share_no_memory() -> None:
    text = encode({"t": torch.ones(3), "a": np.ones(3)}, "x")
    one, other = decode(text), decode(text)
    one["t"].zero_()
    one["a"][:] = 0
    assert other["t"].sum() == other["a"].sum() == 3


def test_rng_state_round_trip() -> None:
    torch.manual_seed(5)
    state = round_trip({"torch": torch.get_rng_state(), "python": random.getstate()})
    expected = torch.rand(4), random.random()
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    assert torch.equal(torch.rand(4), expected[0])
    assert random.random() == expected[1]


keys = st.one_of(
    st.none(), st.booleans(), st.integers(), st.text(), st.binary(), st.floats(allow_nan=False)
)
values = st.recursive(
    st.one_of(keys, st.floats()),
    lambda inner: st.one_of(
        st.lists(inner),
        st.lists(inner).map(tuple),
        st.sets(keys),
        st.dictionaries(keys, inner),
        st.dictionaries(st.text(), inner),
    ),
    max_leaves=20,
)


@settings(max_examples=100, deadline=None)
@given(values)
def test_random_plain_value_round_trip(value: Any) -> None:
    assert same(round_trip(value), value)


class Derived(dict[str, int]):
    pass


LOOP: list[Any] = []
LOOP.append(LOOP)


@pytest.mark.parametrize(
    ("value", "place"),
    [
        ({"foo": [1, 2, 3, object()]}, "state.foo[3] is builtins.object"),
        ({"a b": {7: (1, len)}}, "state['a b'][7][1] is"),
        ({"a": Derived()}, "state.a is test_checkpoint_plain.Derived"),
        ({"f": lambda: 1}, "state.f is builtins.function"),
        ({"c": 1j}, "state.c is builtins.complex"),
        ([frozenset()], "state[0] is builtins.frozenset"),
        ({(1, object): 1}, "the key (1, <class 'object'>) of state[1]"),
        ({"p": torch.nn.Parameter(torch.ones(2))}, "state.p is torch.nn.parameter.Parameter"),
        ({"g": torch.ones(2, requires_grad=True)}, "state.g is a tensor on cpu"),
        ({"m": torch.ones(2, device="meta")}, "state.m is a tensor on meta"),
        ({"s": torch.eye(2).to_sparse()}, "state.s is a tensor on cpu, torch.sparse_coo"),
        ({"o": np.array([object()])}, "state.o is numpy data of object"),
        ({"r": np.zeros(2, dtype="i4,O")}, "state.r is numpy data of"),
        (LOOP, "state[0][0][0]"),
        ({"big": torch.zeros(65 << 20, dtype=torch.uint8)}, "state.big has 65.00 MiB"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_encode_unsupported_value_names_its_path(value: Any, place: str) -> None:
    with pytest.raises(ConfigError) as caught:
        encode(value, "state")
    assert place in str(caught.value)


def npy_file(dtype: str, shape: str, nbytes: int) -> str:
    """Return a base64 .npy file with this header, valid or not."""
    header = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}, }}"
    data = b"\x93NUMPY\1\0" + struct.pack("<H", len(header) + 1) + header.encode() + b"\n"
    return base64.b64encode(data + bytes(nbytes)).decode()


HOSTILE: list[Any] = [
    {"$unknown": 1},
    {"$tuple": 1},
    {"$tuple": [], "a": 1},
    {"a": 1, "$b": 2},
    {"$int": 12},
    {"$float": "inf"},
    {"$float": "00"},
    {"$bytes": "****"},
    {"$bytes": "a"},
    {"$set": [[1]]},
    {"$set": [1, 1]},
    {"$dict": [[1]]},
    {"$dict": [[1, 2], [1, 3]]},
    {"$dict": [[{}, 2]]},
    {"$dict": {"a": 1}},
    {"$counter": [[2, 1]]},
    {"$counter": {"a": "b"}},
    {"$ordered": 1},
    {"$size": [-1]},
    {"$size": [1.5]},
    {"$dtype": "nn.Module"},
    {"$dtype": ["float32"]},
    {"$tensor": {"dtype": "float32", "shape": [2], "data": "AAAA"}},
    {"$tensor": {"dtype": "float32", "shape": [2**62, 2**62], "data": ""}},
    {"$tensor": {"dtype": "float32", "shape": [2**62, 0, 2**62], "data": ""}},
    {"$tensor": {"dtype": "bool", "shape": [3], "data": "AAEC"}},
    {"$tensor": {"dtype": "load", "shape": [], "data": ""}},
    {"$tensor": {"dtype": "float32", "shape": [0]}},
    {"$array": npy_file("|O", "(1,)", 8)},
    {"$array": npy_file("<i4", "(2,)", 4)},
    {"$array": npy_file("<i4", "(4611686018427387904, 0, 4611686018427387904)", 0)},
    {"$array": npy_file("<i4", str((1,) * 99), 4)},
    {"$array": npy_file("<i4", "__import__('os')", 4)},
    {"$array": npy_file("<U999999999", "(1,)", 0)},
    {"$array": "AAAA"},
    {"$array": {"dtype": "<i4", "shape": [1], "data": "AAAAAA=="}},
    {"$scalar": npy_file("<i4", "()", 0)},
    math.inf,
    (1,),
    object(),
]


@pytest.mark.parametrize("value", HOSTILE, ids=range(len(HOSTILE)))
def test_decode_hostile_data_is_refused(value: Any) -> None:
    for nested in (value, [value], {"a": {"$tuple": [value]}}):
        with pytest.raises(CheckpointError, match="data in a checkpoint cannot be read"):
            decode(nested)


def test_deeply_nested_data_is_refused() -> None:
    value: Any = 1
    for _ in range(5000):
        value = {"$tuple": [value]}
    with pytest.raises(CheckpointError, match="levels"):
        decode(value)
    deep: Any = 1
    for _ in range(100):
        deep = ({"a": [deep]},)
    with pytest.raises(ConfigError, match="levels deep"):
        encode(deep, "x")


nodes = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=12)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from(
                ["$tuple", "$set", "$dict", "$int", "$float", "$bytes", "$size", "$dtype",
                 "$tensor", "$array", "$scalar", "dtype", "shape", "data", "a"]
            ),
            inner,
            max_size=3,
        ),
    ),
    max_leaves=12,
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(nodes)
def test_decode_random_json_succeeds_or_raises_checkpoint_error(value: Any) -> None:
    with suppress(CheckpointError):
        decode(value)


def test_decode_plain_arrays_does_not_parse_header(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Threads may read concurrently, where CPython's parser fails occasionally."""
    monkeypatch.setattr(np.lib.format, "read_array_header_1_0", lambda file: pytest.fail("parsed"))
    state = np.random.default_rng(1).bit_generator.state
    for value in (np.arange(624, dtype=np.uint32), np.asfortranarray(np.eye(3)[:2]), np.array("x")):
        found = decode(encode({"value": value, "state": state}, "it"))
        assert found["state"] == state
        assert found["value"].dtype == value.dtype
        assert found["value"].flags.f_contiguous == value.flags.f_contiguous
        assert np.array_equal(found["value"], value)
