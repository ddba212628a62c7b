"""Checks that the frozen parameters of the next checkpoint are those of the last, byte for byte.

Most of them change only through `StateStore.write`, which counts. Where weights rest on the
device modules compute with the very bytes at rest, and `p.data.add_(1)` changes them unseen:
of those units checksums are kept, and compared before anything is shared.
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

Sums = dict[int, tuple[int, ...]]
Put = Callable[[StreamRange, Tensor], None]  # takes what a piece says


@dataclass(frozen=True)
class _Last:
    """The last checkpoint: its files, and what frozen bytes were then."""

    written: Written | None  # of several ranks the first has it
    edition: int
    sums: Sums


class FrozenBytes:
    """Follows the frozen bytes of one engine from save to save."""

    def __init__(self, plan: Plan, store: StateStore) -> None:
        self._plan = plan
        self._store = store
        self._ranks = store.ranks
        self._last: _Last | None = None
        self._edition = 0  # of the save that is under way
        self._sums: Sums = {}

    def begin(self) -> Written | None:
        """A snapshot is taken now; the checkpoint whose frozen files it may share, if any.

        Of several ranks, which all ask, the first is told.
        """
        self._edition, self._sums = self._store.frozen_edition, {}
        last = self._last
        same = last is not None and last.edition == self._edition
        reports = self._ranks.synchronize("saves a checkpoint", same)
        return last.written if last is not None and all(one for one, *_ in reports) else None

    def check(self, writer: CheckpointWriter) -> None:
        """Before anything is copied: if frozen bytes changed unseen, they are written after all."""
        if not writer.shares(FROZEN):
            return
        assert self._last is not None
        for layout in self._plan.units:
            if self._is_bare(layout):
                self.note(layout, self.read(layout))
        if self._sums != self._last.sums:
            writer.unshare(FROZEN)
            self._sums = {}

    def read(self, layout: UnitLayout) -> Tensor:
        """The frozen bytes of a shard (uint8), where they rest or a copy."""
        weights = self._store.units[layout.index].in_ram(Kind.WEIGHT)
        if weights is None:
            weights = self._store.read_shard(layout.index, Kind.WEIGHT)
        return weights[layout.trained_bytes : layout.trained_bytes + layout.frozen_bytes]

    def note(self, layout: UnitLayout, frozen: Tensor) -> None:
        """Note a unit's frozen bytes in the checkpoint."""
        if self._is_bare(layout):
            self._sums[layout.index] = checksums(frozen)

    def published(self, written: Written | None) -> None:
        """The checkpoint is there."""
        self._last = _Last(written, self._edition, self._sums)

    def _is_bare(self, layout: UnitLayout) -> bool:
        """Whether modules compute with the bytes at rest themselves."""
        return bool(layout.frozen_bytes) and self._plan.computes_where_stored(layout.index)
