"""Bytes per lane of one steady step, by running the plan's own rules on counted slots.

The rules are those of `policy` and `tape`; what a run really moves is counted by the lanes and
must come out equal (tests hold that).
"""

from __future__ import annotations

from collections.abc import Collection

from infinity.plan import policy
from infinity.plan.layout import Kind, Tier
from infinity.plan.plan import LANES, Plan, publishes, updated_on_device
from infinity.plan.tape import Tape, guess_cycle


def forecast_bytes(plan: Plan, cycle: list[int] | None = None) -> dict[str, int]:
    """Bytes per lane and steady step; `cycle` is a learnt tape, else the usual order is assumed."""
    run = _CountedRun(plan, cycle or guess_cycle(len(plan.units), backward=True))
    run.step()
    before = dict(run.moved)
    run.step()
    return {lane: run.moved[lane] - before[lane] for lane in LANES}


class _CountedRun:
    """A run without data: slots are sets of unit indices, movements are additions."""

    def __init__(self, plan: Plan, cycle: list[int]) -> None:
        self.plan = plan
        self.tape = Tape(cycle)
        self.moved = dict.fromkeys(LANES, 0)
        self.present: list[set[int]] = [set() for _ in plan.slot_classes]
        self.pending: list[int] = []
        self.current = -1

    def step(self) -> None:
        for micro_batch in range(self.plan.micro_batches):
            self.wraps = micro_batch + 1 < self.plan.micro_batches
            self.tape.begin()
            for unit in self.tape.sequence:
                self._use(unit)
            self._gradients(micro_batch)
            self.tape.end()
        trained = [u for u in self.tape.first_uses() if self.plan.units[u].numel]
        for slots in self.present:
            slots.difference_update(trained)
        while self.pending:  # never used in the cycle: swept home
            self._sweep(self.pending.pop(0), publish=False)
        self.pending = trained
        self._run_sweep()

    def _use(self, unit: int) -> None:
        self.current = unit
        self.tape.advance(unit)
        slot_class = self.class_of(unit)
        if slot_class is not None and not self.holds_slot(unit):
            if not self.num_free(slot_class):
                policy.make_slot_free(
                    self, slot_class, lambda u: self.tape.distance(u, wraps=self.wraps)
                )
            self._run_sweep()
            if not self.holds_slot(unit):
                self.fetch(unit)
        policy.look_ahead(self, self.tape, self.plan.look_ahead, wraps=self.wraps)
        self._run_sweep()

    def _run_sweep(self) -> None:
        while self.pending:
            unit = self.pending[0]
            slot_class = self.class_of(unit) if self.publishes(unit) else None
            if slot_class is not None and not self.num_free(slot_class):
                return
            self._sweep(self.pending.pop(0), publish=self.publishes(unit))
            if slot_class is not None:
                self.present[slot_class].add(unit)

    def _sweep(self, unit: int, *, publish: bool) -> None:
        layout, homes = self.plan.units[unit], self.plan.homes[unit]
        record = self.plan.record_bytes(layout)
        self.moved["disk_read"] += record
        self.moved["disk_write"] += record
        gradient = layout.numel * self.plan.gradient_itemsize
        if homes.gradient is Tier.DISK:
            self.moved["disk_read"] += gradient
        if publish and homes.weight is not Tier.DEVICE and not self.plan.unified:
            self.moved["to_device"] += layout.trained_bytes
        if self.plan.unified or updated_on_device(self.plan, unit):
            return
        for kind in self.plan.precision.kinds:
            if homes.of(kind) is Tier.DEVICE:
                nbytes = self.plan.range_bytes(layout, kind)
                self.moved["from_device"] += nbytes
                self.moved["to_device"] += nbytes
        if homes.of(Kind.GRADIENT) is Tier.DEVICE:  # for the update, and for a norm on the host
            normed = sum(s.numel for s in layout.trained_segments) * self.plan.gradient_itemsize
            self.moved["from_device"] += gradient + (0 if self.plan.device_kernels else normed)

    def _gradients(self, micro_batch: int) -> None:
        for unit in self.tape.first_uses():
            layout, homes = self.plan.units[unit], self.plan.homes[unit]
            nbytes = layout.numel * self.plan.gradient_itemsize
            if homes.gradient is Tier.DISK:
                self.moved["disk_write"] += nbytes
                self.moved["disk_read"] += nbytes if micro_batch else 0
            if not self.plan.unified and homes.gradient is not Tier.DEVICE:
                self.moved["from_device"] += sum(s.nbytes for s in layout.trained_segments)

    # SlotView
    def class_of(self, unit: int) -> int | None:
        return self.plan.class_of(unit)

    def holds_slot(self, unit: int) -> bool:
        return any(unit in slots for slots in self.present)

    def is_pending(self, unit: int) -> bool:
        return unit in self.pending

    def publishes(self, unit: int) -> bool:
        return publishes(self.plan, unit)

    def num_free(self, slot_class: int) -> int:
        return self.plan.slot_classes[slot_class].count - len(self.present[slot_class])

    def evictable(self, slot_class: int) -> Collection[int]:
        return self.present[slot_class] - {self.current}

    def evict(self, unit: int) -> bool:
        for slots in self.present:
            slots.discard(unit)
        return True

    def fetch(self, unit: int) -> None:
        layout, homes = self.plan.units[unit], self.plan.homes[unit]
        slot_class = self.class_of(unit)
        assert slot_class is not None
        self.present[slot_class].add(unit)
        if homes.weight is Tier.DISK:
            self.moved["disk_read"] += layout.slot_bytes
        if not self.plan.unified:
            self.moved["to_device"] += layout.slot_bytes
