"""Detection of frozen parameters that changed since the last checkpoint.

Files with unchanged frozen bytes are shared with that checkpoint. Most changes go through
`StateStore.write`, which counts them. Where weights are stored on the device, modules compute with
the stored bytes, and `p.data.add_(1)` changes them undetected: checksums of those units are
recorded, and compared before files are shared.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from infinity.checkpoint.manifest import FROZEN
from infinity.checkpoint.shared_files import Written, checksums
from infinity.checkpoint.streams import StreamRange
from infinity.checkpoint.writer import CheckpointWriter
from infinity.offload.state import StateStore
from infinity.plan.layout import UnitLayout
from infinity.plan.plan import Plan
from infinity.types import Kind

Checksums = dict[int, tuple[int, ...]]
WriteRange = Callable[[StreamRange, Tensor], None]  # stores the bytes of a range


@dataclass(frozen=True)
class _LastCheckpoint:
    """The last checkpoint: its files, and the edition and checksums of its frozen bytes."""

    written: Written | None  # None except on rank 0
    edition: int
    checksums: Checksums


class FrozenBytes:
    """Change detection for the frozen bytes of one engine, from save to save."""

    def __init__(self, plan: Plan, store: StateStore) -> None:
        self._plan = plan
        self._store = store
        self._ranks = store.ranks
        self._last: _LastCheckpoint | None = None
        self._edition = 0  # of the save in progress
        self._checksums: Checksums = {}

    def begin(self) -> Written | None:
        """Begin a save; return the checkpoint whose frozen files it may share, or None.

        Collective; only rank 0 gets the checkpoint.
        """
        self._edition, self._checksums = self._store.frozen_version, {}
        last = self._last
        same = last is not None and last.edition == self._edition
        reports = self._ranks.synchronize("saves a checkpoint", same)
        all_same = all(rank_same for rank_same, *_ in reports)
        return last.written if last is not None and all_same else None

    def check(self, writer: CheckpointWriter) -> None:
        """Make `writer` write frozen bytes that changed undetected; called before the copy."""
        if not writer.shares(FROZEN):
            return
        assert self._last is not None
        for layout in self._plan.units:
            if self._may_change_undetected(layout):
                self.note(layout, self.read(layout))
        if self._checksums != self._last.checksums:
            writer.discard_shared_files(FROZEN)
            self._checksums = {}

    def read(self, layout: UnitLayout) -> Tensor:
        """Return the frozen bytes (uint8) of a shard: a view of them in RAM, or a copy."""
        weights = self._store.units[layout.index].in_ram(Kind.WEIGHT)
        if weights is None:
            weights = self._store.read_shard(layout.index, Kind.WEIGHT)
        return weights[layout.trained_bytes : layout.trained_bytes + layout.frozen_bytes]

    def note(self, layout: UnitLayout, frozen: Tensor) -> None:
        """Record the checksums of a unit's frozen bytes if they may change undetected."""
        if self._may_change_undetected(layout):
            self._checksums[layout.index] = checksums(frozen)

    def published(self, written: Written | None) -> None:
        """Make the save in progress the last checkpoint."""
        self._last = _LastCheckpoint(written, self._edition, self._checksums)

    def _may_change_undetected(self, layout: UnitLayout) -> bool:
        """Whether modules compute with the stored frozen bytes, without a copy."""
        return bool(layout.frozen_bytes) and self._plan.computes_where_stored(layout.index)
