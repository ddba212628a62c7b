"""Striping of one logical address space over several drives.

Extents are allocated consecutively, so the logical space is dense; it is distributed when all
extents are known. Each record is split over the drives. An optimizer pass has only two reads in
flight and consumes them in order: with unsplit records a drive would be idle whenever two
consecutive records are on the other one, and a blocking fetch would run at the speed of one drive.

Each section of a record (the weights, the moments) is distributed by a separate count, because a
fetch reads the weights only: they must also be spread in proportion, in total and over any few
consecutive records.
"""

from __future__ import annotations

import operator
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from infinity.errors import CheckpointError
from infinity.types import PAGE, round_up


@dataclass(frozen=True, slots=True)
class FileRange:
    """A byte range of the file of one path."""

    path_index: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Striping:
    """Inputs that determine the distribution of the logical space, with the bytes used per path."""

    directories: tuple[Path, ...]
    stripe_bytes: int
    speeds: tuple[float, ...]
    capacities: tuple[int, ...]
    used: tuple[int, ...]


class Stripes:
    """Logical space of one run: `add` all extents, `distribute` once, then look up `pieces`."""

    def __init__(self, num_paths: int, stripe_bytes: int) -> None:
        self.total = 0
        self._num_paths = num_paths
        self._stripe_bytes = stripe_bytes
        self._extents: list[tuple[int, tuple[int, ...]]] = []  # bytes and cuts of each extent
        # One entry per range that is contiguous in the logical space and in its file. Arrays,
        # because a terabyte has a million stripes.
        self._starts = array("q")
        self._paths = array("H")
        self._offsets = array("q")

    def add(self, nbytes: int, cuts: Sequence[int] = ()) -> int:
        """Reserve full pages and return the logical offset; sections begin at 0 and each cut."""
        assert not self._starts, "extents are added before they are placed"
        start = self.total
        self.total += round_up(nbytes, PAGE)
        if self._num_paths > 1:
            self._extents.append((self.total - start, tuple(cuts)))
        return start

    def distribute(self, weights: Sequence[float], capacities: Sequence[int]) -> list[int]:
        """Distribute all extents in proportion to `weights`; return the bytes used per path.

        `capacities` limits the bytes per path; their sum must be at least the total. If a path is
        too small for its share, its bytes are spread over all extents, and the other paths take
        the remainder in proportion.
        """
        if self._num_paths == 1:
            self._append(0, 0, 0)
            return [self.total]
        capacities = [r // PAGE * PAGE for r in capacities]
        assert sum(capacities) >= self.total, (capacities, self.total)
        dealer = _Dealer(fair_shares(self.total, weights, capacities), capacities)
        logical = 0
        for nbytes, cuts in self._extents:
            edges = sorted({0, nbytes, *(c // PAGE * PAGE for c in cuts)})
            for section, (start, end) in enumerate(pairwise(edges)):
                for at in range(start, end, self._stripe_bytes):
                    size = min(self._stripe_bytes, end - at)
                    for piece in dealer.deal(section, size):
                        self._append(logical, piece.path_index, piece.offset)
                        logical += piece.nbytes
        self._extents.clear()
        return dealer.used

    def redistribute(self, stored: Striping, sizes: Sequence[int]) -> None:
        """Reproduce the distribution of a continued run; raises `CheckpointError` on a mismatch.

        `sizes` are the sizes of the files in bytes.
        """
        capacities = stored.capacities or (self.total,)
        used = (
            self.distribute(stored.speeds or (1.0,), capacities)
            if sum(capacities) >= self.total
            else []
        )
        if tuple(used) != stored.used or any(map(operator.lt, sizes, used)):
            raise CheckpointError(
                f"the durable run in {stored.directories[0]} needs {used} bytes of its state "
                f"files; they were {list(stored.used)} and are {list(sizes)}",
                because="a file was truncated, or another version of infinity striped them "
                "differently",
            )

    def _append(self, start: int, path: int, offset: int) -> None:
        """Append an entry, unless it continues the last one."""
        is_next = self._starts and self._offsets[-1] + (start - self._starts[-1]) == offset
        if is_next and self._paths[-1] == path:
            return
        self._starts.append(start)
        self._paths.append(path)
        self._offsets.append(offset)

    def pieces(self, start: int, nbytes: int) -> Iterator[FileRange]:
        """Yield the file ranges of `nbytes` from the logical offset `start`, in logical order."""
        index, end = bisect_right(self._starts, start) - 1, start + nbytes
        while start < end:
            next_start = self._starts[index + 1] if index + 1 < len(self._starts) else end
            size = min(next_start, end) - start
            offset = self._offsets[index] + (start - self._starts[index])
            yield FileRange(self._paths[index], offset, size)
            start += size
            index += 1


def fair_shares(total: int, weights: Sequence[float], capacities: Sequence[int]) -> list[float]:
    """Return bytes per path so that all finish together; a path too small for that is filled."""
    shares = [0.0] * len(weights)
    remaining, open_paths = float(total), set(range(len(weights)))
    while open_paths and remaining > 0:
        rate = remaining / sum(weights[p] for p in open_paths)
        full = {p for p in open_paths if weights[p] * rate >= capacities[p]}
        for path in full or open_paths:
            shares[path] = float(capacities[path]) if full else weights[path] * rate
        if not full:
            break
        remaining -= sum(capacities[p] for p in full)
        open_paths -= full
    return shares


class _Dealer:
    """Assignment of each stripe to the path that is furthest behind its share."""

    def __init__(self, shares: Sequence[float], capacities: Sequence[int]) -> None:
        self.used = [0] * len(capacities)
        self._shares = shares
        self._capacities = capacities
        self._used_by_section: dict[int, list[int]] = {}

    def deal(self, section: int, nbytes: int) -> Iterator[FileRange]:
        """Yield the file ranges of a stripe of `section`: one, unless it fits on no path."""
        section_used = self._used_by_section.setdefault(section, [0] * len(self.used))
        while nbytes:
            free_bytes = [
                capacity - used for capacity, used in zip(self._capacities, self.used, strict=True)
            ]
            fits = [
                p for p in range(len(free_bytes)) if free_bytes[p] >= nbytes and self._shares[p] > 0
            ]
            if fits:
                path = min(
                    fits, key=lambda p: (section_used[p] + self.used[p] + nbytes) / self._shares[p]
                )
                size = nbytes
            else:
                path = max(range(len(free_bytes)), key=lambda p: free_bytes[p])
                size = min(nbytes, free_bytes[path])
            yield FileRange(path, self.used[path], size)
            self.used[path] += size
            section_used[path] += size
            nbytes -= size
