"""Values, buffers and comparisons for the tests of the native AdamW."""

from __future__ import annotations

import numpy as np
import torch

from infinity.optim import adamw
from infinity.optim.adamw import AdamHyper

BF16 = torch.bfloat16
FLOATS = (torch.float32, torch.bfloat16)
ADAMW = AdamHyper(lr=1e-2, weight_decay=0.1)
L2 = AdamHyper(lr=1e-2, weight_decay=0.1, decoupled=False)
PATTERNS = """
    0 1 7fff 8000 18000 7fffff 800000 34000000 3f7fffff 3f800000 3f808000 3f818000 7f7f7fff
    7f7f8000 7f7fffff 7f800000 7f800001 7f808000 7fbfffff 7fc00000 7fff7fff 7fff8000 7fffffff
    """
SPECIAL = np.array([int(pattern, 16) for pattern in PATTERNS.split()], dtype=np.uint32)
SPECIAL = np.concatenate([SPECIAL, SPECIAL | np.uint32(0x80000000)])


class Source:
    """Seeded tensors of every kind of value, at any element offset in a larger buffer."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)

    def floats(self, n: int, dtype: torch.dtype, *, wild: bool = True) -> torch.Tensor:
        scale = 10.0 ** float(self.random.integers(-6, 3))
        values = (self.random.standard_normal(n) * scale).astype(np.float32)
        if wild:
            kind = self.random.integers(0, 8, n)
            bits = self.random.integers(0, 2**32, n, dtype=np.uint32)
            special = self.random.choice(SPECIAL, n)
            mixed = np.where(kind == 0, bits, np.where(kind == 1, special, values.view(np.uint32)))
            values = mixed.astype(np.uint32).view(np.float32)
        return self.place(torch.from_numpy(values), dtype)

    def place(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        offset = int(self.random.integers(0, 16))
        if dtype == torch.bfloat16:  # the upper half as it is: keeps payloads of NaN
            high = (tensor.view(torch.int32) >> 16).to(torch.int16)
            room = torch.zeros(tensor.numel() + 32, dtype=torch.int16)
            room[offset : offset + tensor.numel()] = high
            return room.view(torch.bfloat16)[offset : offset + tensor.numel()]
        room = torch.zeros(tensor.numel() + 32, dtype=torch.int32)
        room[offset : offset + tensor.numel()] = tensor.view(torch.int32)
        return room.view(torch.float32)[offset : offset + tensor.numel()]

    def state(self, n: int, *, split: bool, wild: bool = True) -> list[torch.Tensor | None]:
        """(weight, residual, moment1, moment2), each at an offset of its own."""
        master = self.floats(n, torch.float32, wild=wild)
        moment1 = self.floats(n, torch.float32, wild=wild)
        moment2 = self.floats(n, torch.float32, wild=wild)
        if self.random.integers(0, 4) or not wild:
            moment2.abs_()
        if not split:
            return [master, None, moment1, moment2]
        weight, residual = adamw.split_master(master)
        weights = self.place((weight.view(torch.int16).int() << 16).view(torch.float32), BF16)
        room = torch.zeros(n + 16, dtype=torch.int16)
        room[7 : 7 + n] = residual
        return [weights, room[7 : 7 + n], moment1, moment2]


def bits(tensor: torch.Tensor) -> np.ndarray:
    kind = torch.int32 if tensor.dtype == torch.float32 else torch.int16
    return tensor.view(kind).numpy()


def room_of(tensor: torch.Tensor) -> torch.Tensor:
    """The whole buffer that `tensor` is cut from, to see writes outside the range."""
    whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    return whole.view(torch.int16)


def copy_in_place(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """A copy that keeps the offset inside its buffer, hence the misalignment."""
    if tensor is None:
        return None
    storage = tensor.untyped_storage().clone()
    empty = torch.empty(0, dtype=tensor.dtype)
    return empty.set_(storage, tensor.storage_offset(), tensor.shape)


def assert_same(got: list[torch.Tensor | None], want: list[torch.Tensor | None]) -> None:
    for one, other in zip(got, want, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            np.testing.assert_array_equal(room_of(one).numpy(), room_of(other).numpy())


def equal_or_both_nan(one: torch.Tensor, other: torch.Tensor) -> bool:
    same = torch.from_numpy(bits(one) == bits(other))
    return bool((same | (one.isnan() & other.isnan())).all())
