"""Reading a durable directory by parameter name, without an engine: for tools, and other homes.

Everything follows from `plan.json` and the last commit record. The directory is locked for
reading, so that no run goes on in it meanwhile.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from infinity.checkpoint.commits import (
    SCALE_BYTES,
    SCALES,
    committed_extents,
    holders,
    itemsize,
    last_commit,
    plan_of,
)
from infinity.checkpoint.durability import SUMS_NAME
from infinity.checkpoint.durable_runs import read_run
from infinity.errors import CheckpointError, MachineError, listed
from infinity.files import LockFile
from infinity.formats import MOMENT_BLOCK
from infinity.offload.state import UnitState, promise_extents
from infinity.plan.layout import PAGE, Kind, Segment, Tier, round_up
from infinity.plan.plan import Plan
from infinity.storage.disk import CHECKSUM_BYTES, STATE_NAME, Extent, wrong_pages
from infinity.storage.run_dir import lock_durable
from infinity.storage.striping import Stripes

__all__ = ["SCALES", "DurableReader"]

_VERIFY_BYTES = 1 << 20  # read at once, whole pages


class DurableReader:
    """The last committed state of a durable run; a context manager.

    `directories` are those of the run, the first one first; `plan_facts` is what `plan.json` says,
    `record` the commit (its `document` and `step` are beside it), `names` all parameters. Raises
    `CheckpointError` where it is damaged or incomplete, `MachineError` where a run is going on in
    it. `roots` are where directories that were moved are sought.
    """

    def __init__(self, directory: str | os.PathLike[str], roots: Iterable[Path] = ()) -> None:
        run = read_run(Path(directory).expanduser().absolute(), roots)
        self._locks: list[LockFile] = []
        self._files: list[int] = []
        self._sums = -1
        try:
            for member in run.placement.directories:
                self._locks.append(lock_durable(member, shared=True))
                self._files.append(_open(member / STATE_NAME))
            record = last_commit(run.directory, run.record.run)
            if record.checksums:
                self._sums = _open(run.directory / SUMS_NAME)
            self._stripes = Stripes(len(self._files), run.placement.stripe_bytes)
            self._plan = plan_of(run.facts, run.stored.homes)
            self._units = [UnitState(u, self._plan.record(u)) for u in self._plan.units]
            for unit, side, frozen in zip(
                self._units, record.sides, record.frozen_sides, strict=True
            ):
                promise_extents(self._plan, unit, self)
                unit.turn.current, unit.frozen_turn.current = side, frozen
            for layout, homes in zip(self._plan.units, self._plan.homes, strict=True):
                if layout.numel and homes.gradient is Tier.DISK:  # behind them, as in a run
                    self.extent(layout.numel * self._plan.gradient_itemsize)
            sizes = [os.fstat(file).st_size for file in self._files]
            self._stripes.place_again(run.placement, sizes)
        except BaseException:
            self.close()
            raise
        self.directory = run.directory
        self.directories = run.placement.directories
        self.record = record
        self.plan_facts: Mapping[str, Any] = run.facts
        self.document = record.document
        self.step = record.step
        self._places: dict[str, tuple[UnitState, Segment]] = {
            segment.name: (unit, segment)
            for unit in self._units
            for segment in unit.layout.segments
        }

    @property
    def names(self) -> tuple[str, ...]:
        """All parameters, by the names that they have in the plan."""
        return tuple(self._places)

    @property
    def kinds(self) -> tuple[str, ...]:
        """What there is of a trained parameter; of a frozen one there is only "weight"."""
        precision = self._plan.precision
        scales = [
            kind.value + SCALES
            for kind in precision.moment_kinds
            if precision.format_of(kind).num_scales(1)
        ]
        return (*(kind.value for kind in precision.kinds), *scales)

    @property
    def plan(self) -> Plan:
        """As much of the run's plan as its directory holds."""
        return self._plan

    @property
    def verified(self) -> bool:
        """Whether checksums of the state were kept (`io.verify`)."""
        return self._sums >= 0

    def nbytes(self, name: str, kind: Kind | str) -> int:
        """Bytes of all elements of a parameter in a kind, as `read` gives them."""
        _, segment = self._place(name)
        if not segment.trained:
            return segment.nbytes
        text = kind.value if isinstance(kind, Kind) else kind
        base = Kind(text.removesuffix(SCALES))
        if text.endswith(SCALES):
            return self._plan.precision.format_of(base).num_scales(segment.numel) * SCALE_BYTES
        return segment.numel * itemsize(self._plan, base)

    def segment(self, name: str) -> Segment:
        """Shape, dtype and place of a parameter; raises `CheckpointError` for unknown names."""
        return self._place(name)[1]

    def read(self, name: str, kind: Kind | str, first_element: int, count: int) -> Tensor:
        """The bytes (uint8, 1-D) of elements `first_element` to `first_element + count`.

        `kind` is a state kind, or a moment's name with "_scales" behind it: then the fp32 scales
        of all blocks of 128 elements that those elements lie in. Where checksums were kept, they
        are checked. Raises `CheckpointError`.
        """
        unit, segment = self._place(name)
        text = kind.value if isinstance(kind, Kind) else kind
        if text not in self.kinds or (not segment.trained and text != Kind.WEIGHT.value):
            there = ", ".join(self.kinds) if segment.trained else Kind.WEIGHT.value
            raise CheckpointError(f"{name!r} has no {text!r} in {self.directory}; it has {there}")
        if not 0 <= first_element <= first_element + count <= segment.numel:
            raise CheckpointError(
                f"{name!r} has {segment.numel} elements; {first_element} to "
                f"{first_element + count} were asked for"
            )
        if not segment.trained:
            return self._read_frozen(unit, segment, first_element, count)
        base, scales = Kind(text.removesuffix(SCALES)), text.endswith(SCALES)
        parts = []
        start, end = segment.offset + first_element, segment.offset + first_element + count
        for index, (first, size) in enumerate(unit.layout.chunks(self._plan.chunk_elements)):
            low, high = max(start - first, 0), min(end - first, size)
            if low < high:
                parts.append(self._read_chunk(unit, index, base, (low, high), scales=scales))
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)

    def verify(self, seen: Callable[[int], None] | None = None) -> Iterator[str]:
        """Hold every page of the committed state to its checksum; yields what is wrong.

        Each problem names file, bytes, unit, chunk and parameters. `seen` is told how many bytes
        were read. Without checksums (`verified`) nothing is read.
        """
        if not self.verified:
            return
        for file in self._files:  # what lies in memory was checked, the disk was not
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        for unit in self._units:
            for extent, chunk in committed_extents(unit):
                for start in range(0, extent.nbytes, _VERIFY_BYTES):
                    part = extent.part(start, min(_VERIFY_BYTES, extent.nbytes - start))
                    yield from self._problems(unit, chunk, part, part.offset - extent.offset)
                    if seen is not None:
                        seen(part.nbytes)

    @property
    def state_bytes(self) -> int:
        """What `verify` reads: the committed state, with its padding."""
        return sum(e.nbytes for unit in self._units for e, _ in committed_extents(unit))

    def close(self) -> None:
        """Let go of the directory; idempotent."""
        descriptors, locks = [*self._files, self._sums], self._locks
        self._files, self._locks, self._sums = [], [], -1
        for descriptor in (d for d in descriptors if d >= 0):
            os.close(descriptor)
        for lock in locks:
            lock.let_go()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def extent(self, nbytes: int, owner: str = "", cuts: Sequence[int] = ()) -> Extent:
        """As `Disk.extent` does it."""
        return Extent(self._stripes.promise(nbytes, cuts), round_up(nbytes, PAGE), owner)

    # --- inside ------------------------------------------------------------------------------

    def _place(self, name: str) -> tuple[UnitState, Segment]:
        if name not in self._places:
            raise CheckpointError(f"there is no parameter {name!r} in {self.directory}")
        return self._places[name]

    def _read_chunk(
        self, unit: UnitState, index: int, kind: Kind, elements: tuple[int, int], *, scales: bool
    ) -> Tensor:
        """Values, or scales, of elements counted from the chunk's first."""
        plan, (first, last) = self._plan, elements
        _, size = unit.layout.chunk(index, plan.chunk_elements)
        start = plan.whole_record.offset(kind, size)
        if scales:
            form = plan.precision.format_of(kind)
            start += size * form.itemsize
            first, last = first // MOMENT_BLOCK, -(-last // MOMENT_BLOCK)
            item = SCALE_BYTES
        else:
            item = itemsize(plan, kind)
        extent = unit.sides[unit.turn.current][index]
        return self._read_bytes(extent, start + first * item, (last - first) * item)

    def _read_frozen(self, unit: UnitState, segment: Segment, first: int, count: int) -> Tensor:
        item = segment.nbytes // max(segment.numel, 1)
        extent = unit.frozen_sides[unit.frozen_turn.current] if count else Extent(0, 0, "")
        return self._read_bytes(extent, segment.offset + first * item, count * item)

    def _read_bytes(self, extent: Extent, start: int, nbytes: int) -> Tensor:
        """A range of an extent; whole pages are read, and checked."""
        if not nbytes:
            return torch.empty(0, dtype=torch.uint8)
        low = start // PAGE * PAGE
        part = extent.part(low, round_up(start + nbytes, PAGE) - low)
        pages = self._read_pages(part)
        if self.verified and self._wrong_pages(part, pages):
            raise CheckpointError(
                f"{part.owner} in {self.directory} is not what was written: a checksum is wrong",
                because="the drive, or another program, changed it",
                remedy=f"infinity checkpoint verify {self.directory} names all that is damaged",
            )
        return pages[start - low : start - low + nbytes].clone()

    def _read_pages(self, part: Extent) -> Tensor:
        data = bytearray()
        for piece in self._stripes.pieces(part.offset, part.nbytes):
            try:
                got = os.pread(self._files[piece.path_index], piece.nbytes, piece.offset)
            except OSError as error:
                path = self.directories[piece.path_index] / STATE_NAME
                raise MachineError(
                    f"{path} cannot be read at byte {piece.offset}, in {part.owner}",
                    because=f"{error.strerror} (errno {error.errno})",
                    remedy="look at the drive's health (`smartctl -a`)",
                ) from error
            if len(got) < piece.nbytes:
                raise CheckpointError(f"a state file of {self.directory} ends inside {part.owner}")
            data += got
        return torch.frombuffer(data, dtype=torch.uint8)

    def _wrong_pages(self, part: Extent, pages: Tensor) -> list[int]:
        """Pages, counted from the part's first, that are not what was written."""
        count = part.nbytes // PAGE
        start = part.offset // PAGE * CHECKSUM_BYTES
        return wrong_pages(pages, os.pread(self._sums, count * CHECKSUM_BYTES, start))

    def _problems(
        self, unit: UnitState, chunk: int | None, part: Extent, start: int
    ) -> Iterator[str]:
        """What is wrong with a part that begins `start` bytes behind its extent's begin."""
        try:
            wrong = self._wrong_pages(part, self._read_pages(part))
        except (CheckpointError, MachineError) as error:
            yield error.what
            return
        for page in wrong:
            (piece,) = self._stripes.pieces(part.offset + page * PAGE, PAGE)
            low = start + page * PAGE
            held = listed(list(holders(self._plan, unit, chunk, low, low + PAGE)), limit=3)
            yield (
                f"{self.directories[piece.path_index] / STATE_NAME} is damaged: bytes "
                f"{piece.offset} to {piece.offset + PAGE - 1}, {part.owner}, which hold "
                f"{held or 'no parameter'}"
            )


def _open(path: Path) -> int:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    with suppress(OSError):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
    return descriptor
