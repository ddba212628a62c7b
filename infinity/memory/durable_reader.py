"""Reading a durable directory by parameter name, without an engine: for tools, and other homes.

Everything follows from `plan.json` and the last commit record. The directory is locked for
reading, so that no run goes on in it meanwhile.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from infinity import _aio
from infinity.errors import CheckpointError, MachineError
from infinity.formats import MOMENT_BLOCK, MomentFormat
from infinity.memory.checksums import CHECKSUM_BYTES
from infinity.memory.commits import last_commit
from infinity.memory.disk import STATE_NAME, Extent
from infinity.memory.durability import SUMS_NAME
from infinity.memory.durable_runs import read_run
from infinity.memory.state import UnitState, promise_extents
from infinity.memory.stripes import Stripes
from infinity.plan.layout import PAGE, PRECISIONS, Kind, Segment, Tier, UnitLayout, round_up
from infinity.plan.plan import Plan, RuleFacts

SCALES = "_scales"
_NUMBERS = 4  # bytes of a scale


class DurableReader:
    """The last committed state of a durable run; a context manager.

    `plan_facts` is what `plan.json` says, `document` and `step` are those of the commit, `names`
    all parameters. Raises `CheckpointError` where it is damaged or incomplete, `MachineError`
    where a run is going on in it. `roots` are where directories that were moved are sought.
    """

    def __init__(self, directory: str | os.PathLike[str], roots: Iterable[Path] = ()) -> None:
        run = read_run(Path(directory).expanduser().absolute(), roots)
        self._locks: list[int] = []
        self._files: list[int] = []
        self._sums = -1
        try:
            for member in run.placement.directories:
                self._lock(member)
                self._files.append(_open(member / STATE_NAME))
            record = last_commit(run.directory)
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

    def close(self) -> None:
        """Let go of the directory; idempotent."""
        descriptors = [*self._files, *self._locks, self._sums]
        self._files, self._locks, self._sums = [], [], -1
        for descriptor in (d for d in descriptors if d >= 0):
            os.close(descriptor)

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
            item = _NUMBERS
        else:
            item = _itemsize(plan, kind)
        extent = unit.whole[unit.turn.current][index]
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
        data = bytearray()
        for piece in self._stripes.pieces(part.offset, part.nbytes):
            got = os.pread(self._files[piece.path_index], piece.nbytes, piece.offset)
            if len(got) < piece.nbytes:
                raise CheckpointError(f"a state file of {self.directory} ends inside {part.owner}")
            data += got
        pages = torch.frombuffer(data, dtype=torch.uint8)
        if self._sums >= 0:
            self._check(part, pages)
        return pages[start - low : start - low + nbytes].clone()

    def _check(self, part: Extent, pages: Tensor) -> None:
        count = part.nbytes // PAGE
        wanted = os.pread(self._sums, count * CHECKSUM_BYTES, part.offset // PAGE * CHECKSUM_BYTES)
        found = torch.empty(count, dtype=torch.int32)
        _aio.crc32c_blocks(pages.data_ptr(), pages.numel(), PAGE, found.data_ptr())
        if bytes(found.view(torch.uint8).numpy()) != wanted:
            raise CheckpointError(
                f"{part.owner} in {self.directory} is not what was written: a checksum is wrong",
                because="the drive, or another program, changed it",
            )

    def _lock(self, directory: Path) -> None:
        descriptor = _open(directory / "lock")
        self._locks.append(descriptor)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as error:
            raise MachineError(
                f"the durable run in {directory} is in use by another process",
                remedy="end that process first",
            ) from error


def plan_of(facts: Mapping[str, Any], homes: Sequence[Any]) -> Plan:
    """As much of a run's plan as its `plan.json` holds: enough to find every byte."""
    moments = tuple(MomentFormat(name) for name in facts["moments"])
    precision = replace(PRECISIONS[facts["precision"]], moments=moments)
    units = []
    for index, unit in enumerate(facts["units"]):
        segments = tuple(
            Segment(**{**segment, "shape": tuple(segment["shape"])}, parameter=-1, group=-1)
            for segment in unit["segments"]
        )
        layout = UnitLayout(
            index, unit["name"], segments, unit["numel"], unit["frozen_bytes"], precision.weight
        )
        units.append(layout)
    return Plan(
        precision=precision,
        units=tuple(units),
        homes=tuple(homes),
        slot_classes=(),
        chunk_elements=facts["chunk_elements"],
        num_stages=0,
        look_ahead=0,
        micro_batches=1,
        gradient_itemsize=facts["gradient_itemsize"],
        unified=True,
        verify=False,
        memory={},
        budget={},
        rule=RuleFacts(name=facts["rule"], moments=moments),
        durable=True,
    )


def _itemsize(plan: Plan, kind: Kind) -> int:
    if kind is Kind.WEIGHT:
        return plan.precision.weight
    if kind is Kind.RESIDUAL:
        return plan.precision.residual
    return plan.precision.format_of(kind).itemsize


def _open(path: Path) -> int:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    with suppress(OSError):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
    return descriptor
