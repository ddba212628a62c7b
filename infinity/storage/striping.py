"""Which bytes lie on which drive: one logical space, dealt in stripes over several paths.

Extents are promised one after the other, so the logical space is dense; when all are known, it is
dealt. A record is split, rather than given whole to one drive: an optimizer pass has only two reads
in flight and consumes them in order, so whole records would leave a drive idle whenever two in a
row lie on the other one, and a fetch that somebody waits for would run at the speed of one drive.

Each part of a record (the weights, the moments) is dealt by a count of its own, because a fetch
reads the weights alone: they too must be spread in proportion, over the whole and over any few
records in a row.
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
    """A range of one path's file; `offset` and `nbytes` in bytes."""

    path_index: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Striping:
    """All that decides where the bytes of the logical space lie; the inputs of its dealing."""

    directories: tuple[Path, ...]
    stripe_bytes: int
    speeds: tuple[float, ...]
    room: tuple[int, ...]
    used: tuple[int, ...]


class Stripes:
    """The logical space of one run: promised, then placed once, then asked."""

    def __init__(self, num_paths: int, stripe_bytes: int) -> None:
        self.total = 0
        self._num_paths = num_paths
        self._stripe_bytes = stripe_bytes
        self._promised: list[tuple[int, tuple[int, ...]]] = []  # bytes, and where its parts start
        # One entry per stretch that is contiguous in memory and on its path; arrays, because a
        # terabyte is a million stripes.
        self._starts = array("q")
        self._paths = array("H")
        self._offsets = array("q")

    def promise(self, nbytes: int, cuts: Sequence[int] = ()) -> int:
        """Reserve whole pages; returns the logical offset. Parts begin at 0 and at each cut."""
        assert not self._starts, "extents are promised before they are placed"
        start = self.total
        self.total += round_up(nbytes, PAGE)
        if self._num_paths > 1:
            self._promised.append((self.total - start, tuple(cuts)))
        return start

    def distribute(self, weights: Sequence[float], room: Sequence[int]) -> list[int]:
        """Deal everything in proportion to `weights`, no path beyond its `room`; bytes per path.

        The rooms together must hold the total. Where one path has too little, what it has is
        spread over all extents, and the others take the rest in proportion.
        """
        if self._num_paths == 1:
            self._append(0, 0, 0)
            return [self.total]
        room = [r // PAGE * PAGE for r in room]
        assert sum(room) >= self.total, (room, self.total)
        dealer = _Dealer(fair_shares(self.total, weights, room), room)
        logical = 0
        for nbytes, cuts in self._promised:
            edges = sorted({0, nbytes, *(c // PAGE * PAGE for c in cuts)})
            for part, (start, end) in enumerate(pairwise(edges)):
                for at in range(start, end, self._stripe_bytes):
                    size = min(self._stripe_bytes, end - at)
                    for piece in dealer.deal(part, size):
                        self._append(logical, piece.path_index, piece.offset)
                        logical += piece.nbytes
        self._promised.clear()
        return dealer.used

    def distribute_again(self, stored: Striping, sizes: Sequence[int]) -> None:
        """Deal everything as it was dealt for a run that is continued; raises `CheckpointError`.

        `sizes` are those of the files in bytes.
        """
        room = stored.room or (self.total,)
        used = self.distribute(stored.speeds or (1.0,), room) if sum(room) >= self.total else []
        if tuple(used) != stored.used or any(map(operator.lt, sizes, used)):
            raise CheckpointError(
                f"the durable run in {stored.directories[0]} needs {used} bytes of its state "
                f"files; they were {list(stored.used)} and are {list(sizes)}",
                because="a file was cut short, or another version of infinity placed them",
            )

    def _append(self, start: int, path: int, offset: int) -> None:
        """Remember a stretch, unless it merely goes on where the last one ended."""
        is_next = self._starts and self._offsets[-1] + (start - self._starts[-1]) == offset
        if is_next and self._paths[-1] == path:
            return
        self._starts.append(start)
        self._paths.append(path)
        self._offsets.append(offset)

    def pieces(self, start: int, nbytes: int) -> Iterator[FileRange]:
        """The ranges that hold `nbytes` from the logical offset `start`, in logical order."""
        index, end = bisect_right(self._starts, start) - 1, start + nbytes
        while start < end:
            last = self._starts[index + 1] if index + 1 < len(self._starts) else end
            size = min(last, end) - start
            offset = self._offsets[index] + (start - self._starts[index])
            yield FileRange(self._paths[index], offset, size)
            start += size
            index += 1


def fair_shares(total: int, weights: Sequence[float], room: Sequence[int]) -> list[float]:
    """Bytes per path so that all finish together; a path without that much room is filled up."""
    shares = [0.0] * len(weights)
    left, open_paths = float(total), set(range(len(weights)))
    while open_paths and left > 0:
        rate = left / sum(weights[p] for p in open_paths)
        full = {p for p in open_paths if weights[p] * rate >= room[p]}
        for path in full or open_paths:
            shares[path] = float(room[path]) if full else weights[path] * rate
        if not full:
            break
        left -= sum(room[p] for p in full)
        open_paths -= full
    return shares


class _Dealer:
    """Gives each stripe to the path that is furthest behind its share."""

    def __init__(self, shares: Sequence[float], room: Sequence[int]) -> None:
        self.used = [0] * len(room)
        self._shares = shares
        self._room = room
        self._by_part: dict[int, list[int]] = {}

    def deal(self, part: int, nbytes: int) -> Iterator[FileRange]:
        """Where a stripe of some part of a record goes: whole, but for the last scraps of room."""
        mine = self._by_part.setdefault(part, [0] * len(self.used))
        while nbytes:
            left = [room - used for room, used in zip(self._room, self.used, strict=True)]
            fits = [p for p in range(len(left)) if left[p] >= nbytes and self._shares[p] > 0]
            if fits:
                path = min(fits, key=lambda p: (mine[p] + self.used[p] + nbytes) / self._shares[p])
                size = nbytes
            else:
                path = max(range(len(left)), key=lambda p: left[p])
                size = min(nbytes, left[path])
            yield FileRange(path, self.used[path], size)
            self.used[path] += size
            mine[path] += size
            nbytes -= size
