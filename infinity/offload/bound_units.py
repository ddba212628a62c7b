"""Binding of units' parameters to their slots, and detection of edits of bound parameters.

[Note: released]
Parameters are bound while a call runs, and released when it returns: their unit stays in its slot,
and is bound again at its next use, which costs a microsecond per parameter. A unit accessed outside
a call (`engine.module.norm.weight`) stays bound, since the caller will read it, and its checksum is
compared when the next call begins (CRC32C of that unit only, at about 5 GB/s).
"""

from __future__ import annotations

import torch

from infinity.errors import ResidencyError
from infinity.model.parameters import Edit, ParameterBinding
from infinity.offload.failure import FailureLatch
from infinity.offload.slots import Residency, SlotLedger
from infinity.plan.plan import Plan
from infinity.storage.disk import checksum


class BoundUnits:
    """Binding state of all units; used by the training thread only."""

    def __init__(
        self, plan: Plan, ledger: SlotLedger, binding: ParameterBinding, failure: FailureLatch
    ) -> None:
        self._plan = plan
        self._ledger = ledger
        self._entries = ledger.entries
        self._binding = binding
        self._failure = failure
        self._accessed_outside: set[int] = set()  # bound, and accessed outside a call
        self._checked: set[tuple[int, bool]] = set()  # (unit, grad mode) with checksums

    def bind(self, unit: int) -> None:
        """Make the parameters of a resident unit views of its slot.

        Raises `ResidencyError` if a parameter was edited while it was offloaded.
        """
        entry = self._entries[unit]
        assert entry.slot is not None
        if not entry.views:
            entry.views = self._binding.views(unit, entry.slot.views, entry.slot.flat)
        self._binding.bind(unit, entry.views)
        entry.bound = True

    def bind_if_resident(self, unit: int) -> None:
        """Bind the unit if its full weights are resident."""
        entry = self._entries[unit] if unit >= 0 else None
        if entry is None or entry.residency is not Residency.RESIDENT or not entry.gathered:
            return
        device = self._ledger.device
        device.sync_compute_stream()
        if not entry.bound:
            device.compute_wait(entry.ready)
            self._ledger.dequantize(unit)
            self.bind(unit)

    def checksum_for_edits(self, unit: int, *, reached: bool) -> None:
        """Compute checksums of a unit that user code may edit; `reached` if outside a call.

        Inside a call only the first forward with gradients, and the first without, are checked; see
        [Note: edits of bound parameters] in `model/parameters.py`.
        """
        entry = self._entries[unit]
        if reached:
            self._accessed_outside.add(unit)
        else:
            key = unit, torch.is_grad_enabled()
            if key in self._checked:
                return
            self._checked.add(key)
        if entry.checksums is None:
            entry.checksums = [checksum(view) for view in entry.views]

    def verify(self, unit: int | None = None, *, every: bool = False) -> None:
        """Raise the error that `find_edit` returns."""
        error = self.find_edit(unit, every=every)
        if error is not None:
            raise error

    def find_edit(self, unit: int | None = None, *, every: bool) -> ResidencyError | None:
        """Return the error for the first edited parameter; units with edits are offloaded.

        Checks the units accessed outside calls and `unit`, or with `every` all units.
        """
        error = None
        requested = range(len(self._entries)) if every else [] if unit is None else [unit]
        for checked in self._accessed_outside.union(requested):
            if self._entries[checked].bound:
                unit_error = self._edit_error(checked)
                if unit_error is not None:
                    self.release(checked)
                error = error or unit_error
            elif (placeholder := self._binding.edited(checked)) is not None:
                self._binding.free(checked)
                error = error or placeholder.error()
        return error

    def release_all(self, *, reached: bool = False) -> None:
        """Unbind the units that a call bound; they stay in their slots, see [Note: released].

        Units accessed outside calls stay bound unless `reached`. Raises the first `ResidencyError`
        for an edited parameter, after all units are unbound.
        """
        error = None
        for unit, entry in enumerate(self._entries):
            if entry.bound and (reached or unit not in self._accessed_outside):
                error = self.release(unit) or error
        if error is not None:
            raise error

    def release(self, unit: int) -> ResidencyError | None:
        """Unbind the unit's parameters; return the error if one was edited.

        Edited bytes are never used: the slot is evicted. If it is the only copy, the engine fails.
        """
        entry = self._entries[unit]
        error = self._edit_error(unit)
        self._unbind(unit)
        if error is not None and entry.slot is not None and entry.slot.slot_class is not None:
            with self._ledger.changed:
                self._ledger.evict(unit)
        return error

    def evict(self, unit: int) -> None:
        """Unbind and evict the unit; raise `ResidencyError` afterwards if there was an edit.

        The caller holds `changed`.
        """
        error = None
        if self._entries[unit].bound:
            error = self._edit_error(unit)
            self._unbind(unit)
        self._ledger.evict(unit)
        if error is not None:  # only now, so that the slot is not lost
            raise error

    def _unbind(self, unit: int) -> None:
        """Unbind the unit's parameters without checking for edits."""
        entry = self._entries[unit]
        entry.bound, entry.checksums = False, None
        self._accessed_outside.discard(unit)
        self._binding.free(unit)

    def _edit_error(self, unit: int) -> ResidencyError | None:
        """Return the error for an edit of the unit's bound parameters, if there was one.

        Fails the engine if the edited copy is the only one.
        """
        entry, edit = self._entries[unit], self._binding.edited(unit)
        assert entry.slot is not None
        only_copy = entry.slot.slot_class is None  # a unit stored on the device
        name = None
        if entry.checksums is not None:
            checked = zip(
                self._plan.units[unit].segments, entry.views, entry.checksums, strict=True
            )
            name = next((s.name for s, view, before in checked if checksum(view) != before), None)
        if edit is None and name is None:
            return None
        edit = edit or Edit(name or "", in_place=True)
        if not only_copy or not (name or (edit.in_place and entry.checksums is None)):
            return edit.error()
        result = "its only copy rests where it computes: it has changed, and training cannot go on"
        # A separate exception: the traceback of the raised one would keep frames alive.
        self._failure.fail(edit.error(result))
        return edit.error(result)
