"""Optimizer kernels on raw CPU memory; results are bitwise equal on every instruction set.

Addresses are integers, aligned to the element size; counts are in elements. The caller keeps the
memory allocated during a call, and ranges that are written must not overlap others.
"""

from typing import Any

BF16: int
FP32: int
FP16: int

def rules() -> list[str]:
    """Return the names of the rules in csrc/adam/update.inl; the index is the code."""

def isas() -> list[str]:
    """Return the instruction sets supported by this CPU, the widest last."""

class Piece:
    """Validated arguments of one update: addresses, formats and the scalars of one step."""

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
        master_state: int,
        moment1: int,
        scales1: int,
        moment2: int,
        scales2: int,
        gradient: int,
        scalars: list[float],
    ) -> None:
        """Raise ValueError for unknown codes and null, misaligned or overlapping addresses.

        Addresses that rule, layout and format do not use are ignored.
        """

def read_pieces(
    pieces: list[Any],
    settings: list[tuple[int, int, list[float]]],
    formats: tuple[Any, ...],
    tensor_type: type,
    api: object,
) -> list[Piece] | None:
    """Convert `infinity.optim.cpu.Piece` tuples; None if any is invalid or needs the full checks.

    `settings` has (rule, number of moments, scalars) of each piece; `formats` has the moment
    formats in the order of their codes; `api` is `tensor_type.__dlpack_c_exchange_api__`.
    """

def check_apart(pieces: list[Piece]) -> None:
    """Raise ValueError if memory that a piece writes overlaps other memory of the pieces."""

class Pool:
    """Worker threads, and the kernels of one instruction set.

    The first large call starts the threads. Methods may be called from several threads at once and
    release the GIL; all but `close` raise RuntimeError after `close`, and in a forked child.
    """

    def __init__(self, num_threads: int = 0, isa: str = "auto", root: str = "/") -> None:
        """Create a pool; raises ValueError for an `isa` that this CPU does not support.

        `num_threads` includes the calling thread; 0 means all CPUs of the affinity mask. NUMA nodes
        are read from `root`/sys.
        """

    @property
    def num_threads(self) -> int: ...
    @property
    def isa(self) -> str: ...
    @property
    def nodes(self) -> list[list[int]]:
        """The usable CPUs of each NUMA node."""

    @property
    def node_of_thread(self) -> list[int]:
        """Index in `nodes` of each thread; the first one is the caller."""

    def close(self) -> None:
        """Join the threads; calls in progress complete. Idempotent."""

    def update(self, pieces: list[Piece]) -> None:
        """Update all pieces in place; no two may share memory (see `check_apart`)."""

    def accumulate(
        self, *, n: int, target: int, target_dtype: int, source: int, source_dtype: int
    ) -> None:
        """Add `source` to `target` in fp32; 16-bit results are rounded to nearest even."""

    def convert(
        self, *, n: int, target: int, target_dtype: int, source: int, source_dtype: int
    ) -> None:
        """Copy `source` to `target`, rounded to nearest even."""

    def square_sum(self, *, n: int, source: int, source_dtype: int) -> float:
        """Return the sum of squares in fp64, added in the order defined in csrc/adam/passes.inl."""

    def square_blocks(self, *, n: int, source: int, source_dtype: int, sums: int) -> None:
        """Write the fp64 sum of squares of each block of 4096 elements to `sums`."""

    def fold_squares(self, *, n: int, sums: int) -> float:
        """Return the `square_sum` of `n` block sums, which are not modified."""

    def split(self, *, n: int, master: int, weight: int, residual: int) -> None:
        """Split fp32 masters into bf16 weights and int16 residuals, losslessly."""

    def join(self, *, n: int, weight: int, residual: int, master: int) -> None:
        """Compute the fp32 masters from weights and residuals; the inverse of `split`."""

    def encode(
        self, *, n: int, values: int, moment: int, scales: int, format: int, is_signed: bool
    ) -> None:
        """Convert fp32 `values` to a moment format, rounded to nearest."""

    def decode(
        self, *, n: int, values: int, moment: int, scales: int, format: int, is_signed: bool
    ) -> None:
        """Convert a moment to fp32 `values`."""

    def copy(self, *, nbytes: int, target: int, source: int) -> None:
        """Copy bytes; large copies bypass the caches."""
