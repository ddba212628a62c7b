"""What a sample moves: which bytes of which test files, in which order, from and to which slots."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

Mode: TypeAlias = Literal["read", "write", "mixed"]
MODES: tuple[Mode, ...] = ("read", "write", "mixed")


@dataclass(frozen=True)
class Span:
    """A range of one test file that is gone through `num_passes` times, front to back."""

    offset: int
    nbytes: int
    num_passes: int

    @property
    def total_bytes(self) -> int:
        """Bytes moved over all passes."""
        return self.nbytes * self.num_passes


@dataclass(frozen=True)
class Piece:
    """One chunk that is moved: `is_write`, byte `offset` in its file, and its number in the file.

    `index` counts the chunks of the file from its beginning; the pattern a chunk carries follows
    from it (see `Testbed.pattern`).
    """

    is_write: bool
    offset: int
    index: int


@dataclass(frozen=True)
class Load:
    """One sample for every contender alike: per test file a span to read and one to write.

    `salt` differs from sample to sample and shifts the patterns that are written, so that a write
    which did not happen cannot look like one that did.
    """

    mode: Mode
    chunk_bytes: int
    reads: tuple[Span | None, ...]
    writes: tuple[Span | None, ...]
    salt: int = 0

    @property
    def total_bytes(self) -> int:
        """Bytes moved in both directions over all files."""
        return sum(span.total_bytes for span in (*self.reads, *self.writes) if span)

    @property
    def num_files(self) -> int:
        """How many test files take part."""
        return len(self.reads)

    def pieces(self, file_index: int) -> Iterator[Piece]:
        """Yield the chunks of one file in order; a read and a write take turns when mixed."""
        reads = _chunks(self.reads[file_index], False, self.chunk_bytes)
        writes = _chunks(self.writes[file_index], True, self.chunk_bytes)
        if self.mode != "mixed":
            yield from reads
            yield from writes
            return
        for pair in zip(reads, writes, strict=True):
            yield from pair

    def blocks(self, file_index: int, block_bytes: int) -> Iterator[tuple[Piece, int, int]]:
        """Yield (piece, start in it, bytes) of one file; when mixed, blocks take turns."""
        pieces = list(self.pieces(file_index))
        group = 2 if self.mode == "mixed" else 1
        for first in range(0, len(pieces), group):
            for start in range(0, self.chunk_bytes, block_bytes):
                nbytes = min(block_bytes, self.chunk_bytes - start)
                for piece in pieces[first : first + group]:
                    yield piece, start, nbytes


def _chunks(span: Span | None, is_write: bool, chunk_bytes: int) -> Iterator[Piece]:
    if span is None:
        return
    for _ in range(span.num_passes):
        for offset in range(span.offset, span.offset + span.nbytes, chunk_bytes):
            yield Piece(is_write, offset, offset // chunk_bytes)


def make_load(
    mode: Mode,
    *,
    rates: Sequence[float],
    target_s: float,
    chunk_bytes: int,
    region_bytes: int,
) -> Load:
    """Return a load that takes about `target_s` seconds.

    `rates` are bytes per second of each file's drive in this mode, both directions together. Each
    file takes part in proportion, so that the drives end together; not at all at 0. Every file
    has a first region of `region_bytes` (whole chunks) to read and a second one as large to write.
    """
    assert region_bytes % chunk_bytes == 0, (region_bytes, chunk_bytes)
    reads: list[Span | None] = []
    writes: list[Span | None] = []
    for rate in rates:
        if not rate:
            reads.append(None)
            writes.append(None)
            continue
        wanted = rate * target_s / (2 if mode == "mixed" else 1)
        num_chunks = max(1, -(-int(wanted) // chunk_bytes))
        in_region = region_bytes // chunk_bytes
        # Whole passes, so that contenders who cut the range differently move the same bytes.
        num_passes = max(1, round(num_chunks / in_region))
        nbytes = min(num_chunks, in_region) * chunk_bytes
        reads.append(Span(0, nbytes, num_passes) if mode != "write" else None)
        writes.append(Span(region_bytes, nbytes, num_passes) if mode != "read" else None)
    return Load(mode, chunk_bytes, tuple(reads), tuple(writes))
