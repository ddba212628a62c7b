"""Whether the frozen parameters of the next checkpoint are, byte for byte, those of the last one.

Most of them change only through `StateStore.write`, which counts. Where weights rest on the device
modules compute with the very bytes of the home, and `p.data.add_(1)` changes them unseen: of those
units checksums are kept, and compared before anything is shared.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from infinity.checkpoint.layout import FROZEN
from infinity.checkpoint.sharing import Written, checksums
from infinity.checkpoint.writer import CheckpointWriter
from infinity.memory.state import StateStore
from infinity.plan.layout import Kind, Tier, UnitLayout
from infinity.plan.plan import Plan

Sums = dict[int, tuple[int, ...]]


@dataclass(frozen=True)
class _Last:
    """The last checkpoint: its files, and what frozen bytes were then."""

    written: Written
    edition: int
    sums: Sums


class FrozenBytes:
    """Follows the frozen bytes of one engine from save to save."""

    def __init__(self, plan: Plan, store: StateStore) -> None:
        self._plan = plan
        self._store = store
        self._last: _Last | None = None
        self._edition = 0  # of the save that is under way
        self._sums: Sums = {}

    def begin(self) -> Written | None:
        """A snapshot is taken now; the checkpoint whose frozen files it may share, if any."""
        self._edition, self._sums = self._store.frozen_edition, {}
        last = self._last
        return last.written if last is not None and last.edition == self._edition else None

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
        """The frozen bytes of a unit (uint8), in its home or a copy."""
        home = self._store.units[layout.index].ram.get(Kind.WEIGHT)
        weights = home if home is not None else self._store.read(layout.index, Kind.WEIGHT)
        return weights[layout.trained_bytes : layout.trained_bytes + layout.frozen_bytes]

    def note(self, layout: UnitLayout, frozen: Tensor) -> None:
        """A unit's frozen bytes, as they are in the checkpoint."""
        if self._is_bare(layout):
            self._sums[layout.index] = checksums(frozen)

    def published(self, written: Written | None) -> None:
        """The checkpoint is there."""
        self._last = _Last(written, self._edition, self._sums) if written is not None else None

    def _is_bare(self, layout: UnitLayout) -> bool:
        """Whether modules compute with the home itself."""
        at = self._plan.homes[layout.index].weight
        return bool(layout.frozen_bytes) and at is Tier.DEVICE
