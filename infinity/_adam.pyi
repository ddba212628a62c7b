"""Optimizers and their one-pass helpers on raw CPU memory; same bits on every instruction set.

Addresses are plain integers, aligned to the element size; counts are in elements. All methods of
`Pool` release the GIL, may be called from several threads at once, and raise RuntimeError after
`close()` or in a forked child.
"""

from typing import Any

BF16: int
FP32: int
FP16: int

def rules() -> list[str]:
    """The rules of csrc/adam/update.inl, in the order of their codes."""

def isas() -> list[str]:
    """Instruction sets available on this CPU, best last."""

class Piece:
    """A checked piece of a parameter: addresses, formats and the scalars of one step."""

    def __init__(
        self,
        n: int,
        rule: int,
        layout: int,
        format: int,
        gradient_dtype: int,
        key: int,
        first: int,
        weight: int,
        rest: int,
        moment1: int,
        scales1: int,
        moment2: int,
        scales2: int,
        gradient: int,
        scalars: list[float],
    ) -> None:
        """Raise ValueError for what a kernel could not walk: null, misaligned, overlapping."""

def read_pieces(
    pieces: list[Any],
    settings: list[tuple[int, int, list[float]]],
    formats: tuple[Any, ...],
    tensor_type: type,
    api: object,
) -> list[Piece] | None:
    """Pieces from tuples of tensors (`infinity.optim.cpu.Piece`), or None if any is not plain.

    `settings` has rule, number of moments and scalars of each; `formats` the moment formats in
    the order of their codes; `api` is `tensor_type.__dlpack_c_exchange_api__`.
    """

def check_apart(pieces: list[Piece]) -> None:
    """Raise ValueError if what one piece writes overlaps what another reads or writes."""

class Pool:
    """Worker threads (started by the first large call) and the kernels of one instruction set."""

    def __init__(self, num_threads: int = 0, isa: str = "auto", root: str = "/") -> None:
        """`num_threads` counts the caller; 0 takes every CPU this process may run on."""

    @property
    def num_threads(self) -> int: ...
    @property
    def isa(self) -> str: ...
    @property
    def nodes(self) -> list[list[int]]: ...
    @property
    def node_of_thread(self) -> list[int]: ...
    def close(self) -> None: ...
    def update(self, pieces: list[Piece]) -> None:
        """One step in place; no two pieces may share memory."""

    def accumulate(
        self, *, n: int, target: int, target_dtype: int, source: int, source_dtype: int
    ) -> None: ...
    def convert(
        self, *, n: int, target: int, target_dtype: int, source: int, source_dtype: int
    ) -> None: ...
    def square_sum(self, *, n: int, source: int, source_dtype: int) -> float: ...
    def square_blocks(self, *, n: int, source: int, source_dtype: int, sums: int) -> None:
        """One fp64 sum for each block of 4096 elements: the leaves of `square_sum`'s tree."""

    def fold_squares(self, *, n: int, sums: int) -> float:
        """The tree over `n` sums of blocks, which stay as they are."""

    def split(self, *, n: int, master: int, weight: int, residual: int) -> None: ...
    def join(self, *, n: int, weight: int, residual: int, master: int) -> None: ...
    def encode(
        self, *, n: int, values: int, moment: int, scales: int, format: int, is_signed: bool
    ) -> None: ...
    def decode(
        self, *, n: int, values: int, moment: int, scales: int, format: int, is_signed: bool
    ) -> None: ...
    def copy(self, *, nbytes: int, target: int, source: int) -> None: ...
