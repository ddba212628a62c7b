"""AdamW and its one-pass helpers on raw CPU memory; same bits on every instruction set.

Addresses are plain integers, aligned to the element size; counts are in elements. All methods of
`Pool` release the GIL, may be called from several threads at once, and raise RuntimeError after
`close()` or in a forked child.
"""

BF16: int
FP32: int

def isas() -> list[str]:
    """Instruction sets available on this CPU, best last."""

class Pool:
    """Worker threads (started by the first large call) and the kernels of one instruction set."""

    def __init__(self, num_threads: int = 0, isa: str = "auto") -> None:
        """`num_threads` counts the caller; 0 takes every CPU this process may run on."""

    @property
    def num_threads(self) -> int: ...
    @property
    def isa(self) -> str: ...
    def close(self) -> None: ...
    def adam(
        self,
        *,
        n: int,
        weight: int,
        residual: int,
        moment1: int,
        moment2: int,
        gradient: int,
        gradient_dtype: int,
        scalars: tuple[float, ...],
    ) -> None:
        """One step in place; `residual` 0 means an fp32 weight. `scalars`: see optim/adamw.py."""

    def accumulate(
        self, *, n: int, target: int, target_dtype: int, source: int, source_dtype: int
    ) -> None: ...
    def convert(
        self, *, n: int, target: int, target_dtype: int, source: int, source_dtype: int
    ) -> None: ...
    def square_sum(self, *, n: int, source: int, source_dtype: int) -> float: ...
    def split(self, *, n: int, master: int, weight: int, residual: int) -> None: ...
    def join(self, *, n: int, weight: int, residual: int, master: int) -> None: ...
    def copy(self, *, nbytes: int, target: int, source: int) -> None: ...
